"""What activation checkpointing saves on long texts, and what it costs: memory and time of a Llama, length by length.

    none             what autograd saves
    full             the inputs of each block; the rest is computed again
    every second     the same, for each second block
    selective        inputs, and results of matrix products and attention
    offload          what autograd saves, in host memory
    full+offload     the inputs of each block, in host memory

    python examples/long_context.py                                   one process; about 5 minutes on two cores
    python examples/long_context.py --lengths 2048,32768 --policies none,full
    python examples/long_context.py --device cuda --layers 18 --hidden 2048 --lengths 8192,32768 --dtype bf16

"kept" is what waits between forward and backward, counted by the allocator, and "predicted" what `activation_bytes`
says of it beforehand; "peak" is the most that a step takes on top of the training state, its gradients included. On a
CPU the host memory of offload is left out of both. Steps of all policies are interleaved; a time is their median.
"""

import argparse
import gc
import platform
import shlex
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import lightning_zero
from lightning_zero import OffloadActivations, Recompute, Selective, activation_bytes

HEAD_DIM = 32
SEED = 0
POLICIES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "full": Recompute,
    "every second": lambda: Recompute(every=2),
    "selective": Selective,
    "offload": OffloadActivations,
    "full+offload": lambda: Recompute(inputs=OffloadActivations()),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Memory(NamedTuple):
    """Bytes of one step, on top of what rests."""

    kept: int
    peak: int


