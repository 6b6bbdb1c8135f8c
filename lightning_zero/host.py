"""What the host has room for."""

from __future__ import annotations

import torch

from lightning_zero.engine import Engine
from lightning_zero.host_memory import free_host_bytes

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
