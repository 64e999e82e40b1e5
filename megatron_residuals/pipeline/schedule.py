# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The order in which one pipeline rank runs forward and backward passes in a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.text import count_faults, raise_faults


class Pass(NamedTuple):
    """One pass of one micro-batch through one stage."""

    forward: bool
    micro_batch: int
    stage: int


def schedule(
    layout: StageLayout, rank: int, num_microbatches: int, group_size: int | None = None
) -> Iterator[Pass]:
    """The passes of a rank in Megatron-Core's 1F1B and interleaved schedules, in order.

        warm-up    forward, more on ranks further from the last one
        steady     one forward, one backward
        cool-down  backward of what is left

    ``group_size`` is the host's microbatch_group_size_per_vp_stage (default: the number of ranks).
    Source: `get_pp_rank_microbatches` and `get_schedule_table` of Megatron-Core 0.16 to 0.19.

    Raises:
        ValueError: what the host's schedules refuse as well.
    """
    ranks, chunks = layout.num_ranks, layout.num_chunks
    group = check_schedule(layout, num_microbatches, group_size)
    table = forward_order(num_microbatches, chunks, group)
    warm_up = ranks - rank - 1
    if chunks > 1:
        warm_up = 2 * warm_up + (chunks - 1) * group
    for k in range(len(table) + warm_up):
        if k < len(table):
            micro_batch, chunk = table[k]
            yield Pass(True, micro_batch, layout.stage(rank, chunk))
        if warm_up <= k:
            micro_batch, chunk = table[k - warm_up]
            yield Pass(False, micro_batch, layout.stage(rank, chunks - 1 - chunk))


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


def forward_order(num_microbatches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of the forward passes of a rank, as `get_schedule_table` has them."""
    return [
        (micro_batch, chunk)
        for first in range(0, num_microbatches, group)
        for chunk in range(chunks)
        for micro_batch in range(first, min(first + group, num_microbatches))
    ]


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