class Contender:
    """One model under one policy."""

    def __init__(self, policy: Any, config: LlamaConfig, args: argparse.Namespace) -> None:
        torch.manual_seed(SEED)
        with torch.device(args.device):
            self.model: nn.Module = LlamaForCausalLM(config).to(DTYPES[args.dtype])
        lightning_zero.shard(self.model, stage=3, activation_checkpointing=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.device = torch.device(args.device)
        self.seconds: list[float] = []
        self.loss = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def step(self, tokens: Tensor) -> None:
        """One step, timed."""
        self._wait()
        started = time.perf_counter()
        loss = self.forward(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._wait()
        self.seconds.append(time.perf_counter() - started)
        self.loss = loss.item()

    def memory(self, tokens: Tensor) -> Memory:
        """Of a forward and a backward, in the steady state: buffers on the host are those of the steps before."""
        if self.device.type == "cuda":
            return self._memory_on_cuda(tokens)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
            loss = self.forward(tokens)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
            loss.backward()
        self.optimizer.zero_grad()
        before, after = allocations(forward), allocations(backward)
        return Memory(sum(before), max(accumulate(before + after)))

    def _memory_on_cuda(self, tokens: Tensor) -> Memory:
        torch.cuda.reset_peak_memory_stats()
        rest = torch.cuda.memory_allocated()
        loss = self.forward(tokens)
        kept = torch.cuda.memory_allocated() - rest
        loss.backward()
        self.optimizer.zero_grad()
        return Memory(kept, torch.cuda.max_memory_allocated() - rest)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def allocations(found: profile) -> list[int]:
    """Bytes that were allocated (above 0) and freed (below), in order."""
    events = []
    waiting = list(found.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    return [nbytes for _, nbytes in sorted(events)]


class Block(nn.Module):
    """A decoder layer that finds the angles of positions in itself: they belong to all blocks, and count for none."""

    def __init__(self, layer: nn.Module, angles: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("cos", angles[0])
        self.register_buffer("sin", angles[1])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x, position_embeddings=(self.cos, self.sin))
        return result


class Root(nn.Module):
    """What follows the blocks."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.head, self.vocab = model.model.norm, model.lm_head, model.config.vocab_size
        self.loss_function = model.loss_function

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.loss_function(logits=self.head(self.norm(x)), labels=labels, vocab_size=self.vocab)
        return loss


def predict(policies: list[Any], config: LlamaConfig, tokens: Tensor, dtype: torch.dtype) -> int:
    """Bytes that wait for backward, block after block under ``policies`` in turn; of the model nothing is allocated."""
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).to(dtype)
    x = torch.empty(*tokens.shape, config.hidden_size, dtype=dtype, device=tokens.device, requires_grad=True)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    angles = LlamaRotaryEmbedding(config).to(tokens.device)(x, positions)
    first, *others = model.model.layers
    total = activation_bytes(None, Root(model), x, tokens)
    total += activation_bytes(policies[0], first, x, position_embeddings=angles)
    for index, layer in enumerate(others, start=1):
        total += activation_bytes(policies[index % len(policies)], Block(layer, angles), x)
    return total


def measure(length: int, args: argparse.Namespace) -> list[tuple[Any, ...]]:
    """Rows of the table for texts of ``length`` tokens."""
    config = LlamaConfig(
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=8 * args.hidden // 3,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // HEAD_DIM, max_position_embeddings=length,
        use_cache=False,
    )  # fmt: skip
    contenders = {name: Contender(POLICIES[name](), config, args) for name in args.policies}
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(args.vocab, (1, length), generator=generator).to(args.device)
    for number in range(args.steps + 1):
        for contender in contenders.values():
            contender.step(tokens)
            if number == 0:
                contender.seconds.clear()  # a warm-up
    rows = []
    for name, contender in contenders.items():
        gc.collect()
        memory = contender.memory(tokens)
        policies = [Recompute(), None] if name == "every second" else [POLICIES[name]()]
        predicted = predict(policies, config, tokens, DTYPES[args.dtype])
        rows.append((length, name, memory.kept, predicted, memory.peak, median(contender.seconds), contender.loss))
    return rows


def report(rows: list[tuple[Any, ...]]) -> None:
    """Print the table; factors are those of the first policy at the same length."""
    titles = (
        "tokens",
        "policy",
        "kept MB",
        "of first",
        "predicted MB",
        "peak MB",
        "of first",
        "s/step",
        "of first",
        "loss",
    )
    lines = [titles]
    first: tuple[Any, ...] = ()
    for row in rows:
        length, name, kept, predicted, peak, seconds, loss = row
        first = row if not first or first[0] != length else first
        lines.append(
            (
                f"{length}", name, f"{kept / 1e6:.1f}", f"{kept / first[2]:.3f}", f"{predicted / 1e6:.1f}",
                f"{peak / 1e6:.1f}", f"{peak / first[4]:.3f}", f"{seconds:.3f}", f"{seconds / first[5]:.2f}",
                f"{loss:.6f}",
            )
        )  # fmt: skip
    widths = [max(len(line[column]) for line in lines) + 2 for column in range(len(titles))]
    for line in lines:
        print("".join(cell.rjust(width) for cell, width in zip(line, widths)))


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    found = text.split(",")
    for name in found:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; write some of {','.join(POLICIES)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Memory and time of activation checkpointing on long texts.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--lengths", type=numbers, default="1024,2048,4096,8192", help="tokens of a text")
    parser.add_argument(
        "--policies", type=names, default=",".join(POLICIES), help="what is compared with the first one"
    )
    parser.add_argument("--device", default="cpu", help="where the model is: cpu or cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of weights and activations")
    parser.add_argument("--layers", type=positive, default=8, help="decoder layers")
    parser.add_argument("--hidden", type=positive, default=128, help=f"width, a multiple of {HEAD_DIM}")
    parser.add_argument("--vocab", type=positive, default=512, help="tokens of the vocabulary")
    parser.add_argument("--steps", type=positive, default=3, help="timed steps")
    args = parser.parse_args()
    if args.hidden % HEAD_DIM:
        parser.error(f"--hidden {args.hidden} is no multiple of {HEAD_DIM}. Write --hidden {HEAD_DIM * 4}.")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    command = shlex.join(["python", *sys.argv])
    print(f"{command}: Python {platform.python_version()}, {versions}, {args.dtype}, {args.device}")
    rows = []
    for length in args.lengths:
        rows += measure(length, args)
    report(rows)


if __name__ == "__main__":
    main()
