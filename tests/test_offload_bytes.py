"""What offload moves and where state is held, in bytes, by formulas and counted."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from distributed import run_ranks, whole_values
from offloading import TARGETS, Loop
from test_offload import STAGES, WORLD_SIZES

from lightning_zero import HostMemory, MovedBytes, OffloadTarget, held_bytes, moved_bytes, planned_bytes
from lightning_zero.checkpoint.one_file import shard_optimizer_state
from lightning_zero.param_group import ParamGroup
from lightning_zero.placements import StateBytes

STEPS = 2
SOME_RECIPES = ("fp32", "mixed", "mixed, narrow gradients")


def _offloaded(loop: Loop) -> list[ParamGroup]:
    return [group for group in loop.engine.groups if group.lane is not None]


# What moves


def _down(loop: Loop) -> int:
    """Bytes of mean gradients, padding included, of one optimizer step."""
    return sum(
        group.layout.shard_numel * group.dtypes.main_grad.itemsize for group in _offloaded(loop) if group.plan.trained
    )


def _up(loop: Loop, trained_only: bool = True) -> int:
    """Bytes of model weights, padding included, of one update."""
    return sum(
        group.layout.shard_numel * group.dtypes.model.itemsize
        for group in _offloaded(loop)
        if group.plan.trained or not trained_only
    )


def _up_for_gathers(loop: Loop, micro_batches: int) -> int:
    """The same where each gather brings its own: of a unit for forward and backward, of the root and the last once."""
    kept = {*loop.engine.root.groups, *loop.engine.units[-1].groups}
    return micro_batches * sum(
        (1 if group in kept else 2) * group.layout.shard_numel * group.dtypes.model.itemsize
        for group in _offloaded(loop)
    )


def _moves(rank: int, offload: OffloadTarget, micro_batches: int, stages: tuple[int, ...]) -> list[str]:
    wrong = []
    for stage, recipe in itertools.product(stages, SOME_RECIPES[::2]):
        loop = Loop(rank, stage, recipe, offload)
        # In the first steps the units that come next are not known yet.
        loop.train(2, micro_batches)
        before = moved_bytes(loop.module)
        loop.train(STEPS, micro_batches)
        after = moved_bytes(loop.module)
        found = MovedBytes(after.to_device - before.to_device, after.to_rest - before.to_rest)
        up = _up_for_gathers(loop, micro_batches) if offload.parameters else _up(loop)
        expected = MovedBytes(to_device=STEPS * up, to_rest=STEPS * _down(loop))
        # One before the first forward.
        start = 2 * up if offload.parameters else 3 * up
        if found != expected or before != MovedBytes(to_device=start, to_rest=2 * _down(loop)) or not up:
            wrong.append(f"stage {stage}, {recipe}: {before}, then {found} instead of {expected}")
    return wrong


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_go_down_and_weights_up_once_a_step(micro_batches: int, world_size: int) -> None:
    """In the dtypes of `main_grad` and of the model weights, however many micro-batches a step has."""
    for wrong in run_ranks(world_size, _moves, HostMemory(), micro_batches, STAGES):
        assert not wrong


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_offloaded_parameters_go_up_for_each_gather(world_size: int) -> None:
    for wrong in run_ranks(world_size, _moves, HostMemory(parameters=True), 3, (3,)):
        assert not wrong


# What is held


def _holds(rank: int, target: str) -> list[str]:
    wrong = []
    for stage, recipe in itertools.product(STAGES, SOME_RECIPES):
        offload = TARGETS[target]()
        if offload.parameters and stage < 3:
            continue
        if stage == 1 and recipe.endswith("narrow gradients"):
            # On the device the formula counts whole gradients, which wait for more micro-batches in another dtype.
            continue
        loop = Loop(rank, stage, recipe, offload)
        loop.train(2, micro_batches=2)
        moved_bytes(loop.module)  # waits for the background
        wrong += _held_is_planned(loop, False, f"stage {stage}, {recipe}, after a step")
        loop.backward()
        moved_bytes(loop.module)
        wrong += _held_is_planned(loop, True, f"stage {stage}, {recipe}, after backward")
    return wrong


def _held_is_planned(loop: Loop, with_gradients: bool, when: str) -> list[str]:
    found: dict[str, Any] = {}
    planned: dict[str, Any] = {}
    for where in ("device", "offloaded", "everywhere"):
        found[where] = held_bytes(loop.module, loop.optimizers, where)
        formula = planned_bytes(loop.module, where=where)
        gradients = formula.gradients if with_gradients else 0
        # The unused layer is part of the root's buffers, and never gets optimizer state.
        unused = 2 * sum(
            p.slicing.own.numel * p.element_size()
            for p in loop.module.unused.parameters()
            if where == "everywhere" or (p.lane is None) == (where == "device")
        )
        planned[where] = StateBytes(formula.parameters, gradients, formula.optimizer - unused)
    return [f"{when}: {found} instead of {planned}"] if found != planned or not found["offloaded"].total else []


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("target", ["HostMemory", "a half", "parameters too", "MappedFile"])
def test_a_rank_holds_what_the_formula_says(target: str, world_size: int) -> None:
    """To the byte, on the device and off it, counted from storages; at every stage in every precision."""
    for wrong in run_ranks(world_size, _holds, target):
        assert not wrong


# How much is offloaded


def _state(group: ParamGroup) -> float:
    """Bytes a rank of main weights, mean gradients and Adam's moments, without padding."""
    numel = sum(p.numel() for p in group.parameters) / group.layout.num_shards
    return numel * (3 * group.dtypes.main.itemsize + group.dtypes.main_grad.itemsize)


