"""Bytes of model state that this rank holds, counted from live storages, not from anyone's books."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.checkpoint.one_file import PER_PARAMETER_SCALARS
from lightning_zero.flat_buffer import storage_id
from lightning_zero.param_group import ParamGroup
from lightning_zero.placements import StateBytes
from lightning_zero.sharded_parameter import ShardedParameter, ShardedTensor

__all__ = ["held_bytes"]


def held_bytes(module: nn.Module, optimizers: Iterable[Optimizer] = ()) -> StateBytes:
    """Bytes that this rank holds of the parameters, gradients and optimizer state of ``module``, padding included.

    Storages are counted once, whole, under the first kind that refers to them. Whole buffers of units in flight count
    as parameters while a unit is open.

    Args:
        module: sharded or plain.
        optimizers: over its parameters.
    """
    seen: set[int] = set()
    parameters = list(module.parameters())
    return StateBytes(
        parameters=_nbytes((t for p in parameters for t in _weights(p)), seen),
        gradients=_nbytes((t for p in parameters for t in _gradients(p)), seen),
        optimizer=_nbytes((t for optimizer in optimizers for t in _state(optimizer)), seen),
    )


def _weights(parameter: nn.Parameter) -> Iterator[Tensor]:
    yield parameter
    owner = parameter.owner if isinstance(parameter, ShardedParameter) else None
    if isinstance(owner, ParamGroup) and owner.whole is not None:
        yield owner.whole


def _gradients(parameter: nn.Parameter) -> Iterator[Tensor]:
    owner = parameter.owner if isinstance(parameter, ShardedParameter) else None
    if isinstance(owner, ParamGroup):
        yield from owner.gradients.buffers()
    elif parameter.grad is not None:
        yield parameter.grad


def _state(optimizer: Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        # Step counters are bookkeeping of a few bytes, not state of the size of a parameter.
        yield from (v for k, v in state.items() if isinstance(v, Tensor) and k not in PER_PARAMETER_SCALARS)


def _nbytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        plain = tensor.fragment if isinstance(tensor, ShardedTensor) else tensor
        identity = storage_id(plain)
        if identity not in seen:
            seen.add(identity)
            total += plain.untyped_storage().nbytes()
    return total
