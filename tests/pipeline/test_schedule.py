# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The order of passes that the planner assumes, against the host's own functions and by hand."""

from __future__ import annotations

import itertools

import pytest
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.schedule import (
    Pass,
    Stretch,
    schedule,
    shortest_alike,
    stretches,
)


def order(layout: StageLayout, rank: int, *args: int) -> str:
    """F and B with micro-batch and stage."""
    passes = schedule(layout, rank, *args)
    return " ".join(f"{'BF'[step.forward]}{step.micro_batch}.{step.stage}" for step in passes)


def test_one_stage_per_rank_goes_one_forward_one_backward() -> None:
    layout = StageLayout.even(4, 2)
    assert order(layout, 0, 3) == "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0"
    assert order(layout, 1, 3) == "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1"
    assert order(StageLayout.even(4, 1), 0, 2) == "F0.0 B0.0 F1.0 B1.0"


def test_fewer_micro_batches_than_warm_up_run_all_forwards_first() -> None:
    assert order(StageLayout.even(4, 4), 0, 2) == "F0.0 F1.0 B0.0 B1.0"


def test_interleaved_chunks_take_turns_in_groups() -> None:
    layout = StageLayout.even(4, 2, 2)
    assert order(layout, 1, 2) == "F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 B0.1 B1.1"
    assert order(layout, 0, 2) == "F0.0 F1.0 F0.2 F1.2 B0.2 B1.2 B0.0 B1.0"


def test_stretches_tell_once_what_repeats_itself() -> None:
    one, two = StageLayout.even(4, 2), StageLayout.even(4, 2, 2)
    assert list(stretches(one, 0, 10**9)) == [
        Stretch(0, None, 1),
        Stretch(0, 0, 10**9 - 1),
        Stretch(None, 0, 1),
    ]
    assert list(stretches(one, 1, 3)) == [Stretch(1, 1, 3)]
    assert list(stretches(two, 0, 5, 3)) == [
        Stretch(0, None, 3),
        Stretch(2, None, 2),
        Stretch(2, 2, 1),
        Stretch(0, 2, 2),
        Stretch(2, 0, 2),
        Stretch(None, 0, 1),
        Stretch(None, 2, 2),
        Stretch(None, 0, 2),
    ]


def test_long_steps_are_like_shorter_ones_with_the_same_rest() -> None:
    one, two = StageLayout.even(4, 4), StageLayout.even(8, 4, 2)
    assert [shortest_alike(one, count, None) for count in (1, 4, 5, 10**9)] == [1, 4, 4, 4]
    assert [shortest_alike(two, count, 5) for count in (5, 14, 15, 19, 10**9 + 4)] == [
        *(5, 14, 15, 19, 19),
    ]
    with pytest.raises(ValueError, match="leave a last group of 1"):
        shortest_alike(two, 10**9 + 1, 5)


@pytest.mark.parametrize(("ranks", "chunks", "group"), [(2, 2, 2), (2, 3, 3), (4, 2, 5)])
def test_forward_order_is_that_of_the_hosts_table(ranks: int, chunks: int, group: int) -> None:
    layout = StageLayout.even(ranks * chunks, ranks, chunks)
    for count, rank in itertools.product((group, 2 * group, 2 * group + ranks), range(ranks)):
        passes = list(schedule(layout, rank, count, group))
        table = get_schedule_table(count, chunks, group)
        forward = [Pass(True, m, layout.stage(rank, chunk)) for m, chunk in table]
        assert [step for step in passes if step.forward] == forward
        # every pass has its backward, after it and after those of later stages
        position = {step: k for k, step in enumerate(passes)}
        assert len(position) == len(passes) == 2 * len(forward)
        for step in forward:
            assert position[step] < position[step._replace(forward=False)]
            later = step._replace(forward=False, stage=step.stage + ranks)
            if later in position:
                assert position[later] < position[step._replace(forward=False)]


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((0,), "num_microbatches is 0"),
        ((1,), "1 micro-batches in groups of 2"),
        ((3,), "leave a last group of 1"),
        ((4, 1), "groups of at least 2"),
    ],
)
def test_what_the_host_refuses_is_refused(counts: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list(schedule(StageLayout.even(4, 2, 2), 0, *counts))