def _kept(rank: int, offload: OffloadTarget, stage: int) -> tuple[float, float, float]:
    """Bytes of trained state that stay, of the largest unit, and of all."""
    loop = Loop(rank, stage, "mixed", offload)
    units = [[group for group in unit.groups if group.plan.trained] for unit in (loop.engine.root, *loop.engine.units)]
    kept = [sum(_state(group) for group in groups if group.lane is None) for groups in units]
    sizes = [sum(map(_state, groups)) for groups in units]
    assert all(some in (0, size) for some, size in zip(kept, sizes, strict=True)), "a unit is offloaded as a whole"
    loop.train(2)
    return sum(kept), max(sizes), sum(sizes)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.9])
def test_the_ratio_is_the_part_that_is_offloaded(ratio: float) -> None:
    """As near as whole units allow, and never more on the device than was asked for."""
    for kept, largest, total in run_ranks(2, _kept, HostMemory(ratio=ratio), 1):
        assert (1 - ratio) * total - largest < kept <= (1 - ratio) * total


@pytest.mark.parametrize("stage", [1, 3])
def test_auto_keeps_what_the_budget_has_room_for(stage: int) -> None:
    """Nothing without room, all with enough, and in between as much as fits, units being whole."""
    ((_, largest, total),) = run_ranks(1, _kept, HostMemory(), stage)

    def kept(budget: float) -> float:
        ((kept, *_),) = run_ranks(1, _kept, HostMemory(ratio="auto", device_budget=int(budget)), stage)
        return float(kept)

    assert kept(0) == 0
    assert kept(total) == total
    assert total / 2 - largest < kept(total / 2) <= total / 2


def _held_after_a_load(rank: int) -> tuple[StateBytes, StateBytes]:
    loop = Loop(rank, 3, "fp32", HostMemory())
    loop.train()
    moved_bytes(loop.module)
    before = held_bytes(loop.module, loop.optimizers, "offloaded")
    (optimizer,) = loop.optimizers
    state = whole_values(optimizer.state_dict())
    optimizer.load_state_dict(shard_optimizer_state(optimizer, copy.deepcopy(state)))
    return before, held_bytes(loop.module, loop.optimizers, "offloaded")


def test_loaded_optimizer_state_rests_at_the_target() -> None:
    for before, after in run_ranks(2, _held_after_a_load):
        assert before == after
