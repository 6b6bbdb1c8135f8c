"""Bytes a rank in terms of psi and N: one table, which the command and the page both read.

    bytes = whole * psi + share * psi / N            psi: parameters, N: ranks

The coefficients are read off the formulas that the engine is checked against, see `GroupPlan`. `paper_formula` counts
as Rajbhandari 2020 (section 3.1) does: 2-byte weights and gradients, and an fp32 copy of weights beside the moments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_zero.group_plan import GroupPlan
from lightning_zero.layout import FlatLayout
from lightning_zero.placements import STAGES, StateBytes
from lightning_zero.precision import RECIPES

__all__ = [
    "ACTIVATION_BYTES",
    "CHECKPOINT_BYTES",
    "HEAD_DIM",
    "OPTIMIZERS",
    "OWN_DTYPES",
    "OptimizerSize",
    "Formula",
    "StateFormula",
    "formula_table",
    "has_paper",
    "paper_formula",
    "state_formula",
]


@dataclass(frozen=True)
class OptimizerSize:
    """State of an optimizer, a parameter: ``moments`` in the dtype of the weights it steps, and ``nbytes`` besides."""

    moments: int
    nbytes: int = 0

    def of(self, itemsize: int) -> int:
        """Bytes a parameter, for weights of ``itemsize`` bytes."""
        return self.moments * itemsize + self.nbytes


OPTIMIZERS: dict[str, OptimizerSize] = {
    "adamw": OptimizerSize(2),
    "adam": OptimizerSize(2),
    "momentum": OptimizerSize(1),
    "lion": OptimizerSize(1),
    "sgd": OptimizerSize(0),
    "adafactor": OptimizerSize(0),
    "8bit": OptimizerSize(0, nbytes=2),
}
"""Adafactor keeps a row and a column of each matrix, which is next to nothing; 8-bit Adam keeps two moments of a byte
(Dettmers 2022)."""

OWN_DTYPES = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "bf16-mixed": torch.float32,
    "16-mixed": torch.float32,
}
"""Of a module's parameters, by the Trainer's ``precision``."""

ACTIVATION_BYTES = 34.0
"""A layer of a Transformer keeps 34 s b h bytes in 2-byte dtypes, where attention is fused: Korthikanti 2022
(arXiv:2205.05198, section 4.1), without the term of the attention matrix. s: tokens, b: sequences, h: width."""

CHECKPOINT_BYTES = 2.0
"""Recomputed, it keeps its input: 2 s b h."""

HEAD_DIM = 128
"""Where only psi is known, a Transformer of L layers is taken to be 128 L wide, so psi = 12 L (128 L)^2: 40 layers for
13 billion parameters, 96 for 175, as those models have."""

_PROBE = 2**40
"""Parameters: large enough that padding disappears."""


@dataclass(frozen=True)
class Formula:
    """``whole * psi + share * psi / N`` bytes."""

    whole: float
    share: float

    def __call__(self, psi: float, ranks: int) -> float:
        return self.whole * psi + self.share * psi / ranks


@dataclass(frozen=True)
class StateFormula:
    """What rests on a rank's device and off it, and what moves.

    Args:
        parameters, gradients, optimizer: on the device.
        off_parameters, off_gradients, off_optimizer: off it.
        unit: bytes per parameter of a unit's whole weights while it is computed with; 0 where they rest.
        unit_gradient: bytes per parameter of a unit's whole gradients on their way; 0 where they rest.
        gathered: payload of gathers, bytes per parameter and micro-batch, or step where ``gathers_once``.
        reduced: payload of reductions, bytes per parameter and micro-batch, or step where ``reduces_once``.
        elements: payload of a step of one micro-batch in elements per parameter: 2 for plain data parallelism.
    """

    parameters: Formula
    gradients: Formula
    optimizer: Formula
    off_parameters: Formula
    off_gradients: Formula
    off_optimizer: Formula
    unit: float
    unit_gradient: float
    gathered: float
    gathers_once: bool
    reduced: float
    reduces_once: bool
    elements: float

    def on_device(self, psi: float, ranks: int) -> StateBytes:
        """Bytes at rest on the device."""
        return StateBytes(self.parameters(psi, ranks), self.gradients(psi, ranks), self.optimizer(psi, ranks))

    def off_device(self, psi: float, ranks: int) -> StateBytes:
        """Bytes at rest off the device, a rank."""
        return StateBytes(
            self.off_parameters(psi, ranks), self.off_gradients(psi, ranks), self.off_optimizer(psi, ranks)
        )


def _fitted(value_on: Callable[[int], float]) -> Formula:
    """The two coefficients of what ``value_on`` says for `_PROBE` parameters on 1 and on 2 ranks."""
    alone, on_two = value_on(1) / _PROBE, value_on(2) / _PROBE
    share = 2 * (alone - on_two)
    return Formula(round(alone - share, 6), round(share, 6))


def state_formula(stage: int, precision: str, optimizer: str, offload: bool) -> StateFormula:
    """What is held by parameters that all are trained, and are all weights of products."""
    placements, own = STAGES[stage], OWN_DTYPES[precision]
    dtypes = RECIPES[precision].dtypes(
        own, trained=True, gathered=placements.shards_optimizer or offload, multiplied=True
    )
    moments = OPTIMIZERS[optimizer].of(dtypes.main.itemsize) / dtypes.main.itemsize

    def group(ranks: int) -> GroupPlan:
        layout = FlatLayout((_PROBE,), ranks if placements.shards_optimizer else 1)
        return GroupPlan(layout, placements, dtypes, True, max(ranks, 2), offloaded=offload)

    def kind(name: str, off: bool) -> Formula:
        return _fitted(lambda ranks: float(getattr(group(ranks).state_bytes(0, moments, off), name)))

    two = group(2)
    traffic = placements.traffic(1)
    return StateFormula(
        **{name: kind(name, False) for name in ("parameters", "gradients", "optimizer")},
        **{f"off_{name}": kind(name, True) for name in ("parameters", "gradients", "optimizer")},
        unit=two.whole_bytes / _PROBE,
        unit_gradient=two.gradient_bytes / _PROBE,
        gathered=two.gathered_bytes(1) / _PROBE,
        gathers_once=placements.keeps_whole_parameters,
        reduced=two.reduced_bytes(1) / _PROBE,
        reduces_once=not placements.reduces_every_backward,
        elements=traffic.gathered + traffic.reduced,
    )


def has_paper(precision: str) -> bool:
    """Whether the paper's way to count applies: it is about mixed precision."""
    return precision.endswith("-mixed")


