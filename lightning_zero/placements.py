"""Where each kind of training state rests, as data: one row a ZeRO stage.

    stage   parameter   gradient    optimizer
      0     whole       whole       whole        plain data parallelism
      1     whole       partial     shard        Rajbhandari 2020, P_os
      2     whole       shard       shard        P_os+g
      3     shard       shard       shard        P_os+g+p

A collective is the difference between two placements: ``SHARD -> REPLICATE`` is an all-gather, ``PARTIAL -> SHARD`` a
reduce-scatter, ``PARTIAL -> REPLICATE`` an all-reduce. No other file asks which stage is running.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

__all__ = ["STAGES", "Placement", "Placements", "StateBytes", "Traffic", "Where", "stage_placements"]


Where = Literal["everywhere", "device", "offloaded"]
"""Which part of the state: what rests on the device, off it, or both."""


class Placement(Enum):
    """What one rank holds of a tensor between two uses."""

    REPLICATE = "replicate"
    """The whole value, equal on all ranks."""

    PARTIAL = "partial"
    """A whole-sized summand; the value is the mean over ranks."""

    SHARD = "shard"
    """One contiguous slice of the whole value."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model state that one rank holds at rest, by kind."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Sum of the three kinds, bytes per rank."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Traffic:
    """Payload of one optimizer step, in elements; wire bytes are ``elements * itemsize * (N - 1) / N``."""

    gathered: float
    reduced: float


@dataclass(frozen=True)
class Placements:
    """The resting place of parameters, gradients and optimizer state."""

    parameter: Placement
    gradient: Placement
    optimizer: Placement

    @property
    def keeps_whole_parameters(self) -> bool:
        """Whether whole parameters rest on every rank."""
        return self.parameter is Placement.REPLICATE

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether a whole-sized gradient buffer rests on every rank."""
        return self.gradient is not Placement.SHARD

    @property
    def shards_optimizer(self) -> bool:
        """Whether a rank steps only its own slice, so that parameters must be gathered after a step."""
        return self.optimizer is Placement.SHARD

    @property
    def reduces_every_backward(self) -> bool:
        """Whether accumulation happens in shards: a whole gradient has no place to wait in."""
        return self.gradient is Placement.SHARD

    def bytes_per_rank(
        self,
        numel: int,
        world_size: int,
        *,
        main_itemsize: int = 4,
        model_itemsize: int | None = None,
        grad_itemsize: int | None = None,
        optimizer_itemsize: int = 8,
    ) -> StateBytes:
        """Model state one rank holds at rest, without padding and without units in flight.

        With fp32 throughout (``main_itemsize=4``) and Adam (two fp32 moments, ``optimizer_itemsize=8``), psi
        parameters on N ranks take 16 psi (stage 0), 8 psi + 8 psi / N (stage 1), 4 psi + 12 psi / N (stage 2),
        16 psi / N (stage 3).

        Args:
            numel: psi, the number of trainable parameters.
            world_size: N, the number of ranks.
            main_itemsize: bytes of one element of the weights that the optimizer steps.
            model_itemsize: bytes of one element of the weights that compute; ``None`` means ``main_itemsize``, and
                then the two share memory.
            grad_itemsize: bytes of one element of the gradient that the optimizer reads; ``None`` means
                ``main_itemsize``.
            optimizer_itemsize: bytes of optimizer state per parameter.
        """
        shard = numel / world_size
        model_itemsize = model_itemsize or main_itemsize
        grad_itemsize = grad_itemsize or main_itemsize
        main = (shard if self.shards_optimizer else numel) * main_itemsize
        if self.keeps_whole_parameters:
            # In one dtype the main weights are a slice of the whole model weights: no second copy.
            parameters = numel * model_itemsize + (main if model_itemsize != main_itemsize else 0.0)
        else:
            parameters = main
        return StateBytes(
            parameters=parameters,
            gradients=(numel if self.keeps_whole_gradients else shard) * grad_itemsize,
            optimizer=(shard if self.shards_optimizer else numel) * optimizer_itemsize,
        )

    def traffic(self, numel: int, *, kept_numel: int = 0, micro_batches: int = 1, frozen_numel: int = 0) -> Traffic:
        """Payload of one optimizer step, in elements.

        Plain data parallelism all-reduces psi elements once, which a ring does as a reduce-scatter and an all-gather:
        2 psi (Rajbhandari 2020, section 7). Stages 1 and 2 send the same, stage 3 sends 3 psi less what stays whole
        from forward to backward: the root, and the last unit, with which backward begins.

        Args:
            numel: trainable parameters, all of them.
            kept_numel: parameters that stay whole from forward to backward, trainable and frozen.
            micro_batches: backward passes per optimizer step.
            frozen_numel: parameters that receive no gradient, all of them; gathered only where they are sharded.
        """
        reductions = micro_batches if self.reduces_every_backward else 1
        if self.gradient is Placement.REPLICATE:
            return Traffic(gathered=0.0, reduced=2.0 * numel * reductions)
        if self.keeps_whole_parameters:
            return Traffic(gathered=float(numel), reduced=float(numel * reductions))
        units = numel + frozen_numel - kept_numel
        return Traffic(gathered=micro_batches * (2.0 * units + kept_numel), reduced=float(numel * reductions))


STAGES: dict[int, Placements] = {
    0: Placements(Placement.REPLICATE, Placement.REPLICATE, Placement.REPLICATE),
    1: Placements(Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD),
    2: Placements(Placement.REPLICATE, Placement.SHARD, Placement.SHARD),
    3: Placements(Placement.SHARD, Placement.SHARD, Placement.SHARD),
}


def stage_placements(stage: int) -> Placements:
    """The row of ``stage``.

    Raises:
        ValueError: ``stage`` is none of 0, 1, 2, 3.
    """
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in STAGES:
        raise ValueError(f"stage={stage!r} is unknown: expected one of {sorted(STAGES)}. Write `stage=3`.")
    return STAGES[stage]
