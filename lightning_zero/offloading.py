"""The offload of one module: which units' state rests off the device, whether there is room, and who steps it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_zero.blueprint import Blueprint
from lightning_zero.collectives import Collectives
from lightning_zero.host_memory import free_host_bytes
from lightning_zero.lane import Background
from lightning_zero.offload import OffloadError, OffloadTarget
from lightning_zero.sharded_parameter import ShardedParameter

__all__ = ["Offloading", "likely_bytes", "moments_of", "offloaded_units"]

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


class Offloading:
    """What is offloaded of one module, and what works on it.

    Args:
        target: where.
        blueprint: of the module.
        collectives: of the ranks that share the state.
        local_ranks: ranks on this host.

    Raises:
        OffloadError: there is no room for main weights and gradients; nothing was allocated.
    """

    def __init__(
        self,
        target: OffloadTarget,
        blueprint: Blueprint,
        collectives: Collectives,
        local_ranks: int,
    ) -> None:
        self._target = target
        self._collectives = collectives
        self._local_ranks = local_ranks
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._fused: list[dict[str, Any]] = []
        self.background = self._begin()
        self._likely = likely_bytes(blueprint)
        known = dict.fromkeys(self._likely, 0.0)
        for candidate in blueprint.candidates():
            known[candidate.unit] += candidate.known_bytes
        self.units = offloaded_units(target, self._likely, collectives.device)
        """Those whose state is offloaded."""
        self._moments = {unit: self._likely[unit] - known[unit] for unit in known}
        try:
            self._require_room(sum(known[unit] for unit in self.units), known, "main weights and gradients")
        except OffloadError:
            self.background.close(waits=True)
            raise

    def _begin(self) -> Background:
        """Open the target on all ranks or on none: a collective."""
        error: Exception | None = None
        try:
            background = Background(self._target, self._collectives.device)
        except Exception as caught:
            error = caught
        fails_anywhere = self._collectives.on_any_rank(error is not None)
        if error is not None:
            raise error
        if fails_anywhere:
            background.close(waits=True)
            raise OffloadError(f"{type(self._target).__name__} cannot be used on another rank, which says why.")
        return background

    def takes(self, unit: int | None, trained: bool) -> bool:
        """Whether ``unit``'s trained parameters, or its frozen ones, are offloaded."""
        return unit in self.units and (self._target.optimizer if trained else self._target.parameters)

    def adopt(self, optimizer: Optimizer) -> None:
        """Prepare ``optimizer``, which steps offloaded parameters: a collective, once for each.

        Raises:
            OffloadError: there is no room for its state.
        """
        if optimizer in self._known:
            return
        self._known.add(optimizer)
        offloaded = _offloaded_of(optimizer)
        new = sum(p.slicing.own.numel * p.element_size() for p in offloaded if p not in optimizer.state)
        self._require_room(moments_of(optimizer) * new, self._moments, f"the state of {type(optimizer).__name__}")

    def before_step(self, optimizer: Optimizer) -> None:
        """Have torch's fused kernel step what rests on the host, if the user asked for no implementation.

        The default there is a loop over parameters that passes their memory several times.
        """
        self.after_step()  # of one that raised
        if type(optimizer) not in (Adam, AdamW, SGD, Adagrad) or not _offloaded_of(optimizer):
            return
        for group in optimizer.param_groups:
            if _may_be_fused(optimizer, group):
                group["fused"] = True
                self._fused.append(group)
                for p in group["params"]:
                    _count_for_fused(optimizer.state.get(p, {}), p.device)

    def after_step(self) -> None:
        """Leave the groups as the user made them: `state_dict()` would take the choice of this run to another one."""
        while self._fused:
            self._fused.pop()["fused"] = None

    def _require_room(self, nbytes: float, shares: Mapping[int | None, float], what: str) -> None:
        """See that ``nbytes`` a rank can be allocated on every host: a collective, one answer.

        Args:
            shares: of each unit, in proportion, offloaded or not.
            what: will be allocated.
        """
        free = self._target.free_bytes()
        need = int(nbytes) * self._local_ranks
        lacks = free is not None and need > free
        if not self._collectives.on_any_rank(lacks):
            return
        place = type(self._target).__name__
        if not lacks or free is None:
            raise OffloadError(f"{place} on another host has no room for {what}. Its ranks say how much is missing.")
        fits = self._largest_ratio(free / need, shares)
        less = f"`{place}(ratio={fits})`, where the device has room for the rest" if fits else "a smaller model"
        other = "a directory on a larger disk" if place == "MappedFile" else "`MappedFile('/path/on/a/disk')`"
        raise OffloadError(
            f"{what} of {self._local_ranks} rank{'s' if self._local_ranks > 1 else ''} on this host need"
            f" {need / 1e9:.3f} GB, and {free / 1e9:.3f} GB are free. What fits: {less}; or {other}."
        )

    def _largest_ratio(self, part: float, shares: Mapping[int | None, float]) -> float:
        """The largest hundredth with which ``part`` of what is offloaded now would be; 0 where none is small enough."""
        enough = part * sum(shares[unit] for unit in self.units)
        total = sum(self._likely.values())
        for hundredth in range(99, 0, -1):
            units = _beyond((1 - hundredth / 100) * total, self._likely)
            if sum(shares[unit] for unit in units) <= enough:
                return hundredth / 100
        return 0


