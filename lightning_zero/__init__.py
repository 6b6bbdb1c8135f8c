"""ZeRO for PyTorch Lightning: `Trainer(strategy="zero3")` trains any LightningModule sharded.

Importing this registers the strategies "zero1", "zero2" and "zero3".
"""

import pkgutil

from torch._dynamo import trace_rules

from lightning_zero.activation import ActivationPolicy, OffloadActivations, Recompute, Selective
from lightning_zero.activation_bytes import activation_bytes
from lightning_zero.checkpoint.hugging_face import save_pretrained
from lightning_zero.checkpoint.pretrained import load_pretrained
from lightning_zero.checkpoint.stored import CheckpointError
from lightning_zero.gathering import gathered
from lightning_zero.held import held_bytes
from lightning_zero.monitor import ZeROMonitor
from lightning_zero.offload import HostMemory, MappedFile, OffloadError, OffloadTarget
from lightning_zero.placements import STAGES
from lightning_zero.planner.estimate import Estimate, estimate
from lightning_zero.planner.question import PlanError
from lightning_zero.precision import PrecisionRecipe
from lightning_zero.sharding import MovedBytes, moved_bytes, no_sync, planned_bytes, shard, unshard
from lightning_zero.strategy import PytorchLightningZeROStrategy, ZeROStrategy, register_strategies
from lightning_zero.watch import RanksDifferError

__all__ = [
    "STAGES",
    "ActivationPolicy",
    "CheckpointError",
    "Estimate",
    "HostMemory",
    "MappedFile",
    "MovedBytes",
    "OffloadActivations",
    "OffloadError",
    "OffloadTarget",
    "PlanError",
    "PrecisionRecipe",
    "PytorchLightningZeROStrategy",
    "RanksDifferError",
    "Recompute",
    "Selective",
    "ZeROMonitor",
    "ZeROStrategy",
    "activation_bytes",
    "estimate",
    "gathered",
    "held_bytes",
    "load_pretrained",
    "moved_bytes",
    "no_sync",
    "planned_bytes",
    "save_pretrained",
    "shard",
    "unshard",
]

register_strategies()

# To `torch.compile` the package is opaque, as much of torch is: graphs end where it begins, and what a module computes
# inside a window is a graph again. If it were traced, what a window did that one time would be part of the graph.
for _part in pkgutil.iter_modules(__path__, f"{__name__}."):
    if _part.name != "lightning_zero.autocast":  # pure, and asked about each product
        trace_rules.add(_part.name)
