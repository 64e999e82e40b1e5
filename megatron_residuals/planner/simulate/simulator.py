# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""One training step of one model: its timeline, and where the time goes.

    step = mean compute + imbalance + bubble + exposed communication

`compute` is the mean over ranks, `imbalance` what the busiest rank has more, `bubble` what the
schedule adds when messages cost nothing, `exposed` what the links add to that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.messages import Message
from megatron_residuals.pipeline.schedule import Pass
from megatron_residuals.planner.memory import Prediction
from megatron_residuals.planner.simulate.costs import PassCosts, Rates
from megatron_residuals.planner.simulate.engine import Timeline, play
from megatron_residuals.planner.simulate.links import NO_COST, Network
from megatron_residuals.planner.simulate.program import programs
from megatron_residuals.planner.simulate.schemes import Scheme


@dataclass(frozen=True)
class Cluster:
    """What a step runs on, and how the host is set."""

    rates: Rates
    network: Network
    overlap: str = "steady"
    waits_for_sends: bool = True


@dataclass(frozen=True)
class Result:
    """What was found out about one scheme."""

    scheme: Scheme
    costs: PassCosts
    timeline: Timeline
    free_step_s: float
    prediction: Prediction

    @property
    def step_s(self) -> float:
        """Forward and backward of all micro-batches; no optimizer, no data parallelism."""
        return self.timeline.step_s

    @property
    def layout(self) -> StageLayout:
        """The stages."""
        return self.costs.layout

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Computing, by rank."""
        return tuple(map(self.timeline.busy_s, range(self.timeline.num_ranks)))

    @property
    def mean_busy_s(self) -> float:
        """Mean over the ranks."""
        return sum(self.busy_s) / len(self.busy_s)

    @property
    def imbalance_s(self) -> float:
        """What the busiest rank computes longer than the mean."""
        return max(self.busy_s) - self.mean_busy_s

    @property
    def bubble_s(self) -> float:
        """What a step with free messages takes longer than its busiest rank computes."""
        return self.free_step_s - max(self.busy_s)

    @property
    def bubble_fraction(self) -> float:
        """Bubble over compute of the busiest rank: (P - 1) / (m V) where all stages are equal."""
        return self.bubble_s / max(self.busy_s)

    @property
    def exposed_s(self) -> float:
        """What the links add to the step."""
        return self.step_s - self.free_step_s

    @cached_property
    def bytes_sent(self) -> tuple[int, ...]:
        """By rank, both directions of travel."""
        sent = [0] * self.timeline.num_ranks
        for span in self.timeline.messages:
            sent[span.sender] += span.bytes
        return tuple(sent)

    @property
    def tokens_per_s(self) -> float:
        """Of one data-parallel replica."""
        memory = self.scheme.memory
        tokens = memory.sizes.seq_length * memory.sizes.micro_batch_size
        return tokens * memory.num_microbatches / self.step_s

    @property
    def share_of_peak(self) -> float:
        """FLOPs of the stock model's products, without replays, over what the GPUs could do."""
        flops = 3 * sum(self.costs.forward_flops(g) for g in range(self.layout.num_stages))
        flops *= self.scheme.memory.num_microbatches
        peak = self.costs.rates.gpu.flops_per_s * self.layout.num_ranks
        return flops / (peak * self.step_s)


def simulate(scheme: Scheme, cluster: Cluster, budget_bytes: int | None = None) -> Result:
    """Play a step of one scheme.

    Raises:
        ValueError: what the host's schedules refuse.
        Deadlock, OutOfOrder: the programs do not fit together, which is a fault of this package.
    """
    memory = scheme.memory
    prediction = scheme.prediction(budget_bytes)
    costs = PassCosts(
        memory.layout, scheme.residual, memory.sizes, cluster.rates, prediction.policy
    )
    rank_programs = programs(
        memory.layout,
        memory.num_microbatches,
        memory.group_size,
        overlap=cluster.overlap,
        waits_for_sends=cluster.waits_for_sends,
    )
    plan, row_bytes = scheme.plan, memory.sizes.row_bytes

    def pass_s(step: Pass) -> float:
        return (costs.forward_s if step.forward else costs.backward_s)[step.stage]

    def message_bytes(message: Message) -> int:
        return plan.rows_in(message.boundary) * row_bytes

    def run(network: Network) -> Timeline:
        return play(memory.layout, rank_programs, pass_s, message_bytes, network)

    free_step_s = run(NO_COST).step_s
    return Result(scheme, costs, run(cluster.network), free_step_s, prediction)
