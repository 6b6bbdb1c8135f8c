"""Which units' state is offloaded, whether there is room for it, and how an optimizer steps it fast."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_zero.collectives import Collectives
from lightning_zero.host_memory import free_host_bytes
from lightning_zero.offload import OffloadError, OffloadTarget

__all__ = ["ask_for_fused", "moments_of", "offloaded_units", "require_room"]

_log = logging.getLogger(__name__)

_MOMENTS = {
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adadelta": 2,
    "Adagrad": 1,
    "ASGD": 1,
    "Rprop": 2,
}
"""Optimizer state in multiples of the weights, where it does not depend on settings."""


def offloaded_units(
    target: OffloadTarget, numels: Sequence[int], bytes_per_element: float, device: torch.device
) -> list[bool]:
    """Which units are offloaded: those that stay are the first ones that fit.

    The forward needs those first, and their update is done where it is fast; the later ones have longer to arrive.

    Args:
        target: its ``ratio`` and ``device_budget`` decide.
        numels: elements of each unit that may be offloaded, in the order of the forward.
        bytes_per_element: of main weights, gradients and optimizer state, a rank.
        device: where what stays is.
    """
    if target.ratio == "auto":
        budget = target.device_budget if target.device_budget is not None else _free_bytes(device) // 2
        room = budget / bytes_per_element
    else:
        room = (1 - target.ratio) * sum(numels)
    offloaded = []
    for numel in numels:
        stays = numel <= room
        room -= numel if stays else 0
        offloaded.append(not stays)
    return offloaded


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes() or 0


def require_room(target: OffloadTarget, nbytes: float, what: str, local_ranks: int, collectives: Collectives) -> None:
    """See that ``nbytes`` a rank can be allocated at ``target`` on every host: a collective, one answer.

    Args:
        what: will be allocated.
        local_ranks: ranks on this host.

    Raises:
        OffloadError: there is no room; on all ranks.
    """
    free = target.free_bytes()
    need = int(nbytes) * local_ranks
    lacks = free is not None and need > free
    flag = torch.tensor([lacks], dtype=torch.uint8)
    collectives.max_flags(flag).wait()
    if not flag.item():
        return
    place = type(target).__name__
    if not lacks or free is None:
        raise OffloadError(f"{place} on another host has no room for {what}. Its ranks say how much is missing.")
    fits = int(100 * free / need) / 100
    less = f"`{place}(ratio={fits})`, where the device has room for the rest" if fits else "a smaller model"
    other = "`MappedFile('/path/on/a/disk')`" if place == "HostMemory" else "a directory on a larger disk"
    raise OffloadError(
        f"{what} of {local_ranks} rank{'s' if local_ranks > 1 else ''} on this host need {need / 1e9:.3f} GB, and"
        f" {free / 1e9:.3f} GB are free. What fits: {less}; or {other}."
    )


def moments_of(optimizer: Optimizer) -> float:
    """Optimizer state in multiples of the weights; 0 where the class is unknown."""
    name = type(optimizer).__name__
    groups = optimizer.param_groups
    if name == "SGD":
        return float(any(group["momentum"] for group in groups))
    if name == "RMSprop":
        return 1.0 + any(group["momentum"] for group in groups) + any(group["centered"] for group in groups)
    return _MOMENTS.get(name, 0) + float(any(group.get("amsgrad") for group in groups))


def ask_for_fused(optimizer: Optimizer) -> None:
    """Have torch's fused kernel step what rests on the host, if the user asked for no implementation.

    The default there is a loop over parameters that passes their memory several times.
    """
    if type(optimizer) not in (Adam, AdamW, SGD, Adagrad):
        return
    asked = False
    for group in optimizer.param_groups:
        free = group.get("fused") is None and group.get("foreach") is None
        if free and not group.get("differentiable") and not group.get("capturable"):
            asked = group["fused"] = True
    if asked:
        optimizer.defaults["fused"] = True
        _log.info(
            "Offloaded state is stepped by torch's fused %s. For another implementation pass `foreach=True` or"
            " `fused=False`.",
            type(optimizer).__name__,
        )
