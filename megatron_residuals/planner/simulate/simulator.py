# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""One training step of one model: its timeline, and where the time goes.

    step = mean compute + imbalance + bubble + exposed communication

`compute` is the mean over ranks, `imbalance` what the busiest rank has more, `bubble` what the
schedule adds when messages cost nothing, `exposed` what the links add to that.
"""

from __future__ import annotations

from collections.abc import Callable
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
from megatron_residuals.planner.simulate.repetition import step_s
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
    """What was found out about one scheme.

    Attributes:
        step_s: forward and backward of all micro-batches; no optimizer, no data parallelism.
        free_step_s: the same if messages cost nothing.
    """

    scheme: Scheme
    costs: PassCosts
    cluster: Cluster
    step_s: float
    free_step_s: float
    prediction: Prediction

    @property
    def layout(self) -> StageLayout:
        """The stages."""
        return self.costs.layout

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Computing, by rank."""
        times = self.scheme.memory.num_microbatches
        both = [f + b for f, b in zip(self.costs.forward_s, self.costs.backward_s, strict=True)]
        chunks, ranks = range(self.layout.num_chunks), range(self.layout.num_ranks)
        return tuple(times * sum(both[self.layout.stage(r, c)] for c in chunks) for r in ranks)

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
        memory, sent = self.scheme.memory, [0] * self.layout.num_ranks
        for stage in range(1, self.layout.num_stages):
            size = self.scheme.plan.rows_in(stage) * memory.sizes.row_bytes
            for sender in (stage - 1, stage):
                sent[self.layout.rank(sender)] += memory.num_microbatches * size
        return tuple(sent)

    def timeline(self) -> Timeline:
        """Everything that happens in the step, played to its end."""
        return _player(self.scheme, self.costs, self.cluster, self.cluster.network)(
            self.scheme.memory.num_microbatches
        )

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


def simulate(
    scheme: Scheme,
    cluster: Cluster,
    budget_bytes: int | None = None,
    *,
    prediction: Prediction | None = None,
) -> Result:
    """Play a step of one scheme.

    Args:
        budget_bytes: for activations, by rank; the policy of least extra work that fits is played.
        prediction: memory under the policy to play, whatever the budget.

    Raises:
        ValueError: what the host's schedules refuse.
        Deadlock, OutOfOrder: the programs do not fit together, which is a fault of this package.
    """
    memory = scheme.memory
    prediction = prediction or scheme.prediction(budget_bytes)
    costs = PassCosts(
        memory.layout, scheme.residual, memory.sizes, cluster.rates, prediction.policy
    )
    with_links, free = (
        step_s(
            memory.layout,
            memory.num_microbatches,
            memory.group_size,
            _player(scheme, costs, cluster, network),
        )
        for network in (cluster.network, NO_COST)
    )
    return Result(scheme, costs, cluster, with_links, free, prediction)


def _player(
    scheme: Scheme, costs: PassCosts, cluster: Cluster, network: Network
) -> Callable[..., Timeline]:
    """A function that plays steps of any number of micro-batches."""
    layout, group_size = scheme.memory.layout, scheme.memory.group_size

    def pass_s(step: Pass) -> float:
        return (costs.forward_s if step.forward else costs.backward_s)[step.stage]

    def message_bytes(message: Message) -> int:
        return scheme.plan.rows_in(message.boundary) * scheme.memory.sizes.row_bytes

    def run(num_microbatches: int, snapshots: int | None = None) -> Timeline:
        rank_programs = programs(
            layout,
            num_microbatches,
            group_size,
            overlap=cluster.overlap,
            waits_for_sends=cluster.waits_for_sends,
        )
        return play(layout, rank_programs, pass_s, message_bytes, network, snapshots)

    return run
