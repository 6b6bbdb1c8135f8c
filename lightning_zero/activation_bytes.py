"""Bytes of activations that a forward leaves for its backward under a policy, found without memory or computation.

The forward runs on fake tensors, which have shapes and no memory. What is still alive after it waits for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zero.activation import ActivationPolicy, OffloadActivations, Recompute
from lightning_zero.stash import HostStash, without_graph

__all__ = ["activation_bytes", "around"]


def activation_bytes(policy: ActivationPolicy | None, module: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Bytes that one training forward of ``module`` keeps on its device until backward.

    Inputs count where they are kept. Outputs do not: they are the inputs of what follows. Nor do parameters and
    buffers, and what `OffloadActivations` moves to the host.

    Args:
        policy: around the forward; ``None`` keeps what autograd saves.
        module: one unit, plain; its parameters may be on ``meta``.
        args, kwargs: of the forward; tensors give shapes, dtypes and devices alone.
    """
    devices = [value.device for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    with FakeTensorMode(allow_non_fake_inputs=True):

        def fake(tensor: Tensor) -> Tensor:
            device = devices[0] if tensor.is_meta and devices else tensor.device
            empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
            return empty.requires_grad_(tensor.requires_grad)

        own = {name: fake(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}

        def forward(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(module, own, args, kwargs)

        leaves = tree_map_only(Tensor, fake, (args, kwargs))
        with _Storages() as seen:
            # Results of something else, which nobody holds here.
            args, kwargs = tree_map_only(Tensor, torch.clone, leaves)
            apart = _moving(policy, (args, kwargs)) | _storages_of(own.values())
            out = forward(*args, **kwargs) if policy is None else around(policy, module, forward)(*args, **kwargs)
            del args, kwargs
        return int(seen.nbytes_alive(but_for=apart | _storages_of(tree_leaves(out))))


def around(policy: ActivationPolicy, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` of ``module`` under ``policy``, for a look at what it keeps; what would go to the host is dropped."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if isinstance(policy, OffloadActivations):
            with _leaving(policy.stash):
                return forward(*args, **kwargs)
        recompute = replace(policy, inputs=None) if isinstance(policy, Recompute) else policy
        return recompute.run(module, forward, args, kwargs)

    return run


def _leaving(stash: HostStash) -> Any:
    """Context in which what ``stash`` would take is let go of."""

    def pack(tensor: Tensor) -> Tensor | None:
        return None if stash.accepts(tensor) else without_graph(tensor)

    return torch.autograd.graph.saved_tensors_hooks(pack, _never)


def _never(packed: Any) -> Tensor:
    raise AssertionError("no backward follows")


def _moving(policy: ActivationPolicy | None, arguments: Any) -> set[int]:
    """The storages of inputs that wait on the host to be computed with again."""
    if not isinstance(policy, Recompute) or policy.inputs is None:
        return set()
    stash = policy.inputs.stash
    return _storages_of(t for t in tree_leaves(arguments) if isinstance(t, Tensor) and stash.accepts(t))


def _storages_of(values: Iterable[Any]) -> set[int]:
    return {StorageWeakRef(value.untyped_storage()).cdata for value in values if isinstance(value, Tensor)}


class _Storages(TorchDispatchMode):
    """Notes the storages of all results, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                reference = StorageWeakRef(storage)
                self._found[reference.cdata] = (reference, storage.nbytes())
        return out

    def nbytes_alive(self, but_for: set[int]) -> int:
        """Bytes of storages that someone still holds, others than those in ``but_for``."""
        return sum(n for cdata, (ref, n) in self._found.items() if cdata not in but_for and not ref.expired())
