"""The table of stages: bytes per rank and elements on the wire, against the paper and against a count by hand."""

import pytest

from lightning_zero.placements import STAGES, Placement, stage_placements

PSI = 7.5e9
GB = 1e9


@pytest.mark.parametrize(
    ("stage", "gigabytes"),
    [
        (0, 120.0),  # 16 psi
        (1, 31.4),  # 4 psi + 12 psi / 64 = 30 + 1.41
        (2, 16.6),  # 2 psi + 14 psi / 64 = 15 + 1.64
    ],
)
def test_bytes_equal_figure_1_of_the_paper(stage, gigabytes):
    """7.5B parameters on 64 ranks, 2-byte weights and gradients, fp32 Adam (Rajbhandari 2020, fig. 1)."""
    held = STAGES[stage].bytes_per_rank(
        int(PSI), 64, main_itemsize=4, model_itemsize=2, grad_itemsize=2, optimizer_itemsize=8
    )
    assert round(held.total / GB, 1) == gigabytes


def test_stage_3_holds_the_papers_16_bytes_with_an_fp32_gradient_and_no_resting_2_byte_shard():
    """16 psi / 64 = 1.9 GB: 4 main + 4 gradient + 8 optimizer; with 2-byte gradients 14 psi / 64."""
    held = STAGES[3].bytes_per_rank(int(PSI), 64, main_itemsize=4, model_itemsize=2, optimizer_itemsize=8)
    assert held.total == 16 * PSI / 64
    assert round(held.total / GB, 1) == 1.9
    smaller = STAGES[3].bytes_per_rank(int(PSI), 64, main_itemsize=4, model_itemsize=2, grad_itemsize=2)
    assert smaller.total == 14 * PSI / 64


@pytest.mark.parametrize("world_size", [1, 2, 3, 64])
@pytest.mark.parametrize(
    ("stage", "whole", "sharded"), [(0, 16, 0), (1, 8, 8), (2, 4, 12), (3, 0, 16)], ids=["0", "1", "2", "3"]
)
def test_fp32_adam_bytes_are_the_last_column_of_the_table(stage, whole, sharded, world_size):
    """``whole * psi + sharded * psi / N`` bytes; in one dtype the main weights are a slice of the model weights."""
    psi = 960
    held = STAGES[stage].bytes_per_rank(psi, world_size)
    assert held.total == pytest.approx(whole * psi + sharded * psi / world_size)
    assert held.total == held.parameters + held.gradients + held.optimizer


def test_stage_2_with_fp32_gradients_holds_two_bytes_whole_and_sixteen_sharded():
    """The gradient shard is fp32, because torch's optimizers reject another dtype: 2 psi + 16 psi / N."""
    held = STAGES[2].bytes_per_rank(800, 8, main_itemsize=4, model_itemsize=2)
    assert held.total == 2 * 800 + 16 * 100
    assert (held.parameters, held.gradients, held.optimizer) == (2 * 800 + 4 * 100, 4 * 100, 8 * 100)


def test_one_rank_holds_the_same_at_every_stage_in_fp32():
    """A shard of one rank is the whole."""
    assert {row.bytes_per_rank(100, 1).total for row in STAGES.values()} == {1600.0}


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_traffic_counts_each_collective_of_the_table(stage, m):
    """A slow count: one entry for each collective of a step of m micro-batches, 70 elements of units and 30 of root."""
    units, root = 70, 30
    gathered, reduced = 0, 0
    for micro in range(m):
        last = micro == m - 1
        if stage == 3:
            gathered += units + root  # forward; the root stays
            gathered += units  # backward
        if stage in (2, 3):
            reduced += units + root
        elif last:
            reduced += (units + root) * (2 if stage == 0 else 1)  # a ring all-reduce sends everything twice
    if stage in (1, 2):
        gathered += units + root  # after the step
    traffic = STAGES[stage].traffic(units + root, kept_numel=root, micro_batches=m)
    assert (traffic.gathered, traffic.reduced) == (gathered, reduced)


@pytest.mark.parametrize(("stage", "payload"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_one_micro_batch_sends_what_the_paper_says(stage, payload):
    """2 psi, and 3 psi at stage 3 (Rajbhandari 2020, section 7); the root would make it less."""
    traffic = STAGES[stage].traffic(1000)
    assert traffic.gathered + traffic.reduced == payload * 1000


def test_frozen_parameters_travel_only_where_they_are_sharded():
    """20 frozen elements, 5 of them in the root: gathered 2 * 15 + 5 at stage 3, nowhere else, never reduced."""
    for stage, row in STAGES.items():
        with_frozen = row.traffic(100, kept_numel=10 + 5, frozen_numel=20)
        without = row.traffic(100, kept_numel=10)
        assert with_frozen.reduced == without.reduced
        assert with_frozen.gathered - without.gathered == (2 * 15 + 5 if stage == 3 else 0)


def test_a_stage_shards_what_the_stage_before_shards_and_one_kind_more():
    """Sharded kinds grow along optimizer, gradient, parameter."""
    sharded = [
        [kind for kind in ("optimizer", "gradient", "parameter") if getattr(row, kind) is Placement.SHARD]
        for row in STAGES.values()
    ]
    assert sharded == [[], ["optimizer"], ["optimizer", "gradient"], ["optimizer", "gradient", "parameter"]]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_is_found_by_number(stage):
    """The row itself, not a copy."""
    assert stage_placements(stage) is STAGES[stage]


@pytest.mark.parametrize("stage", [-1, 4, True, "3", None])
def test_an_unknown_stage_is_refused_with_its_value_and_the_line_that_fixes_it(stage):
    """``True == 1`` must not pass for stage 1."""
    with pytest.raises(ValueError, match=r"stage=.* is unknown.*`stage=3`") as caught:
        stage_placements(stage)
    assert repr(stage) in str(caught.value)
