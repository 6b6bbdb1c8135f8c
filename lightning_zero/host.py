"""What the host has room for."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_zero.engine import Engine

__all__ = ["host_fits"]

HEADROOM = 0.8
"""Part of the free host memory that whole copies may take."""


def host_fits(engine: Engine, local_ranks: int) -> bool:
    """Whether every host can hold one whole copy of the parameters for each of its ranks: a collective, one answer.

    Args:
        engine: of the sharded module.
        local_ranks: ranks on this host.
    """
    need = sum(group.layout.total * group.main_weight.element_size() for group in engine.groups) * local_ranks
    free = free_host_bytes()
    misfit = torch.tensor(free is not None and need > free * HEADROOM, dtype=torch.uint8)
    # One host without room decides for all.
    engine.collectives.max_flags(misfit).wait()
    return not misfit.item()


def free_host_bytes() -> int | None:
    """Bytes that can be allocated without swapping; ``None`` where the system does not tell."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
