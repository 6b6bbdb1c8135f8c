"""Inference mode is no trap: whatever is read or written there, training goes on as in one plain process.

Torch lets no tensor made in inference mode take part in autograd, so none of ours may be one: not a buffer that a
gather fills, not a view of a resting parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel
from twin import EXACT, WORLD_SIZE, adamw, build, plain, shard

import lightning_zero
from lightning_zero.engine import engine_of

STAGES = (0, 1, 2, 3)

READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda p: p.norm(),
    "norm of rows": lambda p: p.norm(dim=1),
    "sum": lambda p: p.sum().item(),
    "deviation": lambda p: p.std(),
    "largest": lambda p: p.abs().max(),
    "row": lambda p: p[0],
    "element": lambda p: float(p[1, 2]),
    "columns": lambda p: p[1:, ::2],
    "transpose": lambda p: p.t(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "view": lambda p: p.view(-1),
    "reshape": lambda p: p.t().reshape(-1),
    "chunk": lambda p: p.chunk(2)[1],
    "unbind": lambda p: torch.stack(p.unbind(1)),
    "expand": lambda p: p.expand(2, *p.shape),
    "clone": lambda p: p.clone(),
    "arithmetic": lambda p: 2 * p + 1,
    "cpu": lambda p: p.cpu(),
    "dtype": lambda p: p.to(torch.float32).double(),
    "linear": lambda p: F.linear(torch.ones(2, 3, p.shape[1]), p),
    "transposed matmul": lambda p: torch.ones(3, 2, p.shape[0]) @ p,
    "einsum": lambda p: torch.einsum("ij,kj->ik", p, p),
    "embedding": lambda p: F.embedding(torch.tensor([1, 0]), p),
    "concatenation": lambda p: torch.cat([p, p]),
    "a changed copy of another dtype": lambda p: p.to(torch.float32).mul_(2).double(),
    "a changed copy of the transpose": lambda p: p.t().reshape(-1).mul_(2),
    "a changed clone": lambda p: p.t().contiguous().add_(1),
    "gradient": lambda p: p.grad,
    "norm of the gradient": lambda p: p.grad.norm(),
    "row of the gradient": lambda p: p.grad[0],
}

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda p: p.mul_(0.5),
    "copy_": lambda p: p.copy_(torch.arange(float(p.numel())).view(p.shape) / 20),
    "row": lambda p: p.__setitem__(0, 0.3),
    "view": lambda p: p.view(-1)[3:8].fill_(0.2),
    "transpose": lambda p: p.t()[1].mul_(2),
    "data": lambda p: p.data.add_(0.1),
    "detach": lambda p: p.detach().clamp_(-0.2, 0.2),
    "gradient": lambda p: p.grad.mul_(3),
    "row of the gradient": lambda p: p.grad[1].zero_(),
}


class Net(nn.Module):
    """Nine odd layers between two of the root; the loss of drawn data."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(9))
        self.last = nn.Linear(5, 3)

    def forward(self, seed: int) -> Tensor:
        x = self.first(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x).pow(2).mean()


def backward(module: nn.Module, ranks: Sequence[int], step: int) -> None:
    for rank in ranks:
        (module(10 * step + rank) / len(ranks)).backward()


Session = Callable[[nn.Module, Sequence[int]], list[Any]]


