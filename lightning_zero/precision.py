"""The dtype of each station that training state passes.

    main_weight -> model_weight -> gradient -> main_grad -> optimizer -> main_weight

``main_weight`` is what the optimizer steps and a checkpoint keeps, ``model_weight`` is what computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["PrecisionRecipe"]


@dataclass(frozen=True)
class PrecisionRecipe:
    """Dtypes of floating-point training state; ``None`` means "as the station before it".

    Args:
        main: ``main_weight`` and ``main_grad``; ``None`` keeps each parameter's own dtype.
        compute: ``model_weight`` and its local gradient. ``torch.bfloat16`` under 4-byte main weights halves the
            traffic of a gather.
        reduce: dtype in which gradients accumulate and cross the wire; ``None`` means ``main``'s: many small 2-byte
            gradients do not add up.
    """

    main: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def main_dtype(self, own: torch.dtype) -> torch.dtype:
        """Dtype of the main weight of a parameter that was built in dtype ``own``."""
        return self.main if self.main is not None and own.is_floating_point else own

    def model_dtype(self, own: torch.dtype) -> torch.dtype:
        """Dtype of the whole weight that computes."""
        return self.compute if self.compute is not None and own.is_floating_point else self.main_dtype(own)

    def reduce_dtype(self, own: torch.dtype) -> torch.dtype:
        """Dtype of the whole gradient buffer and of the reduction."""
        return self.reduce if self.reduce is not None and own.is_floating_point else self.main_dtype(own)
