"""What one group of parameters will hold and send, by formula: bytes of a rank, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zero.layout import FlatLayout
from lightning_zero.placements import Placements, StateBytes
from lightning_zero.precision import Dtypes

__all__ = ["GroupPlan"]


@dataclass(frozen=True)
class GroupPlan:
    """Parameters of one unit that share dtypes, and are all trained or all frozen.

    Args:
        layout: of their elements in a whole buffer, and in shards.
        placements: what rests where.
        dtypes: of each station of their state.
        trained: whether they have gradients and optimizer state.
        world_size: ranks that share the state.
        stays_whole: whether they are whole from forward to backward, and not gathered twice: the root's, and those of
            the unit that forward uses last.
        offloaded: whether their state rests off the device.
        moves_each_gather: whether no shard of theirs rests on the device.
    """

    layout: FlatLayout
    placements: Placements
    dtypes: Dtypes
    trained: bool
    world_size: int
    stays_whole: bool = False
    offloaded: bool = False
    moves_each_gather: bool = False

    def state_bytes(self, rank: int, moments: float, off_device: bool) -> StateBytes:
        """Bytes of model state at rest on ``rank``, padding included.

        Args:
            moments: optimizer state in multiples of the main weights: 2 for Adam.
            off_device: count what rests off the device; else what rests on it.
        """
        dtypes, shard = self.dtypes, self.layout.shard_numel
        gradient = dtypes.gradient if self.placements.keeps_whole_gradients else dtypes.main_grad
        state = self.placements.bytes_per_rank(
            self.layout.total,
            self.layout.num_shards,
            main_itemsize=dtypes.main.itemsize,
            model_itemsize=dtypes.model.itemsize,
            grad_itemsize=gradient.itemsize,
        )
        # Optimizer state is made parameter by parameter: it has no padding.
        own = rank if self.layout.num_shards > 1 else 0
        numel = sum(self.layout.fragment(index, own).numel for index in range(len(self.layout.numels)))
        stepped = moments * dtypes.main.itemsize * numel if self.trained else 0
        if not self.offloaded:
            on_device = StateBytes(state.parameters, state.gradients if self.trained else 0, stepped)
            return StateBytes(0, 0, 0) if off_device else on_device
        ready = 0 if self.placements.keeps_whole_parameters else shard * dtypes.model.itemsize
        moves = self.moves_each_gather
        if not off_device:
            whole = self.layout.total * dtypes.model.itemsize if self.placements.keeps_whole_parameters else 0
            return StateBytes(whole + (0 if moves else ready), 0, 0)
        beside = ready if moves and dtypes.model != dtypes.main else 0
        return StateBytes(
            parameters=shard * dtypes.main.itemsize + beside,
            gradients=shard * dtypes.main_grad.itemsize if self.trained else 0,
            optimizer=stepped,
        )

    @property
    def whole_bytes(self) -> int:
        """Of whole weights that are gathered for a while; 0 where whole weights rest."""
        return 0 if self.placements.keeps_whole_parameters else self.layout.total * self.dtypes.model.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Of whole gradients that wait for their reduction; 0 where whole gradients rest."""
        if not self.trained or (self.placements.keeps_whole_gradients and not self.offloaded):
            return 0
        return self.layout.total * self.dtypes.gradient.itemsize

    def gathered_bytes(self, micro_batches: int) -> float:
        """Payload of its gathers in one optimizer step; a rank sends (N - 1) / N of it."""
        return self._traffic(micro_batches)[0] * self.dtypes.model.itemsize

    def reduced_bytes(self, micro_batches: int) -> float:
        """Payload of its reductions in one optimizer step; a rank sends (N - 1) / N of it."""
        return self._traffic(micro_batches)[1] * self.dtypes.reduce.itemsize

    @property
    def elements(self) -> float:
        """Payload of an optimizer step of one micro-batch, as if it were all gathered twice: a root counts as others.

        So the paper counts: 2 a trained parameter up to stage 2, 3 at stage 3.
        """
        if self.world_size == 1 or not self.trained:
            return 0.0
        traffic = self.placements.traffic(self.layout.total)
        return traffic.gathered + traffic.reduced

    def _traffic(self, micro_batches: int) -> tuple[float, float]:
        if self.world_size == 1:
            return 0.0, 0.0
        total = self.layout.total
        traffic = self.placements.traffic(
            total if self.trained else 0,
            kept_numel=total if self.stays_whole else 0,
            micro_batches=micro_batches,
            frozen_numel=0 if self.trained else total,
        )
        return traffic.gathered, traffic.reduced
