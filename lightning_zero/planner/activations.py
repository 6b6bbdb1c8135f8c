"""Bytes that a whole training forward of a module leaves for its backward, found without memory or computation."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from lightning_zero.activation import ActivationPolicy, activation_policies, chosen_policies
from lightning_zero.activation_bytes import activation_bytes, around
from lightning_zero.autocast import is_multiplied
from lightning_zero.holders import Holder, holders_of_parameters

__all__ = ["model_activation_bytes"]

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def model_activation_bytes(
    module: nn.Module,
    members: Sequence[nn.Module],
    precision: str,
    micro_batch: int,
    seq_len: int | None,
    policy: str = "",
    narrow: bool = True,
) -> float | None:
    """Bytes kept from forward to backward of one micro-batch; of what is recomputed, one unit is whole again besides.

    Args:
        module: a Hugging Face model of tokens, or one with an ``example_input_array``, as a LightningModule may have.
        members: the modules of its units.
        precision: the Trainer's.
        micro_batch: sequences.
        seq_len: tokens of each.
        policy: what units keep, a name that ``activation_checkpointing`` takes; "" is everything.
        narrow: whether weights of products are gathered in autocast's dtype; else it keeps casts of them, too.

    Returns:
        ``None`` where nobody says what the forward takes.
    """
    inputs = _inputs(module, micro_batch, seq_len)
    if inputs is None:
        return None

    casts = _AUTOCAST[precision] if narrow and precision in _AUTOCAST else None

    def kept(policy_of: dict[nn.Module, ActivationPolicy]) -> int:
        autocast = torch.autocast("cpu", _AUTOCAST[precision]) if precision in _AUTOCAST else nullcontext()
        with _unpacked(), _gathered_in(casts, module), _applied(policy_of), autocast:
            return activation_bytes(None, _Loss(module), *inputs[0], **inputs[1])

    everything = kept({})
    if not policy:
        return float(everything)
    policy_of = chosen_policies(module, members, activation_policies(policy))
    less = kept(policy_of)
    return less + max(0, everything - less) / max(1, len(policy_of))


def _inputs(module: nn.Module, micro_batch: int, seq_len: int | None) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    config: Any = getattr(module, "config", None)
    if seq_len is not None and hasattr(config, "vocab_size") and getattr(module, "main_input_name", "") == "input_ids":
        tokens = torch.zeros(micro_batch, seq_len, dtype=torch.long)
        inputs: dict[str, Any] = {"input_ids": tokens}
        if "ForCausalLM" in type(module).__name__ or "ForMaskedLM" in type(module).__name__:
            inputs["labels"] = tokens
        if getattr(config, "use_cache", False):
            inputs["use_cache"] = False
        return (), inputs
    example: Any = getattr(module, "example_input_array", None)
    if example is None:
        return None
    if isinstance(example, dict):
        return (), example
    return (example if isinstance(example, tuple) else (example,)), {}


@contextmanager
def _unpacked() -> Iterator[None]:
    """Context in which transformers takes no batch for several sequences in a row.

    Of a tensor without values it cannot tell, and would keep a mask that a real forward does without.
    """
    masks = sys.modules.get("transformers.masking_utils")
    find = getattr(masks, "find_packed_sequence_indices", None)
    if find is not None:
        vars(masks)["find_packed_sequence_indices"] = lambda *_, **__: None
    try:
        yield
    finally:
        if find is not None:
            vars(masks)["find_packed_sequence_indices"] = find


@contextmanager
def _gathered_in(dtype: torch.dtype | None, module: nn.Module) -> Iterator[None]:
    """Context in which the weights of products, on ``meta``, have ``dtype``."""
    places = [] if dtype is None else list(_products(module))
    for holder, value in places:
        narrow = torch.empty_like(value, dtype=dtype)
        holder.module._parameters[holder.attribute] = nn.Parameter(narrow, value.requires_grad)
    try:
        yield
    finally:
        for holder, value in places:
            holder.module._parameters[holder.attribute] = value


def _products(module: nn.Module) -> Iterator[tuple[Holder, nn.Parameter]]:
    for value, holders in holders_of_parameters(module).items():
        if all(is_multiplied(holder.module, holder.attribute, value) for holder in holders):
            yield from ((holder, cast(nn.Parameter, value)) for holder in holders)


@contextmanager
def _applied(policy_of: dict[nn.Module, ActivationPolicy]) -> Iterator[None]:
    for part, policy in policy_of.items():
        part.forward = around(policy, part, part.forward)
    try:
        yield
    finally:
        for part in policy_of:
            del part.forward


class _Loss(nn.Module):
    """What a training step keeps of a forward: its loss, where it computes one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.module(*args, **kwargs)
        loss = getattr(out, "loss", None)
        return out if loss is None else loss