def likely_bytes(blueprint: Blueprint) -> dict[int | None, float]:
    """Bytes a rank that each unit's state may take off the device, with Adam's moments, in the order of the forward."""
    found: dict[int | None, float] = dict.fromkeys(blueprint.numbers, 0.0)
    for candidate in blueprint.candidates():
        found[candidate.unit] += candidate.likely_bytes
    return found


def offloaded_units(target: OffloadTarget, likely: Mapping[int | None, float], device: torch.device) -> set[int | None]:
    """The units whose state ``target`` takes, of ``likely`` bytes each."""
    return _beyond(_room_on_device(target, sum(likely.values()), device), likely)


def _room_on_device(target: OffloadTarget, likely: float, device: torch.device) -> float:
    """Bytes a rank of ``likely`` ones that stay on the device."""
    if target.ratio != "auto":
        return (1 - target.ratio) * likely
    return float(target.device_budget if target.device_budget is not None else _free_bytes(device) // 2)


def _beyond(room: float, nbytes: Mapping[int | None, float]) -> set[int | None]:
    """The units that are offloaded: those that stay are the first ones that fit.

    The forward needs those first, and their update is done where it is fast; the later ones have longer to arrive.
    """
    offloaded = set()
    for unit, size in nbytes.items():
        if size <= room:
            room -= size
        else:
            offloaded.add(unit)
    return offloaded


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes() or 0


def moments_of(optimizer: Optimizer) -> float:
    """Optimizer state in multiples of the weights; 0 where the class is unknown, which then fails when it allocates."""
    name = type(optimizer).__name__
    groups = optimizer.param_groups
    if name == "SGD":
        return float(any(group["momentum"] for group in groups))
    if name == "RMSprop":
        return 1.0 + any(group["momentum"] for group in groups) + any(group["centered"] for group in groups)
    return _MOMENTS.get(name, 0) + float(any(group.get("amsgrad") for group in groups))


def _offloaded_of(optimizer: Optimizer) -> list[ShardedParameter]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [p for p in parameters if isinstance(p, ShardedParameter) and p.lane is not None]


def _may_be_fused(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the fused kernel can do the next step of ``group``, for which the user asked for no implementation.

    A closure may yet unfreeze parameters, so all of them count.
    """
    asked = group.get("fused") is not None or group.get("foreach") is not None
    asked = asked or bool(group.get("differentiable") or group.get("capturable"))
    # A rate that is a tensor is not taken by each of the kernels.
    if asked or isinstance(group.get("lr"), Tensor) or not all(p.is_floating_point() for p in group["params"]):
        return False
    # The kernel takes momenta of all parameters or begins those of all, and some get their first gradient late.
    momenta = {optimizer.state.get(p, {}).get("momentum_buffer") is None for p in group["params"]}
    return len(momenta) < 2


def _count_for_fused(state: dict[str, Any], device: torch.device) -> None:
    """Have a step counter from before, as a checkpoint brings it, where and as the kernel reads it, unchecked."""
    if isinstance(state.get("step"), Tensor):
        state["step"] = state["step"].to(device, torch.float32)
