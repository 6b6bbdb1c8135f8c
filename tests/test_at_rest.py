"""What user code does to resting parameters beside training gives what it gives on plain ones."""

from __future__ import annotations

import copy
import gc
import math
from types import MethodType
from typing import Any, cast

import pytest
import torch
from distributed import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_zero
from lightning_zero import PrecisionRecipe
from lightning_zero.sharded_parameter import ShardedParameter

STAGES = (1, 3)


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Twelve layers, of which rank 0's weights count."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(5, 5, dtype=dtype) for _ in range(12)))


def sharded(stage: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The same, sharded."""
    return lightning_zero.shard(network(dtype), stage=stage)


def _maximum(rank: int, stage: int) -> list[float]:
    model = sharded(stage)
    weight = model[0].weight
    found = []
    for element in ((0, 0), (4, 4)):  # in the first rank's fragment, in the last one's
        with torch.no_grad():
            before = weight.whole()[element].item()
            weight[element] = math.nan
            found += [weight.max().item(), weight.abs().min().item(), torch.linalg.vector_norm(weight, math.inf).item()]
            weight[element] = before
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_an_extreme_with_a_nan_on_any_rank_is_nan_on_all(stage: int) -> None:
    """As for one plain tensor."""
    for found in run_ranks(2, _maximum, stage):
        assert all(math.isnan(value) for value in found)


def _half_norms(rank: int, stage: int) -> tuple[list[float], list[float]]:
    model = sharded(stage, torch.float16)
    parameters = list(model.parameters())
    for parameter, scale in zip(parameters, (1e-5, 1000.0)):
        parameter.grad = torch.full(parameter.shape, scale, dtype=torch.float16)
    plain = [torch.full((5, 5), 1e-5, dtype=torch.float16), torch.full((5,), 1000.0, dtype=torch.float16)]
    grads = [parameter.grad for parameter in parameters[:2]]
    ours = [grad.norm().item() for grad in grads] + [norm.item() for norm in torch._foreach_norm(grads)]
    return ours, [tensor.norm().item() for tensor in plain] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_norms_of_half_precision_neither_vanish_nor_overflow(stage: int) -> None:
    """Squares of 1e-5 and of 1000 are beyond fp16; the norms 5e-5 and 2236 are not. One fp16 digit is 1e-3."""
    for ours, plain in run_ranks(2, _half_norms, stage):
        assert ours == pytest.approx(plain, rel=1e-3, abs=6e-8)


def _copy_trains(rank: int, stage: int) -> tuple[Tensor, Tensor]:
    copied = copy.deepcopy(sharded(stage))
    x = torch.ones(2, 5, dtype=torch.float64)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    copied(x).sum().backward()
    optimizer.step()
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(x).sum().backward()
    optimizer.step()
    return copied[3].weight.whole(), plain[3].weight.detach()


@pytest.mark.parametrize("stage", STAGES)
def test_a_copy_of_a_sharded_module_trains_by_itself(stage: int) -> None:
    """It has fragments, but no windows and no engine: slower, and right."""
    for ours, plain in run_ranks(2, _copy_trains, stage):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


def _patched_copy(rank: int) -> bool:
    model = network()
    model[0].forward = MethodType(lambda self, x: x * 0, model[0])
    lightning_zero.shard(model, stage=3)
    copied = copy.deepcopy(model)
    x = torch.ones(2, 5, dtype=torch.float64)
    with torch.no_grad():
        return bool(torch.equal(copied[0](x), x * 0)) and bool(torch.equal(model[0](x), x * 0))


def test_a_forward_put_on_the_instance_is_called_and_copied() -> None:
    """As plain modules do."""
    assert run_ranks(2, _patched_copy) == [True, True]


class Scaled(nn.Module):
    """Units, and a root that has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.scale = nn.Parameter(torch.ones(7, 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale.sum()


def _other_optimizer(rank: int, stage: int) -> float:
    model = lightning_zero.shard(Scaled(), stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 5, dtype=torch.float64)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)  # after it the root is at rest, so that a hint to gather it would be followed
        if rank == 0:  # a probe of rank 0 alone
            probe = nn.Linear(2, 2)
            probe(torch.ones(1, 2)).sum().backward()
            torch.optim.SGD(probe.parameters(), lr=0.1).step()
    lightning_zero.unshard(model)
    return float(sum(parameter.sum() for parameter in model.parameters()))


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_of_something_else_sends_nothing(stage: int) -> None:
    """Else ranks would differ in their collectives."""
    first, second = run_ranks(2, _other_optimizer, stage)
    assert first == second


class WritesInStep(nn.Module):
    """Rank 0 writes, for all, in the middle of a forward."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.net = network()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x) * self.scale
        with lightning_zero.gathered(self, writeback=True), torch.no_grad():
            if self.rank == 0:
                self.scale.fill_(3.0)
                self.net[2].weight.fill_(0.25)
        return x * self.scale


def _writes_in_step(rank: int, stage: int) -> Any:
    model = lightning_zero.shard(WritesInStep(rank), stage=stage)
    with torch.no_grad():
        model(torch.ones(2, 5, dtype=torch.float64))
    return model.scale.whole().item(), model.net[2].weight.whole().unique().tolist()


@pytest.mark.parametrize("stage", STAGES)
def test_gathered_writes_back_also_where_a_window_is_open(stage: int) -> None:
    """Rank 0's values, on all ranks."""
    assert run_ranks(2, _writes_in_step, stage) == [(3.0, [0.25])] * 2


def _meta_on_rank_zero(rank: int) -> str:
    with torch.device("meta"):
        model = network()
    if rank == 0:
        with pytest.raises(ValueError, match=r"`0.weight` is on the meta device of rank 0") as caught:
            lightning_zero.shard(model, stage=3)
        return str(caught.value)
    return ""


def test_a_parameter_without_values_on_rank_zero_is_refused_by_name() -> None:
    """There is nothing to broadcast."""
    assert "to_empty" in run_ranks(1, _meta_on_rank_zero)[0]


class Shares(nn.Module):
    """Two modules hold one buffer; on rank 1 everything is on ``meta``."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(2))
        self.norms[1].running_mean = self.norms[0].running_mean
        nn.init.constant_(self.norms[0].running_mean, 7.0)


def _shared_buffer(rank: int, stage: int) -> Any:
    with torch.device("meta" if rank else "cpu"):
        model = Shares()
    lightning_zero.shard(model, stage=stage, device="cpu")
    first, second = (norm.running_mean for norm in model.norms)
    return first is second, first.tolist()


@pytest.mark.parametrize("stage", STAGES)
def test_buffers_are_rank_zeros_and_stay_shared(stage: int) -> None:
    """Also where the other ranks hold no values at all."""
    assert run_ranks(2, _shared_buffer, stage) == [(True, [7.0] * 3)] * 2


def test_a_module_is_sharded_once() -> None:
    """A second time, or a part of it, is refused by name."""
    model = lightning_zero.shard(network(), stage=3)
    assert isinstance(model[0].weight, ShardedParameter)
    with pytest.raises(RuntimeError, match=r"`weight` is sharded already"):
        lightning_zero.shard(model[0], stage=3)
    lightning_zero.unshard(model)
    assert type(model[0].weight) is nn.Parameter


def test_hooks_and_their_handles_survive_sharding_and_the_way_back() -> None:
    """Doubled gradients while sharded and after; single ones once the first handle has removed its hook."""
    model = network()
    seen: list[int] = []
    handle = model[11].bias.register_hook(lambda grad: 2 * grad)
    model[11].bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(1))
    x = torch.ones(2, 5, dtype=torch.float64)

    def gradient() -> float:
        model.zero_grad()
        model(x).sum().backward()
        return float(model[11].bias.grad.sum())

    lightning_zero.shard(model, stage=3)
    # Two rows of five outputs, each with gradient 1: the bias has 10.
    assert gradient() == 20.0
    lightning_zero.unshard(model)
    assert gradient() == 20.0
    handle.remove()
    assert gradient() == 10.0
    assert len(seen) == 3


def test_parameters_may_outlive_their_module() -> None:
    """An optimizer that holds them steps what else it has."""
    model, other = lightning_zero.shard(network(), stage=3), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.5)
    before = other.bias.detach().clone()
    del model
    gc.collect()
    other(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(other.bias.detach(), before - 0.5 * 3)  # a bias has gradient 1 a row


@pytest.mark.parametrize("precision", [None, PrecisionRecipe(main_grad=torch.bfloat16)], ids=["as it is", "widened"])
def test_a_gradient_is_read_past_dispatch_modes(precision: PrecisionRecipe | None) -> None:
    """What stands for it is made at its first read: a mode that records user code sees nothing of that."""

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    model = lightning_zero.shard(network(torch.float32), stage=3, precision=precision)
    model(torch.ones(2, 5)).sum().backward()
    with Recorded():
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert not seen


def test_a_flag_that_is_set_past_the_parameter_trains_nothing() -> None:
    """The others keep their gradients."""
    model = network()
    model[0].weight.requires_grad = False
    lightning_zero.shard(model, stage=3)
    cast(Any, torch._C.TensorBase.requires_grad_)(model[0].weight, True)
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    assert [parameter.grad is not None for parameter in model.parameters()] == [False] + [True] * 23


def test_a_lazy_parameter_is_refused_by_name_whatever_names_the_units() -> None:
    """A Hugging Face model names its blocks; without a size nothing can be laid out."""
    model = nn.Module()
    model._no_split_modules = ["Linear"]  # type: ignore[assignment]
    model.layers, model.head = network(), nn.LazyLinear(2)
    with pytest.raises(ValueError, match=r"`head.weight` is uninitialized"):
        lightning_zero.shard(model, stage=3)


def _views_in_inference(rank: int, stage: int) -> list[Tensor]:
    weight = sharded(stage)[0].weight
    with torch.inference_mode():
        weight[1:].mul_(2)
        views = [weight[1], weight.t()[0], weight.detach().view(-1)[3:]]
        return [view + 0 for view in views]


@pytest.mark.parametrize("stage", STAGES)
def test_views_are_read_and_written_in_inference_mode(stage: int) -> None:
    """In which a Trainer evaluates: the parameter itself is an ordinary tensor."""
    weight = network()[0].weight.detach()
    weight[1:] *= 2
    for found in run_ranks(2, _views_in_inference, stage):
        for view, plain in zip(found, (weight[1], weight.t()[0], weight.view(-1)[3:]), strict=True):
            assert torch.equal(view, plain)


class _ByHand(torch.autograd.Function):
    """The sum, with its derivative."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.shape = tensor.shape
        return tensor.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(ctx.shape)


def _by_hand_on_one_rank(rank: int, stage: int) -> Tensor:
    model = sharded(stage)
    weight = model[0].weight
    weight.register_hook(lambda grad: grad * 10)
    by_hand = _ByHand.apply(weight)
    (weight.sum() + (by_hand if rank == 1 else by_hand.detach())).backward()
    return weight.grad.whole()


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_in_two_pieces_on_one_rank(stage: int) -> None:
    """Of 1 by autograd and 1 past it: the hook multiplies both, and the mean of 10 and 20 is everyone's."""
    for found in run_ranks(2, _by_hand_on_one_rank, stage):
        assert torch.equal(found, torch.full((5, 5), 15.0, dtype=torch.float64))
