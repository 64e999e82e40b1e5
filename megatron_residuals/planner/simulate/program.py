# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The programs of all ranks: which schedule the host would take, and its order."""

from __future__ import annotations

from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.schedule import check_schedule
from megatron_residuals.planner.simulate.interleaved import OVERLAPS, interleaved
from megatron_residuals.planner.simulate.one_f_one_b import one_f_one_b
from megatron_residuals.planner.simulate.steps import Program


def programs(
    layout: StageLayout,
    num_microbatches: int,
    group_size: int | None = None,
    *,
    overlap: str = "steady",
    waits_for_sends: bool = True,
) -> list[Program]:
    """What every rank does in a step, by rank; 1F1B with one chunk per rank, else interleaved.

    Args:
        group_size: the host's microbatch_group_size_per_vp_stage (default: the number of ranks).
        overlap: one of `OVERLAPS`; 1F1B never overlaps.
        waits_for_sends: see `interleaved`.

    Raises:
        ValueError: what the host's schedules refuse as well, or an unknown overlap.
    """
    if overlap not in OVERLAPS:
        raise ValueError(f"overlap is {overlap!r}; allowed: {', '.join(OVERLAPS)}.")
    group = check_schedule(layout, num_microbatches, group_size)
    ranks = range(layout.num_ranks)
    if layout.num_chunks == 1:
        return [one_f_one_b(layout, rank, num_microbatches) for rank in ranks]
    return [
        interleaved(
            layout,
            rank,
            num_microbatches,
            group,
            overlap=overlap,
            waits_for_sends=waits_for_sends,
        )
        for rank in ranks
    ]
