"""Any model, any training program: sharded on gloo ranks it ends where one plain process ends.

Hypothesis draws examples as plain data, and shrinks one that fails. The same 300 are drawn each time;
``RANDOM_MODELS=5000`` explores that many others, from the seed that it prints; ``RANDOM_MODELS_SEED=1`` sets the seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_models import CONTAINERS, KINDS, READS, WRITES, Container, Example, Layer, Same, Story
from random_models import in_one_process as train_in_one_process
from random_models import on_rank as train_on_rank
from rank_pool import RankPool
from torch import Tensor

EXAMPLES = 80
LEAST_SHARE = 0.3
"""Each of these is in at least this part of the examples."""

FEATURES = ("frozen", "reused", "tied", "stage 3")

# A gradient differs by the order in which ranks' parts are added; a handful of steps amplify that.
TOLERANCES = {torch.bfloat16: 0.1, torch.float32: 1e-4, torch.complex64: 1e-4}
EXACT = 1e-10


# Drawing examples; what comes first is what a failure shrinks to

PALETTES = [
    ("float64",), ("float64",), ("float64",), ("float64", "complex128"), ("float64", "float32"),
    ("float64", "bfloat16"), ("float64", "complex64"),
]  # fmt: skip

small = st.integers(0, 12)
values = st.sampled_from([0.5, 1.5, -0.25, 0.0])


def rarely(strategy: st.SearchStrategy[Any], otherwise: Any, one_in: int) -> st.SearchStrategy[Any]:
    """``strategy`` in one case of ``one_in``."""
    return st.integers(0, one_in - 1).flatmap(lambda n: strategy if n == one_in - 1 else st.just(otherwise))


def layers(dtypes: Sequence[str]) -> st.SearchStrategy[Layer]:
    kinds = ["linear", "mlp", *KINDS]  # what matters most, more often
    return st.builds(
        Layer,
        kind=st.sampled_from(kinds),
        dtype=st.sampled_from(dtypes),
        size=st.integers(1, 7),
        only_rank=rarely(st.integers(0, 2), None, 8),
    )


def containers(children: st.SearchStrategy[Any], most: int) -> st.SearchStrategy[Container]:
    return st.builds(
        Container,
        kind=st.sampled_from([*CONTAINERS]),
        children=st.lists(children, min_size=1, max_size=most).map(tuple),
        order=rarely(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), None, 3),
        scale=st.booleans(),
        recomputes=rarely(st.sampled_from(["plain", "reentrant"]), None, 4),
    )


def bodies(dtypes: Sequence[str]) -> st.SearchStrategy[Container]:
    leaf = layers(dtypes)
    again = st.builds(Same, small)
    inner = containers(st.one_of(leaf, leaf, leaf, again), 4)
    middle = containers(st.one_of(leaf, leaf, inner, again), 3)
    return containers(st.one_of(leaf, inner, middle, inner, again), 8)


looks = st.tuples(st.just("look"), st.sampled_from(["no grad", "inference"]))
reads = st.tuples(st.just("read"), small, st.sampled_from([*READS]), st.sampled_from(["no grad", "weight", "grad"]))
writes = st.tuples(st.just("write"), small, st.sampled_from([*WRITES]), values)
zero_grads = st.tuples(st.just("zero_grad"), st.sampled_from(["none", "zeros", "module"]))
grads = st.tuples(st.just("grad"), small, st.sampled_from(["none", "new", "halved", "data.mul_"]))
clips = st.one_of(
    st.tuples(st.just("clip_norm"), st.sampled_from([0.1, 1.0]), st.sampled_from([2.0, 1.0, float("inf")])),
    st.tuples(st.just("clip_value"), st.sampled_from([0.01, 0.1])),
)
changes = st.one_of(
    writes,
    writes,
    st.tuples(st.just("copy"), small, small),
    st.tuples(st.just("scale_all"), st.sampled_from([0.75, 1.25])),
    st.tuples(st.just("gathered"), small, st.sampled_from([None, 0.5])),
    st.tuples(st.just("state_dict"), st.sampled_from(["optimizer", "model", "gathered"])),
    st.tuples(st.just("train"), small, st.booleans()),
)
forwards = st.tuples(st.just("forward"), st.booleans())
backwards = st.tuples(st.just("backward"), st.sampled_from(["sum", "each", "reversed"]), st.booleans())
penalties = st.tuples(st.just("penalty"), st.sampled_from([0.01, 0.1]))
steps = st.just(("step",))


def some(strategy: st.SearchStrategy[Any], least: int, most: int) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, min_size=least, max_size=most).map(tuple)


@st.composite
def programs(draw: Any) -> tuple[tuple[Any, ...], ...]:
    """Optimizer steps, with everything else between."""
    program: tuple[Any, ...] = ()
    for _ in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 2))):
            program += draw(some(forwards, 1, 2))
            program += draw(some(st.one_of(penalties, looks, reads, grads, zero_grads), 0, 2))
            program += (draw(backwards),)
            program += draw(some(st.one_of(reads, clips, grads, zero_grads, looks), 0, 2))
        program += draw(some(st.one_of(clips, changes, changes, grads, reads), 0, 2))
        program += draw(some(steps, 1, 1))
        program += draw(some(st.one_of(zero_grads, changes, changes, reads, looks), 0, 3))
    return program


@st.composite
def examples(draw: Any) -> Example:
    """A model and its training."""
    return Example(
        seed=draw(st.integers(0, 999)),
        world_size=draw(st.sampled_from([2, 2, 2, 2, 3, 1])),
        stage=draw(st.sampled_from([3, 1, 2, 0, 3, 1, 2, 3])),
        units=draw(st.sampled_from(["blocks", "layers", "leaves", "odd names", "default"])),
        width=draw(st.sampled_from([3, 5, 1, 4, 9])),
        root=draw(bodies(draw(st.sampled_from(PALETTES)))),
        ties=draw(st.one_of(some(small, 2, 4), some(small, 0, 1))),
        frozen=draw(st.one_of(some(small, 1, 4), st.just(()))),
        hooked=draw(some(small, 0, 2)),
        anchor=draw(st.booleans()),
        meta=draw(rarely(st.just(True), False, 6)),
        optimizer=draw(st.sampled_from(["sgd", "adamw", "sgd, decay, loop", "adamw, loop", "adamw, fused"])),
        program=draw(programs()),
        asks=draw(rarely(st.just(True), False, 3)),
    )


# Comparing


def assert_close(what: str, found: Any, expected: Any, tolerance: float) -> None:
    """Alike in kind, and in value within ``tolerance`` of the largest element, or of 1."""
    if not isinstance(expected, Tensor):
        if not isinstance(expected, float):
            assert found == expected, f"{what}: {found!r}, expected {expected!r}"
            return
        found, expected = torch.tensor([found, expected], dtype=torch.float64).unbind()
    assert isinstance(found, Tensor), f"{what}: {found!r}, expected {expected!r}"
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(
        found, expected, rtol=0, atol=tolerance * scale, equal_nan=True, msg=lambda message: f"{what}: {message}"
    )


def assert_all_close(what: str, found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> None:
    assert list(found) == list(expected), what
    for name, value in expected.items():
        assert_close(f"{what} `{name}`", found[name], value, tolerance)


def assert_same_story(ranks: Sequence[Story], twin: Story) -> None:
    """What every rank saw on the way, and everything it holds at the end, is the twin's."""
    tolerance = max((TOLERANCES.get(dtype, EXACT) for dtype in twin.dtypes), default=EXACT)
    losses = [sum(losses) / len(ranks) for losses in zip(*(rank.losses for rank in ranks), strict=True)]
    for number, (found, expected) in enumerate(zip(losses, twin.losses, strict=True)):
        assert_close(f"loss {number}", found, expected, tolerance)
    for number, story in enumerate(ranks):
        for what, (found, expected) in enumerate(zip(story.seen, twin.seen, strict=True)):
            assert_close(f"rank {number}, reading {what}, {expected[0]}", found[1], expected[1], tolerance)
        assert_all_close(f"rank {number}, gradient of", story.grads, twin.grads, tolerance)
        assert_all_close(f"rank {number}, live", story.live, twin.live, tolerance)
        assert_all_close(f"rank {number}, buffer", story.buffers[0], twin.buffers[number], tolerance)
        after = {name: value for name, value in twin.after.items() if name in twin.live}
        found = {name: value for name, value in story.after.items() if name in twin.live}
        assert_all_close(f"rank {number}, after the way back", found, after, tolerance)


