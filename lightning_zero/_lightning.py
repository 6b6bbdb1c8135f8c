"""The installed flavours of Lightning, and the only importer of its internals.

`lightning.pytorch` and `pytorch_lightning` are the same code in two unrelated class trees: each Trainer rejects the
other's strategies. What differs between them is a `Flavour`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["Flavour", "installed_flavours", "own_collectives"]


@dataclass(frozen=True)
class Flavour:
    """One of the two packages.

    Args:
        name: "lightning" or "pytorch_lightning".
        trainer_package: what ``Trainer`` is imported from.
        ddp_strategy: its ``DDPStrategy``, which gives launchers, ranks and the process group.
        registry: names that its ``Trainer(strategy=...)`` knows.
        fitting: its ``TrainerFn.FITTING``.
        empty_init: its ``_EmptyInit``, a context that skips initializers.
        rank_zero_info: logs on rank 0.
        rank_zero_warn: warns on rank 0.
        callbacks: its module of callbacks.
        available_flops: what a device can do a second in a dtype; ``None`` where its `fabric` does not know it.
        checkpoint_io: its ``TorchCheckpointIO``, which reads and writes files where nobody plugged in another one.
    """

    name: str
    trainer_package: str
    ddp_strategy: type
    registry: Any
    fitting: Any
    empty_init: Any
    rank_zero_info: Any
    rank_zero_warn: Any
    callbacks: Any
    available_flops: Any
    checkpoint_io: Any

    @contextmanager
    def initializing(self, empty: bool) -> Iterator[None]:
        """Context in which modules are built, ``empty`` skipping their initializers."""
        with self.empty_init(enabled=empty):
            yield


def own_collectives(trainer: Any) -> list[tuple[str, Any, str]]:
    """Methods of the Trainer's loops that communicate, or let others do so, without asking the strategy.

    Returns:
        the place (see `lockstep.PLACES`), the loop, and the name of its method.
    """
    epoch = trainer.fit_loop.epoch_loop
    evaluations = (epoch.val_loop, trainer.validate_loop, trainer.test_loop)
    return [
        # A broadcast at each batch, whether some rank was told to end.
        ("batch", epoch, "_broadcast_sigterm_tensor"),
        # Logged metrics synchronize themselves.
        *(("evaluation end", loop, "_store_dataloader_outputs") for loop in evaluations),
        # Writers of predictions gather them.
        ("evaluation end", trainer.predict_loop, "on_run_end"),
    ]


_PACKAGES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}


@cache
def installed_flavours() -> tuple[Flavour, ...]:
    """The flavours that can be imported, ``lightning`` first.

    Raises:
        ImportError: none is installed.
    """
    flavours = tuple(_flavour(name, *_PACKAGES[name]) for name in _PACKAGES if find_spec(name) is not None)
    if not flavours:
        raise ImportError("lightning_zero needs Lightning: `pip install lightning`.")
    return flavours


def _flavour(name: str, pytorch: str, fabric: str) -> Flavour:
    strategies = import_module(f"{pytorch}.strategies")
    rank_zero = import_module(f"{pytorch}.utilities.rank_zero")
    return Flavour(
        name=name,
        trainer_package=pytorch,
        ddp_strategy=strategies.DDPStrategy,
        registry=strategies.StrategyRegistry,
        fitting=import_module(f"{pytorch}.trainer.states").TrainerFn.FITTING,
        empty_init=import_module(f"{fabric}.utilities.init")._EmptyInit,
        rank_zero_info=rank_zero.rank_zero_info,
        rank_zero_warn=rank_zero.rank_zero_warn,
        callbacks=import_module(f"{pytorch}.callbacks"),
        available_flops=import_module(f"{fabric}.utilities.throughput").get_available_flops,
        checkpoint_io=import_module(f"{fabric}.plugins.io.torch_io").TorchCheckpointIO,
    )
