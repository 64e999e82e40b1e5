# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The models that are compared: plain, mHC, and AttnRes with each way to ship its sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_residuals.config import ResidualConfig
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.plan import TransferPlan
from megatron_residuals.planner.memory import MemoryPlan, Prediction
from megatron_residuals.planner.sizes import ModelSizes

PLAIN, MHC, PADDED = "plain", "mhc", "attnres padded"
ATTNRES = ("attnres full", PADDED, "attnres delta")
SCHEMES = (PLAIN, MHC, *ATTNRES)


class PaddedMemoryPlan(MemoryPlan):
    """A transport that sends one fixed shape: the sources a model has at its end, on every hop."""

    def transfer_plan(self, residual: ResidualConfig) -> TransferPlan:
        """The plan of ``full``, every hop as wide as the running sum and all blocks."""
        plan = super().transfer_plan(residual)
        if plan.depth is None:
            return plan
        rows = 1 + plan.depth.num_blocks
        return dataclasses.replace(
            plan,
            transport="padded",
            boundaries=tuple(dataclasses.replace(hop, rows=rows) for hop in plan.boundaries),
        )


@dataclass(frozen=True)
class Scheme:
    """One model of the comparison: its name, its residual and what it keeps."""

    name: str
    memory: MemoryPlan

    @property
    def residual(self) -> ResidualConfig:
        """The mechanism; for a padded transport with the sources that it sends."""
        return self.memory.residual

    @cached_property
    def plan(self) -> TransferPlan:
        """What crosses the stages."""
        return self.memory.transfer_plan(self.residual)

    def prediction(self, budget_bytes: int | None) -> Prediction:
        """Memory under the policy with the least extra work that fits the budget.

        Without a budget nothing is recomputed; where nothing fits, the policy that needs least.
        """
        least = None
        for prediction in self.policies():
            peak = prediction.worst.peak_bytes
            if budget_bytes is None or peak <= budget_bytes:
                return prediction
            if least is None or peak < least.worst.peak_bytes:
                least = prediction
        assert least is not None, "every mechanism knows the policy none"
        return least

    def policies(self) -> Iterator[Prediction]:
        """What it keeps under every recompute policy, least extra work first."""
        if self.name == PLAIN:
            yield self.memory.stock
            yield self.memory.stock_full
        else:
            yield from (self.memory.predict(name) for name in self.memory.policies)


def schemes(
    layout: StageLayout,
    sizes: ModelSizes,
    *,
    streams: int = 4,
    block_layers: int | None = None,
    block_sublayers: int | None = None,
    num_microbatches: int = 1,
    group_size: int | None = None,
) -> list[Scheme]:
    """The five models for one pipeline and one set of sizes.

    Args:
        block_layers, block_sublayers: length of an AttnRes block; neither: about eight blocks.

    Raises:
        ValueError: a count is out of range, or both block lengths are given.
    """
    found = []
    for name in SCHEMES:
        plan_type = PaddedMemoryPlan if name == PADDED else MemoryPlan
        if name == PLAIN:
            residual = ResidualConfig()
        elif name == MHC:
            residual = ResidualConfig("mhc", streams=streams)
        else:
            residual = ResidualConfig(
                "block_attnres",
                block_layers=block_layers,
                block_sublayers=block_sublayers,
                transport="delta" if name.endswith("delta") else "full",
            )
        memory = plan_type(layout, residual, sizes, num_microbatches, group_size)
        found.append(Scheme(name, memory))
    return found
