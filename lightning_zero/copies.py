"""Copies of a sharded module that are kept beside it, as averages of its weights are: cut as the module is.

module    | rank 0 |  rank 1  |      an elementwise update needs nothing from other ranks,
copy      | rank 0 |  rank 1  |      and a copy costs each rank 1/N of it
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_zero.collectives import Collectives
from lightning_zero.sharded_parameter import ShardedParameter

__all__ = ["shard_copy", "share_buffers", "unshard_copy"]


def shard_copy(copy: nn.Module, module: nn.Module) -> None:
    """Let ``copy``, a plain deep copy of ``module`` from before that was sharded, rest as ``module`` does.

    Rank 0's values are the truth: a collective. Parameters that ``module`` does not have stay as they are.
    """
    resting: dict[str, Tensor] = dict(module.named_parameters())

    def cut(name: str, parameter: Tensor) -> Tensor:
        like = resting.get(name)
        if not isinstance(like, ShardedParameter) or like.shape != parameter.shape:
            return parameter
        slicing = like.slicing
        whole = parameter.detach().to(slicing.collectives.device, copy=True).contiguous()
        fragment = slicing.cut(slicing.collectives.broadcast(whole))
        if like.lane is None:
            fragment = fragment.to(parameter.device, copy=True)
        else:
            fragment = like.lane.allocate(fragment.numel(), fragment.dtype).copy_(fragment)
        return ShardedParameter(fragment, slicing, parameter.requires_grad, lane=like.lane)

    _replace(copy, cut)


@torch.no_grad()
def share_buffers(copy: nn.Module, collectives: Collectives) -> None:
    """Make rank 0's buffers of ``copy`` everyone's, as data parallelism does before it computes with them."""
    for buffer in copy.buffers():
        shared = buffer.detach().to(collectives.device, copy=True).contiguous()
        buffer.copy_(collectives.broadcast(shared, purpose="buffers"))


def unshard_copy(copy: nn.Module, device: torch.device) -> None:
    """Make ``copy`` plain, its sharded parameters on ``device``: a collective."""

    def assemble(_: str, parameter: Tensor) -> Tensor:
        if not isinstance(parameter, ShardedParameter):
            return parameter
        return nn.Parameter(parameter.whole().to(device, copy=True), requires_grad=parameter.requires_grad)

    _replace(copy, assemble)


def _replace(module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> None:
    """Put ``change(name, parameter)`` in the place of each parameter, once for those that several modules share."""
    changed: dict[Tensor, Tensor] = {}
    with torch.inference_mode(False), torch.no_grad():
        for path, owner in module.named_modules():
            for attribute, parameter in list(owner._parameters.items()):
                if parameter is None:
                    continue
                if parameter not in changed:
                    changed[parameter] = change(f"{path}.{attribute}" if path else attribute, parameter)
                # Not into `_parameters`: recurrent modules keep a list of their own beside it.
                setattr(owner, attribute, changed[parameter])
