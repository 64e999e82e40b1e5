# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Predicts what autograd keeps on every pipeline rank under every recompute policy.

    plan = MemoryPlan(layout, ResidualConfig("block_attnres", block_layers=4), sizes, 16)
    plan.predict("block").worst.peak_bytes

Everything is counted in storages (`planner.storages`): those of a rank are the union of what its
stages keep for the micro-batches between their forward and backward, in the order of the schedule.
Weights, gradients, optimizer and what a kernel needs while it runs are not in it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

from megatron_residuals.config import ResidualConfig
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.plan import TransferPlan
from megatron_residuals.pipeline.schedule import Stretch, shortest_alike, stretches
from megatron_residuals.planner.sizes import ModelSizes
from megatron_residuals.planner.storages import OUTSIDE, PARTS, Sizes, StageStorages


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one pipeline rank.

    Attributes:
        kept_bytes: by the layers, for one micro-batch, all its stages on the rank together.
        kept_parts: the same by part. Beside them ``outside_layers``, not in `kept_bytes`: indices,
            mask, final norm and logits, about the same under every policy.
        transient_bytes: what the largest replay of a backward holds besides.
        in_flight: most passes between forward and backward at a time, each one stage.
        peak_bytes: most at any moment of a step: all in flight, outside parts and replays included.
    """

    rank: int
    kept_bytes: int
    kept_parts: dict[str, int]
    transient_bytes: int
    in_flight: int
    peak_bytes: int


@dataclass(frozen=True)
class Prediction:
    """One policy on every rank."""

    policy: str
    ranks: tuple[RankMemory, ...]

    @property
    def worst(self) -> RankMemory:
        """The rank with the highest peak, the first of equals."""
        return max(self.ranks, key=lambda memory: (memory.peak_bytes, -memory.rank))


@dataclass(frozen=True)
class MemoryPlan:
    """A model, its pipeline and a step of ``num_microbatches``."""

    layout: StageLayout
    residual: ResidualConfig
    sizes: ModelSizes
    num_microbatches: int = 1
    group_size: int | None = None

    @cached_property
    def policies(self) -> tuple[str, ...]:
        """The policies that the mechanism knows, least extra work first."""
        return ("none", *self.residual.entry.recompute)

    def predict(self, policy: str | None = None) -> Prediction:
        """The configured policy, or another.

        Raises:
            ValueError: the mechanism does not know the policy.
        """
        residual = self.residual
        if policy is not None:
            residual = dataclasses.replace(residual, recompute=policy)
        return self._predict(residual.recompute, residual)

    def host_full(self, layers: int = 1) -> Prediction:
        """The mechanism under the host's full/uniform recompute, ``layers`` in a checkpoint."""
        residual = dataclasses.replace(self.residual, recompute="none")
        return self._predict(f"host full/uniform/{layers}", residual, host_full=layers)

    @cached_property
    def stock(self) -> Prediction:
        """The stock model, nothing recomputed."""
        return self._predict("stock", ResidualConfig(), stock=True)

    @cached_property
    def stock_full(self) -> Prediction:
        """The stock model under the host's full/uniform/1 recompute."""
        return self._predict("stock full/uniform/1", ResidualConfig(), host_full=1, stock=True)

    def cheapest(self, budget_bytes: int) -> Prediction | None:
        """The policy with the least extra work whose peak fits on every rank; None if none does."""
        for policy in self.policies:
            prediction = self.predict(policy)
            if prediction.worst.peak_bytes <= budget_bytes:
                return prediction
        return None

    @cached_property
    def least(self) -> Prediction:
        """The policy with the lowest peak, the one with the least extra work of equals."""
        return min(map(self.predict, self.policies), key=lambda each: each.worst.peak_bytes)

    def group_lengths(self, policy: str) -> list[int]:
        """Sublayers of a group on each stage that has layers, repetitions left out; or nothing."""
        if not policy.startswith("group"):
            return []
        residual = dataclasses.replace(self.residual, recompute=policy)
        lengths = {s.group_length for s in self.stages(residual) if s.sublayers}
        return sorted(length for length in lengths if length is not None)

    def transfer_plan(self, residual: ResidualConfig) -> TransferPlan:
        """What crosses the stages of this layout."""
        return TransferPlan.for_residual(residual, self.layout)

    def _predict(
        self, name: str, residual: ResidualConfig, *, host_full: int = 0, stock: bool = False
    ) -> Prediction:
        stages = self.stages(residual, host_full, stock)
        ranks = range(self.layout.num_ranks)
        return Prediction(name, tuple(self._rank(rank, stages) for rank in ranks))

    def stages(
        self, residual: ResidualConfig, host_full: int = 0, stock: bool = False
    ) -> list[StageStorages]:
        """What every stage keeps; ``host_full`` and ``stock`` as in `StageStorages`."""
        plan = self.transfer_plan(residual)
        stages = range(self.layout.num_stages)
        return [StageStorages(plan, residual, self.sizes, g, host_full, stock) for g in stages]

    def _rank(self, rank: int, stages: list[StageStorages]) -> RankMemory:
        own = stages[rank :: self.layout.num_ranks]
        kept = {storage.name: storage for stage in own for storage in stage.kept}
        parts = {part: sum(s.bytes for s in kept.values() if s.part == part) for part in PARTS}
        walk = _Walk(_Life(own))
        count = shortest_alike(self.layout, self.num_microbatches, self.group_size)
        for stretch in stretches(self.layout, rank, count, self.group_size):
            walk.go(stretch)
        return RankMemory(
            rank=rank,
            kept_bytes=sum(parts.values()) - parts[OUTSIDE],
            kept_parts=parts,
            transient_bytes=max(stage.transient_bytes for stage in own),
            in_flight=walk.most_in_flight,
            peak_bytes=walk.peak_bytes,
        )