def compare(
    session: Session,
    stage: int,
    make: Callable[[], nn.Module] = Net,
    sharding: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """What ``session`` returns, and the values it leaves, are the twin's on both ranks.

    Args:
        sharding: context in which the module is sharded.
    """

    def run(module: nn.Module, ranks: Sequence[int]) -> list[Any]:
        found = session(module, ranks)
        with lightning_zero.gathered(module):
            return [*found, {name: plain(p) for name, p in module.named_parameters()}]

    (expected,) = run_ranks(1, lambda _: run(build(make, 0, torch.float64), range(WORLD_SIZE)))

    def on_rank(rank: int) -> list[Any]:
        module = build(make, rank, torch.float64)
        with sharding():
            shard(module, stage)
        return run(module, [rank])

    for found in run_ranks(WORLD_SIZE, on_rank):
        torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize("stage", STAGES)
def test_reading_at_rest(stage: int) -> None:
    """Of a unit and of the root, with gradients there; in inference mode torch hands over undivided operations."""

    def session(module: nn.Module, ranks: Sequence[int]) -> list[Any]:
        found: list[Any] = []
        optimizer = adamw(module)
        for step in range(2):
            optimizer.zero_grad()
            backward(module, ranks, step)
            with torch.inference_mode():
                for read in READS.values():
                    for p in (module.layers[4].weight, module.first.weight):
                        value = read(p)
                        found.append(plain(value) if isinstance(value, Tensor) else value)
            optimizer.step()
        return found

    compare(session, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_writing_at_rest(stage: int) -> None:
    """The next step computes with what was written, weights and gradients."""

    def session(module: nn.Module, ranks: Sequence[int]) -> list[Any]:
        optimizer = adamw(module)
        for step, write in enumerate(WRITES.values()):
            optimizer.zero_grad()
            backward(module, ranks, 2 * step)
            for p in (module.layers[4].weight, module.first.weight):
                with torch.inference_mode():
                    write(p)
            optimizer.step()
            backward(module, ranks, 2 * step + 1)
            optimizer.step()
        return []

    compare(session, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_forwards_between_training_steps(stage: int) -> None:
    """The very first one; one that ends the gather which a step began; one between forward and backward."""

    def session(module: nn.Module, ranks: Sequence[int]) -> list[Any]:
        def evaluate() -> float:
            with torch.inference_mode():
                return float(module.eval()(99))

        found = [evaluate()]
        optimizer = adamw(module)
        for step in range(3):
            optimizer.zero_grad()
            losses = [module.train()(10 * step + rank) / len(ranks) for rank in ranks]
            if step == 1:
                found.append(evaluate())
            sum(losses).backward()
            optimizer.step()
            found.append(evaluate())
        return found

    compare(session, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_is_reduced_when_it_is_read(stage: int) -> None:
    """Accumulated gradients wait until someone looks, which may be in inference mode; the next ones are added."""

    def session(module: nn.Module, ranks: Sequence[int]) -> list[Any]:
        found: list[Any] = []
        optimizer = adamw(module)
        for step in range(2):
            optimizer.zero_grad()
            waiting = lightning_zero.no_sync if engine_of(module) is not None else lambda _: torch.enable_grad()
            with waiting(module):
                backward(module, ranks, 2 * step)
            with torch.inference_mode():
                found += [plain(module.layers[4].weight.grad), plain(module.first.bias.grad)]
            backward(module, ranks, 2 * step + 1)
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
        return found

    compare(session, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_the_module_as_an_object(stage: int) -> None:
    """`shard`, `state_dict`, `load_state_dict`, a write in `gathered`, `unshard`: then the plain module trains."""

    def session(module: nn.Module, ranks: Sequence[int]) -> list[Any]:
        optimizer = adamw(module)
        backward(module, ranks, 0)
        optimizer.step()
        # A step began to gather what is read here.
        with torch.inference_mode():
            state = {name: plain(value) for name, value in module.state_dict().items()}
        optimizer.zero_grad()
        backward(module, ranks, 1)
        optimizer.step()
        with torch.inference_mode():
            module.load_state_dict(state)
            with lightning_zero.gathered(module, writeback=True):
                module.layers[2].weight.mul_(1.5)
                module.last.bias.fill_(0.1)
        optimizer.zero_grad()
        backward(module, ranks, 2)
        optimizer.step()
        if engine_of(module) is not None:
            with torch.inference_mode():
                lightning_zero.unshard(module)
        optimizer = adamw(module)
        optimizer.zero_grad()
        backward(module, range(WORLD_SIZE), 3)
        optimizer.step()
        return [state]

    compare(session, stage, sharding=torch.inference_mode)


class Writer(nn.Module):
    """A tiny GPT-2; its loss, and how it continues a prompt."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=13, n_positions=16, n_embd=6, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=None,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)

    def forward(self, seed: int) -> Tensor:
        ids = torch.randint(13, (2, 6), generator=torch.Generator().manual_seed(seed))
        return self.model(ids, labels=ids).loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", STAGES)
def test_generation(stage: int) -> None:
    """Before the first step and after each: the text that one process writes."""

    def session(module: nn.Module, ranks: Sequence[int]) -> list[Any]:
        def text() -> Any:
            with torch.inference_mode():
                prompt = torch.tensor([[1, 2, 3]])
                return module.model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()

        found = [text()]
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            backward(module, ranks, step)
            optimizer.step()
            found.append(text())
        assert len({str(ids) for ids in found}) > 1, "training is to change the text"
        return found

    compare(session, stage, Writer)
