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
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from megatron_residuals.config import ResidualConfig
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.plan import TransferPlan
from megatron_residuals.pipeline.schedule import schedule
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
        lengths = {s.group_length for s in self._stages(residual) if s.sublayers}
        return sorted(length for length in lengths if length is not None)

    def transfer_plan(self, residual: ResidualConfig) -> TransferPlan:
        """What crosses the stages of this layout."""
        return TransferPlan.for_residual(residual, self.layout)

    def _predict(
        self, name: str, residual: ResidualConfig, *, host_full: int = 0, stock: bool = False
    ) -> Prediction:
        stages = self._stages(residual, host_full, stock)
        ranks = range(self.layout.num_ranks)
        return Prediction(name, tuple(self._rank(rank, stages) for rank in ranks))

    def _stages(
        self, residual: ResidualConfig, host_full: int = 0, stock: bool = False
    ) -> list[StageStorages]:
        plan = self.transfer_plan(residual)
        stages = range(self.layout.num_stages)
        return [StageStorages(plan, residual, self.sizes, g, host_full, stock) for g in stages]

    def _rank(self, rank: int, stages: list[StageStorages]) -> RankMemory:
        own = stages[rank :: self.layout.num_ranks]
        kept = {storage.name: storage for stage in own for storage in stage.kept}
        parts = {part: sum(s.bytes for s in kept.values() if s.part == part) for part in PARTS}
        walk = _Walk(stages)
        for forward, micro_batch, stage in schedule(
            self.layout, rank, self.num_microbatches, self.group_size
        ):
            walk.forward(micro_batch, stage) if forward else walk.backward(micro_batch, stage)
        return RankMemory(
            rank=rank,
            kept_bytes=sum(parts.values()) - parts[OUTSIDE],
            kept_parts=parts,
            transient_bytes=max(stage.transient_bytes for stage in own),
            in_flight=walk.most_in_flight,
            peak_bytes=walk.peak_bytes,
        )


class _Walk:
    """Goes through a step of one rank and notes the peak.

    Storages live from the end of a forward to that of its backward, or as long as they are in the
    cache for a later stage. They are counted once for each micro-batch, whoever keeps them.
    """

    def __init__(self, stages: list[StageStorages]) -> None:
        self._stages = stages
        self._in_flight: dict[int, frozenset[int]] = {}  # micro-batch -> stages
        self._cached: dict[int, frozenset[tuple[str, int]]] = {}  # micro-batch -> storages
        self.peak_bytes = self.most_in_flight = 0
        self._kept_bytes = functools.cache(lambda *key: sum(self._kept(*key).values()))
        self._backward_bytes = functools.cache(self._height)

    def forward(self, micro_batch: int, stage: int) -> None:
        """What the stage keeps is there from now on."""
        self._in_flight[micro_batch] = self._in_flight.get(micro_batch, frozenset()) | {stage}
        storages, plan = self._stages[stage], self._stages[stage].plan
        cached = self._cached.get(micro_batch, frozenset())
        cached -= frozenset(storages.cached(*plan.last_fetch(stage)).items())
        cached |= frozenset(storages.cached(*plan.stashes(stage)).items())
        self._cached[micro_batch] = cached
        in_flight = sum(map(len, self._in_flight.values()))
        self.most_in_flight = max(self.most_in_flight, in_flight)
        self.peak_bytes = max(self.peak_bytes, self._total(self._in_flight))

    def backward(self, micro_batch: int, stage: int) -> None:
        """The highest replay; afterwards what the stage keeps is gone."""
        others = self._in_flight[micro_batch] - {stage}
        height = self._backward_bytes(stage, others)
        height += self._total(other for other in self._in_flight if other != micro_batch)
        self.peak_bytes = max(self.peak_bytes, height)
        self._in_flight[micro_batch] = others

    def _total(self, micro_batches: Iterable[int]) -> int:
        return sum(self._kept_bytes(self._in_flight[m], self._cached[m]) for m in micro_batches)

    def _kept(
        self, stages: frozenset[int], cached: frozenset[tuple[str, int]] = frozenset()
    ) -> Sizes:
        return {s.name: s.bytes for g in stages for s in self._stages[g].kept} | dict(cached)

    def _height(self, stage: int, others: frozenset[int]) -> int:
        # a backward begins when no later stage of the micro-batch is left that would fetch
        beside = self._kept(others)
        moments = self._stages[stage].moments
        return max((sum((beside | moment).values()) for moment in moments), default=0)
