# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A step of many micro-batches takes as long as if all of it were played, to the last bit."""

from __future__ import annotations

import random

import pytest

from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.messages import Message
from megatron_residuals.pipeline.schedule import Pass
from megatron_residuals.planner.simulate.engine import Timeline, play
from megatron_residuals.planner.simulate.interleaved import OVERLAPS
from megatron_residuals.planner.simulate.links import NO_COST, Link, Network
from megatron_residuals.planner.simulate.program import programs
from megatron_residuals.planner.simulate.repetition import step_s

SEEDS = range(10)


class Pipeline:
    """One with passes and messages of random lengths; counts the micro-batches that it plays."""

    def __init__(self, draw: random.Random) -> None:
        ranks, chunks = draw.randint(2, 4), draw.randint(1, 3)
        self.layout = StageLayout.even(ranks * chunks, ranks, chunks)
        self.group = draw.choice((None, ranks, ranks + 1, 2 * ranks)) if chunks > 1 else None
        size = self.group or ranks
        self.count = draw.randint(50, 60) * size + draw.choice((0, ranks))
        self.overlap, self.waits = draw.choice(OVERLAPS), draw.random() < 0.5
        stages = range(self.layout.num_stages)
        self.passes = {(f, g): draw.uniform(0.5, 3.0) for f in (True, False) for g in stages}
        self.bytes = [draw.randint(1, 9) for _ in stages]
        inside, between = (Link(draw.uniform(2.0, 40.0), draw.uniform(0, 0.3)) for _ in range(2))
        self.network = draw.choice((NO_COST, Network(inside, between, draw.randint(1, 4))))
        self.played = 0

    def pass_s(self, step: Pass) -> float:
        return self.passes[step.forward, step.stage]

    def message_bytes(self, message: Message) -> int:
        return self.bytes[message.boundary]

    def __call__(self, num_microbatches: int, snapshots: int | None = None) -> Timeline:
        self.played += num_microbatches
        steps = programs(
            self.layout,
            num_microbatches,
            self.group,
            overlap=self.overlap,
            waits_for_sends=self.waits,
        )
        return play(self.layout, steps, self.pass_s, self.message_bytes, self.network, snapshots)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_long_step_takes_as_long_as_if_all_of_it_were_played(seed: int) -> None:
    pipeline = Pipeline(random.Random(seed))
    whole = pipeline(pipeline.count).step_s
    assert step_s(pipeline.layout, pipeline.count, pipeline.group, pipeline) == whole


# All of it was played once: 31 s for 1,024 micro-batches on 16 ranks.
def test_most_of_a_long_step_is_not_played() -> None:
    short = 0
    for seed in SEEDS:
        pipeline = Pipeline(random.Random(seed))
        step_s(pipeline.layout, pipeline.count, pipeline.group, pipeline)
        short += pipeline.played < pipeline.count
    assert short == len(SEEDS)


def test_a_step_of_a_million_micro_batches_grows_by_what_repeats() -> None:
    pipeline = Pipeline(random.Random(3))
    first, second = (
        step_s(pipeline.layout, count * 720_720, pipeline.group, pipeline) for count in (1, 2)
    )
    third = step_s(pipeline.layout, 3 * 720_720, pipeline.group, pipeline)
    assert third - second == pytest.approx(second - first, rel=1e-12)
    assert pipeline.played < 10_000
