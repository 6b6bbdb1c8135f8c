"""Optimizers that cannot step sharded tensors, and would not say so themselves."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

__all__ = ["refuse_unfit_optimizer"]

_PAST_PYTHON = {"apex", "transformer_engine", "deepspeed", "colossalai"}
"""Packages whose optimizers hand tensors to kernels of their own, which see neither fragment nor value."""


def refuse_unfit_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """See that ``optimizer`` can step sharded parameters.

    Raises:
        ValueError: it cannot, with what to write instead.
    """
    kind: Any = type(optimizer)
    reason = _reason(kind)
    if reason is not None:
        raise ValueError(reason)


@cache
def _reason(kind: Any) -> str | None:
    for base in kind.__mro__:
        if base.__name__ == "ZeroRedundancyOptimizer":
            return (
                f"`{kind.__name__}` shards the state of an optimizer whose state is sharded here already, and would"
                " send whole parameters between ranks. Use the optimizer that it wraps:"
                " `torch.optim.Adam(self.parameters(), lr=...)` for"
                " `ZeroRedundancyOptimizer(self.parameters(), optimizer_class=torch.optim.Adam, lr=...)`."
            )
        package = base.__module__.split(".")[0]
        if package in _PAST_PYTHON:
            return (
                f"`{base.__module__}.{base.__name__}` hands addresses to a kernel of its own, and a sharded parameter"
                " has none. Use torch's fused kernels: `torch.optim.AdamW(self.parameters(), lr=..., fused=True)`."
            )
    return None
