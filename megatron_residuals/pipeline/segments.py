# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""How the sublayers of a stage are cut for recomputation, as arithmetic (standard library only)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_residuals.depth import DepthMap
from megatron_residuals.pipeline.two_phase import cut_at_blocks


@dataclass(frozen=True)
class Segment:
    """Consecutive sublayers (global indices) that run as one.

    Attributes:
        sublayers: which.
        checkpoint: whether only the state in front is kept, and the segment runs again in backward.
        inner: when it runs again, the parts that are checkpoints themselves; empty for none.
    """

    sublayers: range
    checkpoint: bool
    inner: tuple[range, ...] = ()


def block_segments(depth: DepthMap, sublayers: range, *, by_layer: bool) -> list[Segment]:
    """One checkpoint for the part of each block that lies in a stage.

    ``by_layer`` makes every layer inside a checkpoint of its own, so that a replay holds one layer.
    """
    segments = []
    for part in cut_at_blocks(depth, sublayers):
        inner = layer_ranges(part, depth.sublayers_per_layer) if by_layer else ()
        # one layer inside is the checkpoint itself
        segments.append(Segment(part, True, inner if len(inner) > 1 else ()))
    return segments


def layer_ranges(sublayers: range, sublayers_per_layer: int, every: int = 1) -> tuple[range, ...]:
    """The sublayers cut at each ``every``-th layer boundary, counted from their start's layer."""
    if len(sublayers) == 0:
        return ()
    size = every * sublayers_per_layer
    first = sublayers.start - sublayers.start % sublayers_per_layer
    starts = [max(start, sublayers.start) for start in range(first, sublayers.stop, size)]
    stops = [*starts[1:], sublayers.stop]
    return tuple(range(start, stop) for start, stop in zip(starts, stops, strict=True))


def group_length(num_streams: int, num_sublayers: int) -> int:
    """r that minimises n ceil(L / r) + (n + 2) r, the streams kept and those of one replay.

    mHC, section 4.3.2: about sqrt(n L / (n + 2)). L counts the sublayers of one stage; the smallest
    r wins a tie.
    """

    def cost(r: int) -> int:
        return num_streams * -(-num_sublayers // r) + (num_streams + 2) * r

    return min(range(1, max(num_sublayers, 1) + 1), key=lambda r: (cost(r), r))