# The test


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    """Ranks, by how many they are."""
    pools = {size: RankPool(size, train_on_rank) for size in (1, 2, 3)}
    yield pools
    for pool in pools.values():
        pool.close()


# Beside the simplest example, one that is drawn freely. More of them would be mutations of that one.
_settings = settings(
    max_examples=2,
    deadline=None,
    database=None,
    print_blob=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def _seeds() -> range:
    """One for each example; those of an exploration are told before it begins."""
    number = int(os.environ.get("RANDOM_MODELS", EXAMPLES))
    first = 0 if number == EXAMPLES else random.SystemRandom().randrange(10**9)
    first = int(os.environ.get("RANDOM_MODELS_SEED", first))
    print(f"RANDOM_MODELS={number} RANDOM_MODELS_SEED={first}")
    return range(first, first + number)


def test_random_models_train_as_in_one_process(pools: dict[int, RankPool]) -> None:
    """Losses, readings, gradients, live and released parameters; nothing hangs, and each feature occurs often."""
    done: set[Example] = set()
    counts: Counter[str] = Counter()

    @_settings
    @given(examples())
    def train(example: Example) -> None:
        if example in done:
            return
        pool = pools[example.world_size]
        pool.start(example)
        try:
            twin = train_in_one_process(example)
        finally:
            ranks = pool.collect()
        assert_same_story(ranks, twin)
        done.add(example)
        counts.update([f"stage {example.stage}", *twin.features])

    for seed in _seeds():
        hypothesis.seed(seed)(train)()
    assert len(done) >= EXAMPLES
    shares = {feature: counts[feature] / len(done) for feature in FEATURES}
    assert min(shares.values()) >= LEAST_SHARE, shares