def paper_formula(stage: int, optimizer: str, offload: bool) -> tuple[Formula, Formula, Formula]:
    """Weights, gradients and optimizer state on the device, as the paper counts; offload moves the last."""
    placements = STAGES[stage]

    def state(ranks: int) -> StateBytes:
        stepped = 4 + OPTIMIZERS[optimizer].of(4)
        return placements.bytes_per_rank(_PROBE, ranks, main_itemsize=2, optimizer_itemsize=stepped)

    def kind(name: str) -> Formula:
        return _fitted(lambda ranks: getattr(state(ranks), name))

    nothing = Formula(0.0, 0.0)
    return kind("parameters"), kind("gradients"), nothing if offload else kind("optimizer")


def formula_table() -> dict[str, Any]:
    """All coefficients by stage, precision, optimizer and offload, for readers in other languages."""

    def pair(formula: Formula) -> list[float]:
        return [formula.whole, formula.share]

    rows: dict[str, Any] = {}
    for stage in STAGES:
        for precision in RECIPES:
            for optimizer in OPTIMIZERS:
                for offload in (False, True) if stage else (False,):
                    found = state_formula(stage, precision, optimizer, offload)
                    paper = paper_formula(stage, optimizer, offload) if has_paper(precision) else ()
                    rows[f"{stage}/{precision}/{optimizer}/{int(offload)}"] = {
                        "device": [pair(f) for f in (found.parameters, found.gradients, found.optimizer)],
                        "host": [pair(f) for f in (found.off_parameters, found.off_gradients, found.off_optimizer)],
                        "paper": [pair(f) for f in paper],
                        "unit": found.unit,
                        "unitGradient": found.unit_gradient,
                        "gathered": found.gathered,
                        "gathersOnce": found.gathers_once,
                        "reduced": found.reduced,
                        "reducesOnce": found.reduces_once,
                        "elements": found.elements,
                    }
    return {
        "rows": rows,
        "precisions": list(RECIPES),
        "itemsizes": {name: dtype.itemsize for name, dtype in OWN_DTYPES.items()},
        "optimizers": list(OPTIMIZERS),
        "activationBytes": ACTIVATION_BYTES,
        "checkpointBytes": CHECKPOINT_BYTES,
        "headDim": HEAD_DIM,
    }
