"""A Hugging Face folder out of a sharded module: weights, configuration, tokenizer, adapters.

every rank     its part of one tensor after another    ->    rank 0 writes what an unsharded model would
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_zero.checkpoint.first_rank import on_first_rank
from lightning_zero.checkpoint.one_file import full_state_dict
from lightning_zero.checkpoint.stored import CheckpointError
from lightning_zero.collectives import Collectives
from lightning_zero.sharded_parameter import ShardedTensor

__all__ = ["save_pretrained"]


def save_pretrained(
    module: nn.Module, folder: str | Path, tokenizer: Any = None, max_shard_size: int | str = "50GB", **options: Any
) -> None:
    """Write the Hugging Face model in ``module``, sharded or plain, as `save_pretrained` writes it: every rank calls.

    Rank 0 holds one whole copy of the weights, in main precision, on the host while it writes.

    Args:
        module: a model of transformers or peft, or a module in which there is one.
        folder: for ``config.json`` and ``model.safetensors``, or several files and their index; a model of peft leaves
            its adapters.
        tokenizer: a tokenizer or processor that goes beside; default: the attribute ``tokenizer`` of ``module``.
        max_shard_size: largest file, bytes or as "5GB".
        options: for the model's own ``save_pretrained``.

    Raises:
        TypeError: there is no such model in ``module``.
        ValueError: there are several.
        CheckpointError: on every rank, if rank 0 could not write it.
    """
    model = _only_model(module)
    if tokenizer is None:
        tokenizer = getattr(module, "tokenizer", None)
    state_dict = model.state_dict()
    sharded = next((value for value in state_dict.values() if isinstance(value, ShardedTensor)), None)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    collectives = Collectives.of(None, device) if sharded is None else sharded.slicing.collectives
    whole = full_state_dict(state_dict)

    def write() -> None:
        model.save_pretrained(folder, state_dict=whole, max_shard_size=max_shard_size, **options)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)

    try:
        on_first_rank(collectives, write)
    except Exception as error:
        raise CheckpointError(f"the model in `{folder}` was not written, or not all of it: {error}") from error
    finally:
        if sharded is None:
            collectives.close()


def _only_model(module: nn.Module) -> Any:
    found: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if hasattr(part, "save_pretrained") and not inside:
            found[name] = part
    if not found:
        raise TypeError(
            f"`{type(module).__name__}` has no Hugging Face model in it. Save its state in a checkpoint:"
            " `trainer.save_checkpoint(path)`."
        )
    if len(found) > 1:
        raise ValueError(
            f"`{type(module).__name__}` has several Hugging Face models in it, {sorted(found)}. Name one:"
            f" `save_pretrained(module.{min(found)}, folder)`."
        )
    return next(iter(found.values()))
