"""Bytes of activations that a forward leaves for its backward under a policy, found without memory or computation.

The forward runs on fake tensors, which have shapes and no memory. What is still alive after it waits for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zero.activation import ActivationPolicy, OffloadActivations, Recompute

__all__ = ["activation_bytes"]


def activation_bytes(policy: ActivationPolicy | None, module: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Bytes that one training forward of ``module`` keeps on its device until backward.

    Its inputs count, its outputs do not: they are the inputs of what follows. Nor do parameters and buffers, and
    what `OffloadActivations` moves to the host.

    Args:
        policy: around the forward; ``None`` keeps what autograd saves.
        module: one unit, plain; its parameters may be on ``meta``.
        args, kwargs: of the forward; tensors give shapes, dtypes and devices alone.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(tensor: Tensor) -> Tensor:
            return mode.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)

        own = {name: fake(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}

        def forward(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(module, own, args, kwargs)

        args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        seen = _Storages(inputs)
        moved: list[Tensor] = []
        with seen:
            if isinstance(policy, OffloadActivations):
                with torch.autograd.graph.saved_tensors_hooks(_noting(moved, policy), lambda tensor: tensor):
                    out = forward(*args, **kwargs)
            else:
                if isinstance(policy, Recompute) and policy.inputs is not None:
                    moved += filter(policy.inputs.stash.accepts, inputs)
                out = forward(*args, **kwargs) if policy is None else policy.run(module, forward, args, kwargs)
        return seen.nbytes_alive(but_for=(*own.values(), *tree_leaves(out), *moved))


def _noting(moved: list[Tensor], policy: OffloadActivations) -> Callable[[Tensor], Tensor]:
    def pack(tensor: Tensor) -> Tensor:
        if policy.stash.accepts(tensor):
            moved.append(tensor)
        return tensor

    return pack


class _Storages(TorchDispatchMode):
    """Notes the storages of all results, without keeping them alive.

    Args:
        inputs: storages to begin with.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}
        self._note(inputs)

    def _note(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                reference = StorageWeakRef(storage)
                self._found[reference.cdata] = (reference, storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._note(out)
        return out

    def nbytes_alive(self, but_for: Sequence[Any]) -> int:
        """Bytes of storages that someone still holds, others than those of ``but_for``."""
        apart = {StorageWeakRef(t.untyped_storage()).cdata for t in but_for if isinstance(t, Tensor)}
        return sum(n for cdata, (reference, n) in self._found.items() if cdata not in apart and not reference.expired())
