"""A frozen base of packed integers under trained adapters: sharded where it is a plain parameter, else refused by name.

The stand-in keeps two 4-bit numbers in a byte, and in attributes of the parameter what unpacking needs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import Tensor, nn
from twin import WORLD_SIZE, adamw, build, compare, plain, shard

import lightning_zero
from lightning_zero.sharded_parameter import RawMemoryError

STAGES = (0, 1, 2, 3)
SHAPE = (5, 6)


def packed() -> Tensor:
    """Random nibbles of a matrix of `SHAPE`, one column of bytes."""
    return torch.randint(256, (15, 1), dtype=torch.uint8)


class PackedParameter(nn.Parameter):
    """As some quantizers have it: a class of its own."""


class Packed(nn.Module):
    """A frozen 4-bit matrix and a trained update of rank 2."""

    def __init__(self, kind: type[nn.Parameter] = nn.Parameter) -> None:
        super().__init__()
        self.weight = kind(packed(), requires_grad=False)
        self.weight.scale = torch.rand(SHAPE[0], 1) / 8
        self.weight.packed_shape = SHAPE
        self.lora_a = nn.Parameter(torch.randn(SHAPE[1], 2))
        self.lora_b = nn.Parameter(torch.zeros(2, SHAPE[0]))
        self.back = nn.Parameter(torch.randn(SHAPE[0], SHAPE[1]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        data = weight.data  # a quantizer's kernel reads this
        nibbles = torch.cat([data & 15, data >> 4]).view(weight.packed_shape)
        weight.calls = getattr(weight, "calls", 0) + 1
        y = x @ ((nibbles.to(x.dtype) - 8) * weight.scale).t() + x @ self.lora_a @ self.lora_b
        return x + torch.tanh(y) @ self.back


class Net(nn.Module):
    """Nine packed layers; the loss of drawn data."""

    def __init__(self, kind: type[nn.Parameter] = nn.Parameter) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Packed(kind) for _ in range(9))

    def forward(self, seed: int) -> Tensor:
        x = torch.randn(3, SHAPE[1], generator=torch.Generator().manual_seed(seed))
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def fixed() -> Net:
    """The scales are attributes, which travel with no broadcast: alike on all ranks they must be."""
    net = Net()
    for layer in net.layers:
        layer.weight.scale.fill_(0.1)
    return net


@pytest.mark.parametrize("stage", STAGES)
def test_adapters_over_packed_integers_train_as_in_one_plain_process(stage: int) -> None:
    """1e-10 in float64; the packed bytes stay as they are."""
    twin = compare(fixed, stage, optimizer=adamw)
    start = build(fixed, 0, torch.float64)
    for name, value in start.named_parameters():
        assert torch.equal(value.detach(), twin.live[name]) == (not value.requires_grad), name


def _attributes(rank: int, stage: int) -> list[Any]:
    module = shard(build(fixed, rank, torch.float64), stage)
    weight = module.layers[3].weight
    found = [weight.packed_shape, float(weight.scale[0])]
    module(rank).backward()
    found += [weight.calls]
    with lightning_zero.gathered(module):
        inside = module.layers[3].weight
        found += [inside.packed_shape, inside.calls, hasattr(inside, "elsewhere")]
        inside.note = "kept"
    found += [weight.note]
    lightning_zero.unshard(module)
    return [*found, module.layers[3].weight.note, module.layers[3].weight.calls, type(module.layers[3].weight).__name__]


@pytest.mark.parametrize("stage", STAGES)
def test_attributes_of_a_parameter_are_there_at_rest_in_a_forward_and_after(stage: int) -> None:
    """Set before, in a forward and inside `gathered`; one that nobody set raises as ever."""
    expected = [SHAPE, 0.1, 1, SHAPE, 1, False, "kept", "kept", 1, "Parameter"]
    assert run_ranks(WORLD_SIZE, _attributes, stage) == [expected] * WORLD_SIZE


def _whole_bytes(rank: int) -> tuple[int, bool]:
    module = shard(build(fixed, rank, torch.float64), 3)
    weight = module.layers[3].weight
    try:
        weight.data_ptr()
        refused = False
    except RawMemoryError as error:
        refused = "layers.3.weight" in str(error)
    return plain(weight).sum().item(), refused


def test_packed_bytes_are_sharded() -> None:
    """A rank holds a fragment, of which no kernel may read the memory; the whole is rank 0's."""
    expected = build(fixed, 0, torch.float64).layers[3].weight.sum().item()
    assert run_ranks(WORLD_SIZE, _whole_bytes) == [(expected, True)] * WORLD_SIZE


def _refusal(rank: int, stage: int) -> str:
    module = build(lambda: Net(PackedParameter), rank, torch.float64)
    try:
        lightning_zero.shard(module, stage=stage)
    except TypeError as error:
        assert all(type(layer.weight) is PackedParameter for layer in module.layers), "left as it was"
        return str(error)
    return ""


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_of_its_own_class_is_refused_by_name(stage: int) -> None:
    """Its methods and its layout would be lost: on all ranks at once, with the class and what to write instead."""
    for error in run_ranks(WORLD_SIZE, _refusal, stage):
        assert "`layers.0.weight` is a PackedParameter" in error
        assert "`nn.Parameter(data, requires_grad=False)`" in error
