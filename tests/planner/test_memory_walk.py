# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The peak of a step, told from what repeats itself, against a walk through all of its passes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from megatron_residuals.config import ResidualConfig
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.schedule import schedule
from megatron_residuals.planner.memory import MemoryPlan, Prediction
from megatron_residuals.planner.sizes import ModelSizes
from megatron_residuals.planner.storages import Sizes, StageStorages

SIZES = ModelSizes(
    seq_length=8,
    micro_batch_size=1,
    hidden_size=16,
    ffn_hidden_size=24,
    num_heads=2,
    vocab_size=5,
)
RESIDUALS = [
    "residual",
    "mhc(streams=3, recompute='group')",
    "attnres(recompute='mix')",
    "block_attnres(block_sublayers=3)",
    "block_attnres(block_sublayers=5, recompute='block+layer')",
    "block_attnres(block_layers=1, recompute='block', transport='full')",
]


def walked(stages: list[StageStorages], plan: MemoryPlan, rank: int) -> tuple[int, int]:
    """Peak bytes and most passes in flight, from what every micro-batch keeps at every moment."""
    in_flight: dict[int, set[int]] = {}  # micro-batch -> stages
    cached: dict[int, Sizes] = {}  # micro-batch -> what lies in the cache for it
    peak = most = 0

    def kept(micro_batch: int, without: int = -1) -> Sizes:
        found = dict(cached.get(micro_batch, {}))
        for stage in in_flight[micro_batch] - {without}:
            found |= {storage.name: storage.bytes for storage in stages[stage].kept}
        return found

    for forward, m, g in schedule(plan.layout, rank, plan.num_microbatches, plan.group_size):
        transfer = stages[g].plan
        if forward:
            in_flight.setdefault(m, set()).add(g)
            left = stages[g].cached(*transfer.last_fetch(g))
            cached[m] = {n: size for n, size in cached.get(m, {}).items() if n not in left}
            cached[m] |= stages[g].cached(*transfer.stashes(g))
            peak = max(peak, sum(sum(kept(other).values()) for other in in_flight))
            most = max(most, sum(map(len, in_flight.values())))
        else:
            others = sum(sum(kept(other).values()) for other in in_flight if other != m)
            for moment in stages[g].moments:
                peak = max(peak, others + sum((kept(m, without=g) | moment).values()))
            in_flight[m].remove(g)
            if not in_flight[m]:
                del in_flight[m]
    assert not in_flight
    return peak, most


def pipelines() -> Iterator[tuple[StageLayout, int, int | None]]:
    """Ranks and chunks with uneven and empty stages; few and many micro-batches, broken groups."""
    generator = random.Random(3)
    for ranks, chunks in [(1, 1), (2, 1), (3, 1), (2, 2), (2, 3), (3, 2), (4, 2), (2, 4)]:
        layers = (1, *generator.choices((0, 1, 2, 3), k=ranks * chunks - 1))
        layout = StageLayout(ranks, chunks, layers)
        if chunks == 1:
            yield from ((layout, count, None) for count in (1, 2, 3, 7, 12))
            continue
        for group, whole in itertools.product((ranks, ranks + 1, 2 * ranks + 1), (1, 2, 3, 4, 6)):
            for rest in {0, ranks, group - 1}:
                if rest == 0 or ranks <= rest < group:
                    yield layout, whole * group + rest, group


PIPELINES = list(pipelines())


@pytest.mark.parametrize(("place", "residual"), [*enumerate(RESIDUALS)])
def test_every_step_peaks_where_a_walk_through_all_of_its_passes_does(
    place: int, residual: str
) -> None:
    # The walk took time that grew with the square of the micro-batches: minutes for thousands.
    config, found = ResidualConfig.parse(residual), 0
    for layout, count, group in PIPELINES[place % 3 :: 3]:
        plan = MemoryPlan(layout, config, SIZES, count, group)
        prediction, stages = plan.predict(), plan.stages(config)
        for rank in range(layout.num_ranks):
            memory = prediction.ranks[rank]
            expected = walked(stages, plan, rank)
            assert (memory.peak_bytes, memory.in_flight) == expected, (layout, count, group, rank)
            found += 1
    assert found > 90


def test_a_step_of_very_many_micro_batches_peaks_as_one_of_many() -> None:
    layout = StageLayout.even(12, 3, 2)
    config = ResidualConfig("block_attnres", block_sublayers=5)

    def predicted(count: int, group: int) -> Prediction:
        return MemoryPlan(layout, config, SIZES, count, group).predict()

    assert predicted(4 * 10**9 + 3, 4) == predicted(12 + 3, 4)
    # one group that never repeats: what is in flight grows with it
    peaks = [predicted(count, count).worst.peak_bytes for count in (10**9, 2 * 10**9, 3 * 10**9)]
    assert peaks[1] - peaks[0] == peaks[2] - peaks[1] > 0
