"""What is planned for, a number of parameters or a module: each tells what a rank holds and sends under a `Choice`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from lightning_zero.blueprint import Blueprint, CutSizes, PlannedUnit, placements_of
from lightning_zero.offload import HostMemory
from lightning_zero.offloading import likely_bytes, offloaded_units
from lightning_zero.placements import STAGES, StateBytes
from lightning_zero.planner.activations import model_activation_bytes
from lightning_zero.planner.formulas import (
    ACTIVATION_BYTES,
    CHECKPOINT_BYTES,
    HEAD_DIM,
    OPTIMIZERS,
    OWN_DTYPES,
    has_paper,
    paper_formula,
    state_formula,
)
from lightning_zero.planner.need import Choice, Need, need_of
from lightning_zero.planner.question import PlanError, Question
from lightning_zero.precision import RECIPES
from lightning_zero.units import UnitSpec, find_units

__all__ = ["ModuleSubject", "SizeSubject", "Subject"]


class Subject(Protocol):
    """What is planned for."""

    @property
    def numel(self) -> float:
        """Parameters."""

    @property
    def title(self) -> str:
        """What it is, in a few words."""

    @property
    def sizes(self) -> CutSizes | None:
        """Of its units; ``None`` where only the number of its parameters is known."""

    def need(self, choice: Choice, question: Question, gpus: int) -> Need:
        """What one of ``gpus`` ranks needs."""


@dataclass(frozen=True)
class SizeSubject:
    """A Transformer of ``numel`` parameters; see `formulas.HEAD_DIM`."""

    numel: float
    sizes: None = None

    @property
    def title(self) -> str:
        return f"{self.numel / 1e9:,.4g} billion parameters"

    @property
    def layers(self) -> float:
        """L, where psi = 12 L (128 L)^2; at least 1."""
        return max(1.0, float((self.numel / (12 * HEAD_DIM**2)) ** (1 / 3)))

    @property
    def width(self) -> float:
        """h, where psi = 12 L h^2."""
        return float((self.numel / 12 / self.layers) ** 0.5)

    def need(self, choice: Choice, question: Question, gpus: int) -> Need:
        offload = bool(choice.offload)
        # One rank has nobody to share with, but for what it offloads.
        stage = choice.stage if gpus > 1 or offload else 0
        formula = state_formula(stage, question.precision, question.optimizer, offload)
        psi, unit = self.numel, self.numel / self.layers
        alone = gpus == 1
        paper = None
        if has_paper(question.precision):
            paper = StateBytes(*(f(psi, gpus) for f in paper_formula(stage, question.optimizer, offload)))
        off = formula.off_device(psi, gpus)
        main = torch.finfo(OWN_DTYPES[question.precision]).bits // 8
        gathers = 1 if formula.gathers_once else question.accumulate
        reductions_wait = question.accumulate > 1
        reductions = 1 if formula.reduces_once else question.accumulate
        return Need(
            on_device=formula.on_device(psi, gpus),
            off_device=off,
            paper=paper,
            whole_units=2 * unit * formula.unit,
            # Where they rest neither whole nor in shards, those of all micro-batches wait.
            unit_gradients=formula.unit_gradient * (psi if formula.reduces_once and reductions_wait else 2 * unit),
            activations=self._activations(choice, question, main),
            gathered=0.0 if alone else formula.gathered * psi * gathers,
            reduced=0.0 if alone else formula.reduced * psi * reductions,
            to_device=psi / gpus * _model_itemsize(question) if offload else 0.0,
            to_rest=off.gradients,
            elements=0.0 if alone else formula.elements,
        )

    def _activations(self, choice: Choice, question: Question, itemsize: int) -> float | None:
        if question.seq_len is None:
            return None
        wide = 1 if question.precision.endswith("-mixed") or itemsize == 2 else itemsize / 2
        layer = wide * question.micro_batch * question.seq_len * self.width
        if choice.activation_checkpointing not in ("", "full"):
            raise PlanError(
                f"activation_checkpointing={choice.activation_checkpointing!r} depends on the operations of a model:"
                " name one, `--model FOLDER`."
            )
        if choice.activation_checkpointing:
            return layer * (CHECKPOINT_BYTES * self.layers + ACTIVATION_BYTES)
        return layer * ACTIVATION_BYTES * self.layers


def _model_itemsize(question: Question) -> int:
    own = OWN_DTYPES[question.precision]
    return RECIPES[question.precision].dtypes(own, trained=True, gathered=True, multiplied=True).model.itemsize


class ModuleSubject:
    """A module, plain, whose parameters may be on ``meta``.

    Args:
        module: all of it, or a LightningModule.
        title: what it is.
        units: as `ZeROStrategy` takes them.
    """

    def __init__(self, module: nn.Module, title: str, units: UnitSpec | None = None) -> None:
        self.module = module
        self.title = title
        self._units = find_units(module, units)
        self._activations: dict[tuple[Any, ...], float | None] = {}

    @property
    def numel(self) -> float:
        return float(sum(parameter.numel() for parameter in self.module.parameters()))

    @property
    def sizes(self) -> CutSizes:
        return Blueprint(self.module, self._units, STAGES[3], RECIPES["32-true"], 1, None).sizes

    def units(self, choice: Choice, question: Question, gpus: int) -> list[PlannedUnit]:
        """What `shard` would make of it, the root last."""
        target = HostMemory(pin_memory=False) if choice.offload else None
        placements = placements_of(STAGES[choice.stage], gpus, target)
        blueprint = Blueprint(self.module, self._units, placements, RECIPES[question.precision], gpus, target)
        taken = set() if target is None else offloaded_units(target, likely_bytes(blueprint), torch.device("cpu"))
        return list(blueprint.units(lambda unit, trained: target is not None and unit in taken and trained))

    def need(self, choice: Choice, question: Question, gpus: int, rank: int = 0) -> Need:
        """As for any subject; ranks differ by the padding at their end, and rank 0 has none."""
        size = OPTIMIZERS[question.optimizer]
        found = need_of(
            [[group.plan for group in unit.groups] for unit in self.units(choice, question, gpus)],
            rank,
            lambda plan: size.of(plan.dtypes.main.itemsize) / plan.dtypes.main.itemsize,
            question.accumulate,
        )
        return replace(found, activations=self._activation_bytes(choice, question, bool(choice.stage) and gpus > 1))

    def _activation_bytes(self, choice: Choice, question: Question, narrow: bool) -> float | None:
        key = (choice.activation_checkpointing, question.precision, question.micro_batch, question.seq_len, narrow)
        if key not in self._activations:
            members = [member for unit in self._units for _, member in unit]
            self._activations[key] = model_activation_bytes(
                self.module, members, question.precision, question.micro_batch, question.seq_len, key[0], narrow
            )
        return self._activations[key]
