"""ZeRO for PyTorch Lightning: `Trainer(strategy="zero3")` trains any LightningModule sharded.

Importing this registers the strategies "zero1", "zero2" and "zero3".
"""

from lightning_zero.engine import no_sync, planned_bytes, shard, unshard
from lightning_zero.gathering import gathered
from lightning_zero.held import held_bytes
from lightning_zero.placements import STAGES
from lightning_zero.precision import PrecisionRecipe
from lightning_zero.strategy import PytorchLightningZeROStrategy, ZeROStrategy, register_strategies

__all__ = [
    "STAGES",
    "PrecisionRecipe",
    "PytorchLightningZeROStrategy",
    "ZeROStrategy",
    "gathered",
    "held_bytes",
    "no_sync",
    "planned_bytes",
    "shard",
    "unshard",
]

register_strategies()
