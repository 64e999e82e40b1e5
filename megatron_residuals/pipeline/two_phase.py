# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which sublayers read the finished sources together, before each merges with the running sum.

All sublayers of a block read the same finished sources, so one pass over them serves all. It pays
where it moves fewer planes (`pipeline.traffic`): from two sublayers and two finished sources on,
and from four sublayers on in the first block, whose only finished source is the embedding. The
answer is a matter of depth alone, counted for whole blocks and Triton's kernels in 16 bit, so that
it is the same wherever a pipeline stage or a checkpoint cuts a block, and on every device, and with
it every rounding.
Depends on the standard library only.
"""

from __future__ import annotations

from megatron_residuals.depth import DepthMap
from megatron_residuals.pipeline.traffic import fewer_in_two_phases


def reads_in_two_phases(choice: str, depth: DepthMap, sublayer: int) -> bool:
    """Whether a sublayer reads in two phases; ``choice`` is the config's ``two_phase``.

    Raises:
        ValueError: two phases are demanded of blocks of one sublayer, which share no read.
    """
    if choice == "on" and depth.block_sublayers == 1:
        raise ValueError(
            "two_phase is 'on', but every block has one sublayer (Full AttnRes), so no two reads "
            "share their sources; leave two_phase out, or use blocks of at least two sublayers"
        )
    source = depth.source_of(sublayer)
    num_readers = len(depth.block_range(source))
    if choice == "auto":
        return num_readers > 1 and fewer_in_two_phases(source, num_readers)
    return choice == "on" and num_readers > 1


def cut_at_blocks(depth: DepthMap, sublayers: range) -> tuple[range, ...]:
    """Consecutive sublayers, cut in front of every one that opens a block."""
    cuts = [i for i in sublayers if i > sublayers.start and depth.opens_block(i)]
    bounds = [sublayers.start, *cuts, sublayers.stop]
    return tuple(range(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if a < b)
