"""Bytes of model state that this rank holds, counted from live storages, not from anyone's books."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.checkpoint.one_file import PER_PARAMETER_SCALARS
from lightning_zero.flat_buffer import storage_id
from lightning_zero.param_group import ParamGroup
from lightning_zero.placements import StateBytes, Where
from lightning_zero.sharded_parameter import ShardedParameter, ShardedTensor

__all__ = ["held_bytes"]


_Held = tuple[Tensor, bool]
"""A tensor, and whether it rests off the device."""


def held_bytes(module: nn.Module, optimizers: Iterable[Optimizer] = (), where: Where = "everywhere") -> StateBytes:
    """Bytes that this rank holds of the parameters, gradients and optimizer state of ``module``, padding included.

    Storages are counted once, whole, under the first kind that refers to them. Whole buffers of units in flight count
    as parameters while a unit is open.

    Args:
        module: sharded or plain.
        optimizers: over its parameters.
        where: count what rests on the device alone, or what is offloaded alone.
    """
    seen: set[int] = set()
    parameters = list(module.parameters())
    return StateBytes(
        parameters=_nbytes((t for p in parameters for t in _weights(p)), seen, where),
        gradients=_nbytes((t for p in parameters for t in _gradients(p)), seen, where),
        optimizer=_nbytes((t for optimizer in optimizers for t in _state(optimizer)), seen, where),
    )


def _weights(parameter: nn.Parameter) -> Iterator[_Held]:
    owner = parameter.owner if isinstance(parameter, ShardedParameter) else None
    if isinstance(owner, ParamGroup):
        yield from owner.main.shards()
        if owner.whole is not None:
            yield owner.whole, False
    else:
        yield _plain(parameter)


def _gradients(parameter: nn.Parameter) -> Iterator[_Held]:
    owner = parameter.owner if isinstance(parameter, ShardedParameter) else None
    if isinstance(owner, ParamGroup):
        yield from owner.gradients.buffers()
    elif parameter.grad is not None:
        yield _plain(parameter.grad)


def _state(optimizer: Optimizer) -> Iterator[_Held]:
    for state in optimizer.state.values():
        # Step counters are bookkeeping of a few bytes, not state of the size of a parameter.
        yield from (_plain(v) for k, v in state.items() if isinstance(v, Tensor) and k not in PER_PARAMETER_SCALARS)


def _plain(tensor: Tensor) -> _Held:
    return (tensor.fragment, tensor.lane is not None) if isinstance(tensor, ShardedTensor) else (tensor, False)


def _nbytes(tensors: Iterable[_Held], seen: set[int], where: Where) -> int:
    total = 0
    for tensor, offloaded in tensors:
        identity = storage_id(tensor)
        if identity not in seen and where in ("everywhere", "offloaded" if offloaded else "device"):
            seen.add(identity)
            total += tensor.untyped_storage().nbytes()
    return total
