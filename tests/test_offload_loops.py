"""What user code does between backwards and steps has the result that it has without offload, to the last bit.

An offloaded `optimizer.step()` returns before it is done. Nothing that a loop can do afterwards may show that.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from distributed import whole_values
from offloading import Case, Loop, Optimizers, adamw, assert_equal, outcomes, trained
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lightning_zero
from lightning_zero.checkpoint.one_file import shard_optimizer_state

# Optimizers


class ScheduleFree(torch.optim.Optimizer):
    """As optimizers that average their own path: a counter in each group, and decisions on values read from tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0, "distance": 1e-3, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Distance from the start, as a D-adaptation estimates it, scales the step."""
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            progress = 0.0
            for p in used:
                state = self.state[p]
                if not state:
                    state["z"] = p.clone()
                    state["start"] = p.detach().clone()
                    state["square"] = torch.zeros_like(p)
                progress += (p.grad * (state["start"] - state["z"])).sum().item()
            group["distance"] = max(group["distance"], abs(progress) / (1 + group["k"]))
            rate = group["lr"] * group["distance"]
            group["weight_sum"] += rate
            share = rate / group["weight_sum"]
            for p in used:
                state = self.state[p]
                state["square"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                direction = p.grad / (state["square"].sqrt() + 1e-8)
                state["z"].sub_(direction, alpha=rate)
                p.lerp_(state["z"], share)
                if float(p.abs().max()) > 10:
                    p.mul_(0.5)
            group["k"] += 1


def _of(kind: type[torch.optim.Optimizer], **options: Any) -> Optimizers:
    return lambda module: [kind(trained(module), **options)]


def _muon(module: nn.Module) -> list[torch.optim.Optimizer]:
    """As it is used: matrices of blocks, with AdamW for the rest."""
    matrices = [p for name, p in module.named_parameters() if p.requires_grad and p.ndim == 2 and "blocks" in name]
    others = [p for p in trained(module) if not any(p is matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01, fused=True)]


OPTIMIZERS: dict[str, Optimizers] = {
    "AdamW fused": adamw,
    "AdamW foreach": _of(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW loop": _of(torch.optim.AdamW, lr=0.01, foreach=False),
    "Adam amsgrad": _of(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1, fused=True),
    "Adam maximize": _of(torch.optim.Adam, lr=0.01, amsgrad=True, maximize=True, foreach=True),
    "SGD": _of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    "SGD fused": _of(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "SGD plain": _of(torch.optim.SGD, lr=0.1, foreach=False),
    "Adagrad": _of(torch.optim.Adagrad, lr=0.01, fused=True),
    "RMSprop": _of(torch.optim.RMSprop, lr=0.001, momentum=0.5, centered=True),
    "NAdam": _of(torch.optim.NAdam, lr=0.01),
    "RAdam": _of(torch.optim.RAdam, lr=0.01),
    "Adamax": _of(torch.optim.Adamax, lr=0.01),
    "Adadelta": _of(torch.optim.Adadelta, lr=0.1),
    "ASGD": _of(torch.optim.ASGD, lr=0.01),
    "Rprop": _of(torch.optim.Rprop, lr=0.001),
    "Adafactor": _of(torch.optim.Adafactor, lr=0.01),
    "Muon": _muon,
    "ScheduleFree": _of(ScheduleFree),
}


def _trains(loop: Loop) -> None:
    loop.train(2)


def _optimizer_cases() -> Iterator[Case]:
    """Stages and precisions take turns."""
    settings = itertools.cycle([(3, "mixed"), (1, "fp32"), (2, "fp32"), (1, "mixed"), (3, "fp32")])
    for (name, make), (stage, recipe) in zip(OPTIMIZERS.items(), settings, strict=False):
        # It takes norms of weights: where these rest whole without offload, at stages 1 and 2 in one dtype, they are
        # summed in one piece, else rank by rank.
        stage = 3 if name == "Adafactor" else stage
        yield Case(f"{name} at stage {stage}, {recipe}", _trains, make, stage, recipe)


# What happens between


Act = Callable[[Loop], None]
ACTS: dict[str, tuple[Act, Optimizers]] = {}
OF_WEIGHTS: set[str] = set()
"""Acts that read or write weights, and not only through optimizers and forwards."""
SUM_WEIGHTS: set[str] = set()
"""Acts that reduce whole weights: see the note at Adafactor."""


def _act(optimizers: Optimizers = adamw, of_weights: bool = False, sums_weights: bool = False) -> Callable[[Act], Act]:
    def register(act: Act) -> Act:
        ACTS[act.__name__] = act, optimizers
        if of_weights or sums_weights:
            OF_WEIGHTS.add(act.__name__)
        if sums_weights:
            SUM_WEIGHTS.add(act.__name__)
        return act

    return register


@_act(_of(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True))
def schedules_the_rate(loop: Loop) -> None:
    """What was queued keeps the rate of its step."""
    schedule = torch.optim.lr_scheduler.StepLR(loop.optimizers[0], 1, 0.1)
    for _ in range(3):
        loop.backward()
        loop.step()
        schedule.step()


def _with_tensor_rate(module: nn.Module) -> list[torch.optim.Optimizer]:
    first, *others = trained(module)
    rate = torch.tensor(0.05)
    return [
        torch.optim.AdamW([first, *others[::2]], lr=rate, fused=True),
        torch.optim.Adam(others[1::2], lr=torch.tensor(0.05), foreach=False, weight_decay=0.1),
    ]


@_act(_with_tensor_rate)
def schedules_a_rate_that_is_a_tensor(loop: Loop) -> None:
    """It is changed in place right after the step."""
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1) for optimizer in loop.optimizers]
    for _ in range(3):
        loop.backward()
        loop.step()
        for schedule in schedules:
            schedule.step()


@_act(of_weights=True)
def changes_hyperparameters(loop: Loop) -> None:
    """Right after a step, and an operand of an operation after it."""
    for _ in range(2):
        loop.backward()
        loop.step()
        loop.optimizers[0].param_groups[0].update(betas=(0.5, 0.6), weight_decay=0.0, lr=1.0)
        noise = [torch.full(p.shape, 0.01, dtype=p.dtype) for p in trained(loop.module)]
        factor = torch.tensor(0.5)
        with torch.no_grad():
            for p, more in zip(trained(loop.module), noise, strict=True):
                p.add_(more).mul_(factor)
            torch._foreach_add_(trained(loop.module), noise)
            torch._foreach_mul_(trained(loop.module), factor)
        for more in noise:
            more.zero_()
        factor.zero_()


def _several(module: nn.Module) -> list[torch.optim.Optimizer]:
    params = trained(module)
    return [
        torch.optim.AdamW(params[::3], lr=0.01, fused=True),
        torch.optim.SGD(params[1::3], lr=0.1, momentum=0.9, foreach=True),
        torch.optim.RMSprop(params[2::3], lr=0.01),
    ]


@_act(_several)
def has_several_optimizers(loop: Loop) -> None:
    """Over parameters of the same units, in turns."""
    for _ in range(2):
        loop.backward()
        for optimizer in loop.optimizers:
            optimizer.step()
            optimizer.zero_grad()
            loop.backward()
        loop.optimizers[0].step()
        loop.optimizers[0].zero_grad()


@_act()
def zeroes_gradients_in_place(loop: Loop) -> None:
    for _ in range(3):
        loop.backward()
        loop.step(zero=False)
        loop.optimizers[0].zero_grad(set_to_none=False)


@_act()
def drops_some_gradients_between_micro_batches(loop: Loop) -> None:
    for _ in range(2):
        loop.backward(waits=True)
        for p in trained(loop.module)[::2]:
            p.grad = None
        loop.backward()
        for p in trained(loop.module)[1::3]:
            p.grad = None
        loop.step(zero=False)


@_act()
def changes_gradients_between_micro_batches(loop: Loop) -> None:
    """A later micro-batch adds to what was changed."""
    for waits in (True, False):
        loop.backward(waits)
        with torch.no_grad():
            for p in trained(loop.module):
                if p.grad is not None:
                    p.grad.mul_(0.25)
        loop.backward()
        loop.step()


@_act()
def zeroes_gradients_between_micro_batches(loop: Loop) -> None:
    for waits in (True, False):
        loop.backward(waits)
        loop.optimizers[0].zero_grad(set_to_none=False)
        loop.backward()
        loop.step()


@_act()
def sets_gradients(loop: Loop) -> None:
    """Alone, before a backward that adds to them, and after it."""
    params = trained(loop.module)
    for p in params:
        p.grad = torch.full(p.shape, 0.25, dtype=p.dtype)
    loop.step()
    for p in params[::2]:
        p.grad = torch.full(p.shape, 0.25, dtype=p.dtype)
    loop.backward()
    loop.step()
    loop.backward()
    for p in params[1::2]:
        p.grad = torch.full(p.shape, 0.25, dtype=p.dtype)
    loop.step()


@_act()
def runs_backward_several_times(loop: Loop) -> None:
    """Without `no_sync`: each backward reduces, and adds to what is on its way or there."""
    loop.backward()
    loop.backward()
    loop.step()
    loop.backward()
    loop.see(*(p.grad for p in trained(loop.module)))
    loop.backward()
    loop.backward()
    loop.step(zero=False)
    loop.backward()
    loop.step()


@_act()
def reads_gradients(loop: Loop) -> None:
    """Between micro-batches too."""
    for waits in (False, True):
        loop.backward(waits)
        grads = [p.grad for p in trained(loop.module) if p.grad is not None]
        loop.see(*(grad.norm() for grad in grads), nn.utils.get_total_norm(grads), *(grad * 2 for grad in grads))
        loop.backward()
        loop.step(zero=False)


def _only_blocks(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(trained(module.blocks), lr=0.01, fused=True)]


@_act(_only_blocks)
def adds_a_group(loop: Loop) -> None:
    """Of parameters that had gradients before, and of one that was frozen."""
    loop.train()
    frozen = loop.module.blocks[0].up.weight
    frozen.requires_grad_(True)
    head = [p for name, p in loop.module.named_parameters() if not name.startswith("blocks")]
    loop.backward()
    loop.optimizers[0].add_param_group({"params": [*head, frozen], "lr": 0.1})
    loop.step()
    loop.train(2)


@_act(of_weights=True)
def freezes_and_unfreezes(loop: Loop) -> None:
    for on in (False, True, False):
        loop.module.blocks[1].requires_grad_(on)
        loop.module.blocks[2].down.requires_grad_(not on)
        loop.train()


@_act()
def loads_optimizer_state(loop: Loop) -> None:
    """A copy of its own, and whole values as they come from a file; the next steps go on from there."""
    optimizer = loop.optimizers[0]
    loop.train()
    own = copy.deepcopy(optimizer.state_dict())
    whole = whole_values(optimizer.state_dict())
    loop.train()
    optimizer.load_state_dict(own)
    loop.train()
    optimizer.load_state_dict(shard_optimizer_state(optimizer, whole))
    loop.train()
    loop.see(*_moments(optimizer))


@_act(sums_weights=True)
def reads_state_right_after_a_step(loop: Loop) -> None:
    """Weights, moments, and what is computed from them."""
    for _ in range(2):
        loop.backward()
        loop.step()
        params = trained(loop.module)
        loop.see(*_moments(loop.optimizers[0]))
        with torch.no_grad():
            loop.see(*(p.norm() for p in params), *(p + 0 for p in params), *(p.mean() for p in params))
            loop.see(*torch._foreach_norm(params), *(p.float().abs().max() for p in params))
            loop.see(*params, *(p[0] for p in params if p.ndim), *loop.module.state_dict().values())
        loop.see(loop.optimizers[0].state_dict()["state"][0]["exp_avg"])


@_act(of_weights=True)
def reads_whole_weights_right_after_a_step(loop: Loop) -> None:
    """By hand, and in a product outside any forward."""
    for _ in range(2):
        loop.backward()
        loop.step()
        with lightning_zero.gathered(loop.module):
            loop.see(*(p.detach() for p in trained(loop.module)))
        loop.see(loop.module.embed.weight.detach() @ torch.ones(6, dtype=loop.module.embed.weight.dtype))
        loop.see(*(p.tolist() for p in trained(loop.module)))


@_act(of_weights=True)
def evaluates_right_after_a_step(loop: Loop) -> None:
    for _ in range(2):
        loop.train()
        loop.module.eval()
        with torch.no_grad():
            loop.see(loop.loss())
        with torch.inference_mode():
            loop.see(float(loop.loss()))
        loop.module.train()


@_act(of_weights=True)
def writes_weights(loop: Loop) -> None:
    """In place, through `data`, views, initializers and `gathered`, right after a step."""
    params = trained(loop.module)
    for _ in range(2):
        loop.train()
        with torch.no_grad():
            for p in params[::2]:
                p.mul_(0.9)
                p.clamp_(-0.5, 0.5)
            params[1].copy_(torch.full(params[1].shape, 0.1, dtype=params[1].dtype))
            loop.module.embed.weight[2].zero_()
            loop.module.blocks[2].up.weight[:, 1] += 0.5
        for p in params[::3]:
            p.data = p.data * 0.5
            p.data.add_(0.01)
        nn.init.constant_(loop.module.blocks[0].norm.bias, 0.3)
        with lightning_zero.gathered(loop.module.blocks[2], writeback=True), torch.no_grad():
            loop.module.blocks[2].down.weight.add_(0.05)
        loop.train()


@_act(of_weights=True)
def mixes_weights_of_layers(loop: Loop) -> None:
    """Each takes what another one is now; that one changes afterwards."""
    first, last = loop.module.blocks[0], loop.module.blocks[2]
    pairs = list(zip(first.parameters(), last.parameters(), strict=True))
    for _ in range(2):
        loop.train()
        with torch.no_grad():
            for p, q in pairs:
                p.lerp_(q, 0.5)
                q.mul_(0.5)
            torch._foreach_add_([p for p, _ in pairs], [q for _, q in pairs], alpha=0.1)
            for _, q in pairs:
                q.add_(0.01)
        loop.see(*last.parameters(), *first.parameters())


@_act()
def changes_optimizer_state(loop: Loop) -> None:
    loop.train()
    for state in loop.optimizers[0].state.values():
        state["exp_avg"].mul_(0.5)
        state["exp_avg_sq"] = state["exp_avg_sq"] + 0.01
    loop.train(2)
    loop.see(*_moments(loop.optimizers[0]))


@_act()
def copies_the_optimizer(loop: Loop) -> None:
    """Right after a step; the copy stays as it is while the original goes on."""
    loop.train()
    copied = copy.deepcopy(loop.optimizers[0])
    loop.train()
    loop.see(*_moments(copied), *(p for group in copied.param_groups for p in group["params"]))


@_act(of_weights=True)
def averages_weights(loop: Loop) -> None:
    """A copy of the module follows it."""
    loop.backward()
    loop.step()
    average = AveragedModel(loop.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(2):
        loop.train()
        average.update_parameters(loop.module)
    loop.see(*average.module.parameters())


@_act(of_weights=True)
def keeps_the_best_weights(loop: Loop) -> None:
    """A deep copy of `state_dict()`, and clones, right after a step; loaded again later."""
    loop.train()
    best = copy.deepcopy(loop.module.state_dict())
    clones = [p.detach().clone() for p in trained(loop.module)]
    loop.train()
    loop.see(*best.values(), *clones)
    loop.module.load_state_dict(best)
    loop.train()


def _scaled(fused: bool) -> Act:
    def act(loop: Loop) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = loop.optimizers[0]
        for step in range(3):
            scale = float("inf") if step == 1 and loop.rank == 0 else 1.0
            scaler.scale(loop.loss() * scale).backward()
            if not fused:
                scaler.unscale_(optimizer)
                loop.see(nn.utils.clip_grad_norm_(trained(loop.module), 0.5))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            loop.see(scaler.get_scale())

    return act


ACTS["scales the loss, unscales and clips"] = _scaled(fused=False), _of(torch.optim.AdamW, lr=0.01, foreach=True)
ACTS["scales the loss, unscales in the step"] = _scaled(fused=True), adamw


@_act(_of(torch.optim.LBFGS, lr=0.3, max_iter=3, history_size=3))
def evaluates_a_closure(loop: Loop) -> None:
    def closure() -> Tensor:
        loop.optimizers[0].zero_grad()
        loss = loop.loss()
        loss.backward()
        return loop.engine.collectives.all_reduce(loss.detach().clone())

    for _ in range(2):
        loop.optimizers[0].step(closure)


@_act()
def recovers_from_a_failed_backward(loop: Loop) -> None:
    """What had begun to move then goes with the gradients."""
    loop.train()

    def fail(_: Tensor) -> None:
        raise ValueError("as out of memory")

    handle = loop.module.blocks[0].norm.weight.register_hook(fail)
    with pytest.raises(ValueError, match="as out of memory"):
        loop.backward()
    handle.remove()
    loop.optimizers[0].zero_grad()
    loop.train(2)


@_act()
def steps_without_gradients(loop: Loop) -> None:
    loop.step()
    loop.train()
    loop.step()
    loop.step()
    loop.train()


@_act(sums_weights=True)
def looks_at_weights_in_hooks(loop: Loop) -> None:
    """Of the optimizer's step, and of accumulated gradients."""
    optimizer = loop.optimizers[0]
    optimizer.register_step_pre_hook(lambda *_: loop.see(*(p.grad for p in trained(loop.module))))
    optimizer.register_step_post_hook(lambda *_: loop.see(*(p.detach().sum() for p in trained(loop.module))))
    weight = loop.module.blocks[2].down.weight
    weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    loop.train(2, micro_batches=2)