class _Life:
    """What one micro-batch keeps on a rank, which is the same for every micro-batch.

    It goes through the rank's stages forwards and then backwards. Storages live from the end of a
    forward to that of its backward, or as long as they are in the cache for a later stage, and are
    counted once, whoever keeps them.

    Attributes:
        forward_bytes, backward_bytes: by stage, how much more is kept after the pass than before.
        replay_bytes: by stage, how much more there is at the height of its backward.
    """

    def __init__(self, own: list[StageStorages]) -> None:
        self.forward_bytes: dict[int, int] = {}
        self.backward_bytes: dict[int, int] = {}
        self.replay_bytes: dict[int, int] = {}
        kept: Sizes = {}
        cached: Sizes = {}
        before_pass, earlier = 0, []
        for storages in own:
            earlier.append(kept)
            kept = kept | {storage.name: storage.bytes for storage in storages.kept}
            for name in storages.cached(*storages.plan.last_fetch(storages.stage)):
                cached.pop(name, None)
            cached = cached | storages.cached(*storages.plan.stashes(storages.stage))
            after = sum((kept | cached).values())
            self.forward_bytes[storages.stage] = after - before_pass
            before_pass = after
        for storages, beside in zip(reversed(own), reversed(earlier), strict=True):
            # a backward begins when no later stage of the micro-batch is left that would fetch
            heights = (sum((beside | moment).values()) for moment in storages.moments)
            self.replay_bytes[storages.stage] = max(heights, default=0) - before_pass
            after = sum(beside.values())
            self.backward_bytes[storages.stage] = after - before_pass
            before_pass = after


class _Walk:
    """Goes through a step of one rank and notes the peak.

    A stretch repeats one forward and one backward, so what is kept grows or shrinks by the same
    each time, and is most at its beginning or its end.
    """

    def __init__(self, life: _Life) -> None:
        self._life = life
        self._bytes = self._in_flight = 0
        self.peak_bytes = self.most_in_flight = 0

    def go(self, stretch: Stretch) -> None:
        """All passes of a stretch."""
        kept_bytes, in_flight = self._bytes, self._in_flight
        self._once(stretch)
        if stretch.count > 1:
            self._bytes += (stretch.count - 2) * (self._bytes - kept_bytes)
            self._in_flight += (stretch.count - 2) * (self._in_flight - in_flight)
            self._once(stretch)

    def _once(self, stretch: Stretch) -> None:
        if stretch.forward is not None:
            self._bytes += self._life.forward_bytes[stretch.forward]
            self._in_flight += 1
            self.peak_bytes = max(self.peak_bytes, self._bytes)
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        if stretch.backward is not None:
            height = self._bytes + self._life.replay_bytes[stretch.backward]
            self.peak_bytes = max(self.peak_bytes, height)
            self._bytes += self._life.backward_bytes[stretch.backward]
            self._in_flight -= 1
