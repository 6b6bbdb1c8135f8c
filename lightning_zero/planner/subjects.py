"""What is planned for, a number of parameters or a module: each tells what a rank holds and sends under a `Choice`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import nn

from lightning_zero.blueprint import Blueprint, PlannedUnit, placements_of
from lightning_zero.group_plan import GroupPlan
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
from lightning_zero.planner.question import PlanError, Question
from lightning_zero.precision import RECIPES
from lightning_zero.units import UnitSpec, find_units

__all__ = ["Choice", "ModuleSubject", "Need", "SizeSubject", "Subject", "need_of"]


@dataclass(frozen=True)
class Choice:
    """One way to train: a stage and its extras."""

    stage: int
    offload: str = ""
    activation_checkpointing: str = ""


@dataclass(frozen=True)
class Need:
    """What one rank needs; bytes.

    Args:
        on_device: model state at rest.
        off_device: model state at rest off the device.
        paper: model state on the device as the paper counts it, where its way to count applies.
        whole_units: whole weights of units in flight, with the root.
        unit_gradients: whole gradients on their way to their reduction, at most.
        activations: what forwards keep for backward; ``None`` where it is not known.
        gathered: payload of gathers in an optimizer step; (N - 1) / N of it is sent.
        reduced: payload of reductions, likewise.
        to_device: moved to the device in an optimizer step.
        to_rest: moved off it.
        elements: payload of an optimizer step of one micro-batch, in elements per parameter: 2 for data parallelism.
    """

    on_device: StateBytes
    off_device: StateBytes
    paper: StateBytes | None
    whole_units: float
    unit_gradients: float
    activations: float | None
    gathered: float
    reduced: float
    to_device: float
    to_rest: float
    elements: float

    @property
    def device(self) -> float:
        """Bytes on the device in all."""
        return self.on_device.total + self.whole_units + self.unit_gradients + (self.activations or 0.0)


class Subject(Protocol):
    """What is planned for."""

    @property
    def numel(self) -> float:
        """Parameters."""

    @property
    def title(self) -> str:
        """What it is, in a few words."""

    def need(self, choice: Choice, question: Question, gpus: int) -> Need:
        """What one of ``gpus`` ranks needs."""


@dataclass(frozen=True)
class SizeSubject:
    """A Transformer of ``numel`` parameters; see `formulas.HEAD_DIM`."""

    numel: float

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


def need_of(
    units: Sequence[Sequence[GroupPlan]], rank: int, moments_of: Callable[[GroupPlan], float], micro_batches: int
) -> Need:
    """What ``rank`` needs for groups of units, the root's last, without activations.

    Args:
        moments_of: optimizer state of a group, in multiples of its main weights.
        micro_batches: of an optimizer step.
    """
    plans = [plan for unit in units for plan in unit]

    def state(off: bool) -> StateBytes:
        found = [plan.state_bytes(rank, moments_of(plan), off) for plan in plans]
        return StateBytes(*(sum(getattr(one, kind.name) for one in found) for kind in fields(StateBytes)))

    *whole, root = [sum(plan.whole_bytes for plan in unit) for unit in units]
    *gradients, root_gradients = [sum(plan.gradient_bytes for plan in unit) for unit in units]
    wait = micro_batches > 1 and not any(plan.placements.reduces_every_backward for plan in plans)
    trained = sum(plan.layout.total for plan in plans if plan.trained)
    off = state(True)
    return Need(
        on_device=state(False),
        off_device=off,
        paper=None,
        whole_units=root + _largest_pair(whole),
        # Where they rest neither whole nor in shards, those of all micro-batches wait.
        unit_gradients=root_gradients + (sum(gradients) if wait else _largest_pair(gradients)),
        activations=None,
        gathered=sum(plan.gathered_bytes(micro_batches) for plan in plans),
        reduced=sum(plan.reduced_bytes(micro_batches) for plan in plans),
        to_device=sum(plan.layout.shard_numel * plan.dtypes.model.itemsize for plan in plans if plan.offloaded),
        to_rest=off.gradients,
        elements=sum(plan.elements for plan in plans) / max(trained, 1),
    )


def _largest_pair(sizes: Sequence[float]) -> float:
    """The unit that computes and the one that is gathered ahead are whole at once; so are their gradients."""
    pairs = [first + second for first, second in itertools.pairwise(sizes)]
    return max(pairs, default=sum(sizes))
