"""Where state rests changes no bit: every target, against no offload, over whatever a training loop may do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from offloading import RECIPES, TARGETS, Case, Loop, Optimizers, Outcomes, adamw, assert_equal, outcomes, trained
from torch import nn

STAGES = (1, 2, 3)
WORLD_SIZES = (2, 1)
_NARROW = "mixed, narrow gradients"


# Micro-batches, clipping, precision


def _clips_norm(loop: Loop) -> None:
    loop.see(nn.utils.clip_grad_norm_(loop.module.parameters(), 0.1))


def _clips_value(loop: Loop) -> None:
    nn.utils.clip_grad_value_(loop.module.parameters(), 0.01)


def _nothing(loop: Loop) -> None:
    """Gradients stay as they are."""


def _steps(micro_batches: int, clip: Callable[[Loop], None]) -> Callable[[Loop], None]:
    def act(loop: Loop) -> None:
        for _ in range(2):
            loop.backwards(micro_batches)
            clip(loop)
            loop.step()

    return act


def _implementation(**options: bool) -> Optimizers:
    return lambda module: [torch.optim.AdamW(trained(module), lr=0.01, **options)]


_KINDS = {"fused": adamw, "foreach": _implementation(foreach=True), "loop": _implementation(foreach=False)}


def _grid(world_size: int) -> Iterator[Case]:
    """Every stage in every precision; the other choices take turns, in another order in each world."""
    ways = itertools.cycle(itertools.product((_clips_norm, _nothing, _clips_value), (3, 1)))
    kinds = itertools.cycle(_KINDS.items())
    next(ways)
    for (stage, recipe), (clip, micro_batches), (kind, make) in zip(
        itertools.product(STAGES, RECIPES), itertools.islice(ways, world_size, None), kinds, strict=False
    ):
        if recipe == _NARROW and world_size == 1:
            # Without offload one process adds micro-batches up whole, in `gradient`; here in `main_grad`.
            micro_batches = 1
        name = f"stage {stage}, {recipe}, {micro_batches} micro-batches, {clip.__name__}, {kind}"
        yield Case(name, _steps(micro_batches, clip), make, stage, recipe)


@cache
def _grid_without(world_size: int) -> Outcomes:
    return outcomes(list(_grid(world_size)), world_size, None)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("target", TARGETS)
def test_steps_end_where_they_end_without_offload(target: str, world_size: int) -> None:
    """Accumulated or not, clipped by norm, by value or not, in every precision, by every implementation of AdamW."""
    assert_equal(outcomes(list(_grid(world_size)), world_size, target), _grid_without(world_size))
