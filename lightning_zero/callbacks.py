"""Lightning's callbacks that reach into the module: which keep copies of it, and which cannot do so sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_zero._lightning import Flavour

__all__ = ["copies_of_module", "refuse_unfit"]


def copies_of_module(trainer: Any, flavour: Flavour) -> Iterator[nn.Module]:
    """Copies of the whole module that averaging callbacks made in their ``setup``, before the strategy's."""
    kinds = flavour.callbacks
    for callback in trainer.callbacks:
        if isinstance(callback, kinds.WeightAveraging) and callback._average_model is not None:
            yield callback._average_model.module
        elif isinstance(callback, kinds.StochasticWeightAveraging) and callback._average_model is not None:
            yield callback._average_model


def refuse_unfit(trainer: Any, flavour: Flavour, async_save: bool = False) -> None:
    """See that every callback can do its work on a sharded module.

    Args:
        async_save: whether checkpoints are written in the background.

    Raises:
        ValueError: one cannot, with what to do instead.
    """
    kinds = flavour.callbacks
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if isinstance(callback, kinds.ModelPruning):
            raise ValueError(
                f"`{name}` puts new parameters in the place of sharded ones, and they would not be trained."
                " Prune before the model is sharded, in `configure_model`:"
                " `torch.nn.utils.prune.l1_unstructured(self.layer, 'weight', amount=0.5)`."
            )
        if async_save and isinstance(callback, kinds.ModelCheckpoint) and callback.save_last == "link":
            raise ValueError(
                f"`{name}(save_last='link')` links to a checkpoint that is being written: a run that is killed then has"
                " a last one that is not there. Write `save_last=True`, or leave `async_save` out."
            )
        on_exception = isinstance(callback, kinds.OnExceptionCheckpoint) or (
            isinstance(callback, kinds.ModelCheckpoint) and callback.save_on_exception
        )
        if on_exception and trainer.world_size > 1:
            raise ValueError(
                f"`{name}` saves after an exception, when other ranks, which hold parts of the checkpoint, may be gone"
                " or elsewhere. Save on the way instead: `ModelCheckpoint(every_n_train_steps=1000)`."
            )
