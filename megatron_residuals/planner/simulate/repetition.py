# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""How long a step of many micro-batches takes, from one of few.

Somewhere behind its warm-up a pipeline is as it was some groups of micro-batches before. What it
does in between it does again until the micro-batches run out, in exactly the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.schedule import group_of_passes, shortest_alike
from megatron_residuals.planner.simulate.engine import TICKS_PER_S, Snapshot, Timeline

MORE_GROUPS = (4, 16)  # in which a repetition is looked for, beside the warm-up's
UNTOUCHED = 2  # groups in front of a step's end, where its end may be felt


class Repetition(NamedTuple):
    """``micro_batches`` that a pipeline takes ``ticks`` for, time after time."""

    micro_batches: int
    ticks: int


def step_s(
    layout: StageLayout,
    num_microbatches: int,
    group_size: int | None,
    play: Callable[[int, int], Timeline],
) -> float:
    """Seconds of a step, the same number as if all of it were played.

    Args:
        play: the timeline of a step of some micro-batches, with snapshots every so many.
    """
    group = group_of_passes(layout, num_microbatches, group_size)
    for count in _shorter(layout, num_microbatches, group_size, group):
        timeline = play(count, group)
        found = _repetition(timeline.snapshots, count - UNTOUCHED * group)
        if found is None:
            continue
        more = (num_microbatches - count) % found.micro_batches
        if more:
            timeline = play(count + more, group)
        times = (num_microbatches - count - more) // found.micro_batches
        return (timeline.end_ticks + times * found.ticks) / TICKS_PER_S
    return play(num_microbatches, group).step_s


def _shorter(
    layout: StageLayout, num_microbatches: int, group_size: int | None, group: int
) -> Iterator[int]:
    """Numbers of micro-batches to try, with the last group of the whole step."""
    alike = shortest_alike(layout, num_microbatches, group_size)
    for groups in MORE_GROUPS:
        count = alike + groups * group
        if 2 * count < num_microbatches:
            yield count


def _repetition(snapshots: tuple[Snapshot, ...], before: int) -> Repetition | None:
    seen: dict[Hashable, Snapshot] = {}
    for snapshot in snapshots:
        if snapshot.micro_batch > before:
            break
        earlier = seen.setdefault(snapshot.state, snapshot)
        if earlier is not snapshot:
            return Repetition(
                snapshot.micro_batch - earlier.micro_batch, snapshot.ticks - earlier.ticks
            )
    return None