def _moments(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _act_cases(world_size: int, settings: list[tuple[int, str]], names: Iterable[str]) -> Iterator[Case]:
    """Stages and precisions take turns."""
    for name, (stage, recipe) in zip(names, itertools.cycle(settings), strict=False):
        stage = 3 if name in SUM_WEIGHTS and world_size > 1 else stage
        yield Case(name, *ACTS[name], stage, recipe)


_NARROW = "mixed, narrow gradients"
_SETTINGS = [(3, "fp32"), (1, "mixed"), (2, "fp32"), (3, _NARROW), (1, "fp32")]
SUITES: dict[str, tuple[int, str, list[Case]]] = {
    "optimizers": (2, "a half", list(_optimizer_cases())),
    "some acts": (2, "a half", list(_act_cases(2, _SETTINGS, list(ACTS)[::2]))),
    "other acts": (2, "a half", list(_act_cases(2, _SETTINGS, list(ACTS)[1::2]))),
    "parameters": (2, "parameters too", list(_act_cases(2, [(3, "mixed"), (3, "fp32")], sorted(OF_WEIGHTS)))),
    # Without offload one process has no stages, and as many reductions and hooks as at stage 1.
    "one process": (1, "HostMemory", list(_act_cases(1, [(1, "fp32"), (1, "mixed")], ACTS))),
}
"""World size, target, cases."""


@pytest.mark.parametrize("suite", SUITES)
def test_nothing_shows_that_a_step_is_not_done(suite: str) -> None:
    world_size, target, cases = SUITES[suite]
    assert_equal(outcomes(cases, world_size, target), outcomes(cases, world_size, None))
