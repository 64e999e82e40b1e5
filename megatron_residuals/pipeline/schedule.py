# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The order in which one pipeline rank runs forward and backward passes in a step."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.text import count_faults, raise_faults


class Pass(NamedTuple):
    """One pass of one micro-batch through one stage."""

    forward: bool
    micro_batch: int
    stage: int


class Stretch(NamedTuple):
    """``count`` times a forward through one stage, then a backward through one; None is no pass."""

    forward: int | None
    backward: int | None
    count: int  # type: ignore[assignment]  # hides the method of tuples


def schedule(
    layout: StageLayout, rank: int, num_microbatches: int, group_size: int | None = None
) -> Iterator[Pass]:
    """The passes of a rank in Megatron-Core's 1F1B and interleaved schedules, in order.

        warm-up    forward, more on ranks further from the last one
        steady     one forward, one backward
        cool-down  backward of what is left

    ``group_size`` is the host's microbatch_group_size_per_vp_stage (default: the number of ranks).
    Every stage sees the micro-batches in their order.

    Raises:
        ValueError: what the host's schedules refuse as well.
    """
    due: dict[tuple[bool, int], Iterator[int]] = defaultdict(itertools.count)
    for stretch in stretches(layout, rank, num_microbatches, group_size):
        for _ in range(stretch.count):
            for forward, stage in ((True, stretch.forward), (False, stretch.backward)):
                if stage is not None:
                    yield Pass(forward, next(due[forward, stage]), stage)


def stretches(
    layout: StageLayout, rank: int, num_microbatches: int, group_size: int | None = None
) -> Iterator[Stretch]:
    """The same order, what repeats itself told once.

    Source: `get_pp_rank_microbatches` and `get_schedule_table` of Megatron-Core 0.16 to 0.19.

    Raises:
        ValueError: what the host's schedules refuse as well.
    """
    group = check_schedule(layout, num_microbatches, group_size)
    chunks = range(layout.num_chunks)
    size = num_microbatches if len(chunks) == 1 else group
    groups = [min(size, num_microbatches - m) for m in range(0, num_microbatches, size)]
    forward = [(layout.stage(rank, chunk), count) for count in groups for chunk in chunks]
    backward = [(layout.stage(rank, chunk), count) for count in groups for chunk in chunks[::-1]]
    ahead = (None, warm_up(layout, rank, group))
    yield from _side_by_side([*forward, ahead], [ahead, *backward])


Runs = Iterable[tuple[int | None, int]]
"""Stages, or None for none, and how many passes in a row go through each."""


def _side_by_side(forward: Runs, backward: Runs) -> Iterator[Stretch]:
    """Both sequences, equally long, cut wherever one of them goes on to another stage."""
    left = [deque(run for run in runs if run[1]) for runs in (forward, backward)]
    while all(left):
        (f, num_f), (b, num_b) = (runs.popleft() for runs in left)
        count = min(num_f, num_b)
        yield Stretch(f, b, count)
        for runs, stage, rest in zip(left, (f, b), (num_f - count, num_b - count), strict=True):
            if rest:
                runs.appendleft((stage, rest))


def warm_up(layout: StageLayout, rank: int, group: int) -> int:
    """Forwards of a rank ahead of its backwards, of which a short step has no more than all."""
    behind = layout.num_ranks - rank - 1
    return behind if layout.num_chunks == 1 else 2 * behind + (layout.num_chunks - 1) * group


def shortest_alike(layout: StageLayout, num_microbatches: int, group_size: int | None) -> int:
    """The fewest micro-batches whose step has the same moments on every rank, counts apart.

    What is in flight depends on the passes since as many forwards ago as the warm-up has, and the
    passes of whole groups are alike. So beside a last group that is not whole it takes as many
    passes as a warm-up has and those of one group more; what a longer step adds repeats those.

    Raises:
        ValueError: what the host's schedules refuse as well.
    """
    group = group_of_passes(layout, num_microbatches, group_size)
    passes_of_group = group * layout.num_chunks
    enough = -(-warm_up(layout, 0, group) // passes_of_group) + 1
    return num_microbatches - max(0, num_microbatches // group - enough) * group


def group_of_passes(layout: StageLayout, num_microbatches: int, group_size: int | None) -> int:
    """Micro-batches after which the passes of a rank are alike: one where it has one stage.

    Raises:
        ValueError: what the host's schedules refuse as well.
    """
    group = check_schedule(layout, num_microbatches, group_size)
    return 1 if layout.num_chunks == 1 else group


def check_schedule(layout: StageLayout, num_microbatches: int, group_size: int | None) -> int:
    """The size of a micro-batch group, its default filled in.

    Raises:
        ValueError: what the host's schedules refuse as well.
    """
    group = layout.num_ranks if group_size is None else group_size
    faults = count_faults(1, num_microbatches=num_microbatches)
    if layout.num_chunks > 1 and not faults:
        faults = _group_faults(layout.num_ranks, num_microbatches, group)
    raise_faults("schedule", faults)
    return group


def _group_faults(ranks: int, num_microbatches: int, group: int) -> list[str]:
    if not ranks <= group <= num_microbatches:
        return [
            f"{num_microbatches} micro-batches in groups of {group}; an interleaved schedule on "
            f"{ranks} ranks needs groups of at least {ranks}, and a whole group at least."
        ]
    rest = num_microbatches % group
    if 0 < rest < ranks:
        return [
            f"{num_microbatches} micro-batches leave a last group of {rest}; it must be empty or "
            f"have at least {ranks}, one for each rank."
        ]
    return []
