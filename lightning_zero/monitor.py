"""`ZeROMonitor`: a callback that measures what training holds, sends and waits for, beside what was planned."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_zero._lightning import installed_flavours
from lightning_zero.engine import Engine
from lightning_zero.held import held_bytes
from lightning_zero.monitor_report import Line, html_of, table_of
from lightning_zero.placements import Where
from lightning_zero.planner.need import Need, running_need
from lightning_zero.recording import Recording
from lightning_zero.resident import memory_now, memory_peak

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Callback
else:
    _Callback = installed_flavours()[0].callbacks.Callback

__all__ = ["ZeROMonitor"]

_STEPS = 3
"""Optimizer steps before one is recorded: the first ones learn the order of units and take their buffers."""

_KINDS = ("parameters", "gradients", "optimizer")


@dataclass
class _Counts:
    """Totals of this rank so far."""

    gathered: int
    reduced: int
    to_device: int
    to_rest: int
    waited: float
    at: float

    @classmethod
    def of(cls, engine: Engine) -> _Counts:
        nbytes, background = engine.collectives.nbytes, engine.background
        moved = {} if background is None else background.moved
        return cls(
            nbytes["gather"],
            nbytes["reduce"],
            moved.get("to device", 0),
            moved.get("to rest", 0),
            engine.collectives.watch.waited,
            time.monotonic(),
        )


class ZeROMonitor(_Callback):
    """Measures training under `ZeROStrategy`, and logs through the Trainer's loggers::

        trainer = Trainer(strategy="zero3", callbacks=[ZeROMonitor(report="report.html")])

    Every ``log_every_n_steps`` of the Trainer, as averages of an optimizer step since the last time, under ``zero/``:
    payload bytes gathered and reduced, bytes moved to the device and from it, seconds waited for other ranks and for
    transfers, seconds of a step, samples, tokens and FLOPs a second of all ranks and their part of what the devices can
    do; and the least and the most of any rank of memory now and at its peak, and of model state by kind.

    At the end of fit it logs a table of what was planned and what was measured. On a GPU streams wait, not the host:
    there ``zero/wait_seconds`` is what the host waited for alone.

    Args:
        report: an HTML file that rank 0 writes at the end: which unit was whole when in one step, what was sent, and
            the table.
        flops_per_token: of forward and backward; default: 6 for each trained parameter and 4 for each frozen one
            (Kaplan 2020, section 2.1).
    """

    def __init__(self, report: str | Path | None = None, flops_per_token: float | None = None) -> None:
        self._report = None if report is None else Path(report)
        self._flops_per_token = flops_per_token
        self.lines: list[Line] = []
        """Planned and measured, of this rank, at the end of fit."""
        self._reset()

    @property
    def table(self) -> str:
        """`lines` as text; rank 0 logs it at the end of fit."""
        return table_of(self.lines)

    def _reset(self) -> None:
        self._last: _Counts | None = None
        self._first_step = self._last_step = self._counted_from = 0
        self._units_peak = 0.0
        self._samples = self._tokens = 0
        self._held: dict[str, float] = {}
        self._recording: Recording | None = None
        self._recorded: Recording | None = None
        self._averages: dict[str, float] = {}
        self._need: Need | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._reset()
        if self._engine(trainer) is None:
            raise ValueError(
                f"ZeROMonitor measures `ZeROStrategy`, and this Trainer has {type(trainer.strategy).__name__}. Write"
                " `Trainer(strategy='zero3')`, or leave the callback out."
            )
        self._first_step = self._last_step = trainer.global_step

    @staticmethod
    def _engine(trainer: Any) -> Engine | None:
        engine = getattr(trainer.strategy, "engine", None)
        return engine if isinstance(engine, Engine) else None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        engine = self._engine(trainer)
        if engine is None:
            return
        done = trainer.global_step - self._first_step
        if self._report is not None and done == _STEPS and self._recorded is None:
            self._recording = self._recorded = Recording()
            self._recording.start(engine)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        engine = self._engine(trainer)
        if engine is not None and self._is_due(trainer, trainer.global_step + 1):
            self._see(engine, pl_module, trainer.optimizers, _KINDS[:2])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        engine = self._engine(trainer)
        if engine is None:
            return
        samples, tokens = _size_of(batch)
        self._samples += samples
        self._tokens += tokens
        step = trainer.global_step
        if step == self._last_step:  # gradients wait for more
            return
        if self._recording is not None:
            self._recording.stop(engine)
            self._recording = None
        if self._last is None:
            self._start_over(engine, step)
        elif self._is_due(trainer, step):
            self._see(engine, pl_module, trainer.optimizers, _KINDS[2:])
            self._log(trainer, pl_module, engine, step)
            self._start_over(engine, step)
        self._last_step = step

    def _is_due(self, trainer: Any, step: int) -> bool:
        last = step == trainer.max_steps or trainer.is_last_batch
        return bool(last or step % max(1, trainer.log_every_n_steps) == 0)

    def _start_over(self, engine: Engine, step: int) -> None:
        self._last, self._last_step = _Counts.of(engine), step
        self._counted_from = step
        self._samples = self._tokens = 0
        engine.in_flight.peak = engine.in_flight.nbytes

    def _see(self, engine: Engine, module: nn.Module, optimizers: Any, kinds: Sequence[str]) -> None:
        """Bytes by kind: gradients are there before an optimizer step, its state after it."""
        engine.finish_updates()  # what is on its way has a place of its own when it has arrived
        places: tuple[Where, ...] = ("device", "offloaded")
        for where in places:
            found = held_bytes(module, optimizers, where)
            for kind in kinds:
                self._held[f"{where} {kind}"] = float(getattr(found, kind))
        if "parameters" in kinds:
            whole = 0 if engine.placements.keeps_whole_parameters else engine.in_flight.nbytes
            self._held["device parameters"] -= whole

    def _log(self, trainer: Any, module: nn.Module, engine: Engine, step: int) -> None:
        last, now = self._last, _Counts.of(engine)
        assert last is not None
        steps = step - self._counted_from
        seconds = (now.at - last.at) / steps
        self._averages = {
            "gathered_bytes": (now.gathered - last.gathered) / steps,
            "reduced_bytes": (now.reduced - last.reduced) / steps,
            "to_device_bytes": (now.to_device - last.to_device) / steps,
            "to_rest_bytes": (now.to_rest - last.to_rest) / steps,
            "wait_seconds": (now.waited - last.waited) / steps,
            "step_seconds": seconds,
        }
        self._averages |= self._speeds(trainer, module, engine, now.at - last.at)
        self._need = running_need(engine, trainer.optimizers, trainer.accumulate_grad_batches)
        local = {
            "memory_now_bytes": memory_now(engine.collectives.device),
            "memory_peak_bytes": memory_peak(engine.collectives.device),
            "units_peak_bytes": float(engine.in_flight.peak),
            **{f"{key.replace(' ', '_')}_bytes": value for key, value in self._held.items()},
        }
        self._units_peak = local["units_peak_bytes"]
        metrics = {**self._averages, **_extremes(engine, local)}
        for logger in trainer.loggers:
            logger.log_metrics({f"zero/{name}": value for name, value in metrics.items()}, step=step)

    def _speeds(self, trainer: Any, module: nn.Module, engine: Engine, seconds: float) -> dict[str, float]:
        ranks = engine.collectives.world_size
        found = {"samples_per_second": ranks * self._samples / seconds}
        if not self._tokens:
            return found
        per_token = self._flops_per_token or sum(
            (6 if parameter.requires_grad else 4) * parameter.numel() for parameter in module.parameters()
        )
        found["tokens_per_second"] = ranks * self._tokens / seconds
        found["flops_per_second"] = found["tokens_per_second"] * per_token
        dtype = torch.bfloat16 if "bf16" in trainer.precision else torch.float16 if "16" in trainer.precision else None
        most = installed_flavours()[0].available_flops(engine.collectives.device, dtype or torch.float32)
        if most:
            found["flops_utilization"] = found["flops_per_second"] / (ranks * most)
        return found

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        engine = self._engine(trainer)
        need = self._need
        if engine is None or need is None:
            installed_flavours()[0].rank_zero_warn(
                "ZeROMonitor has nothing to tell: it measures from the end of the first optimizer step to that of the"
                " last one, and this run had one at most."
            )
            return
        held, average = self._held, self._averages
        self.lines = [
            Line("parameters on the device", need.on_device.parameters, held["device parameters"]),
            Line("gradients on the device", need.on_device.gradients, held["device gradients"]),
            Line("optimizer state on the device", need.on_device.optimizer, held["device optimizer"]),
            Line("model state off the device", need.off_device.total, sum(held[f"offloaded {k}"] for k in _KINDS)),
            Line("whole weights in flight, at most", need.whole_units, self._units_peak),
            Line("gathered in a step", need.gathered, average["gathered_bytes"]),
            Line("reduced in a step", need.reduced, average["reduced_bytes"]),
            Line("moved to the device in a step", need.to_device, average["to_device_bytes"]),
            Line("moved off the device in a step", need.to_rest, average["to_rest_bytes"]),
        ]
        flavour = installed_flavours()[0]
        speed = f"{average['step_seconds'] * 1e3:,.1f} ms a step, of which {average['wait_seconds'] * 1e3:,.1f} waited"
        flavour.rank_zero_info(f"Planned and measured, bytes of rank 0; {speed}.\n{self.table}")
        if self._report is not None and trainer.is_global_zero:
            title = f"{type(pl_module).__name__}, stage {trainer.strategy.stage}, {engine.collectives.world_size} ranks"
            recorded = self._recorded or Recording()
            self._report.write_text(html_of(title, self.lines, average, recorded.data()))


def _size_of(batch: Any) -> tuple[int, int]:
    """Samples and tokens of a batch; no tokens where it has no two-dimensional integers."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    if not tensors:
        return 0, 0
    ids = batch.get("input_ids") if isinstance(batch, dict) else tensors[0]
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.is_complex():
        return tensors[0].shape[0], 0
    return tensors[0].shape[0], ids.numel()


def _extremes(engine: Engine, local: dict[str, float]) -> dict[str, float]:
    """The least and the most over ranks: a collective."""
    engine.meet("reduce")  # another rank may need something first
    values = torch.tensor([sign * value for value in local.values() for sign in (1, -1)], dtype=torch.float64)
    engine.collectives.minimum(values).wait()
    found = values.tolist()
    pairs = zip(local, found[::2], found[1::2], strict=True)
    return {f"{name}_{end}": value for name, low, high in pairs for end, value in (("min", low), ("max", -high))}
