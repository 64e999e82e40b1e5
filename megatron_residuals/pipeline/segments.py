# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""How the sublayers of a stage are cut for recomputation, as arithmetic (standard library only)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from megatron_residuals.config import ResidualConfig
from megatron_residuals.depth import DepthMap
from megatron_residuals.pipeline.layout import StageLayout
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


class HostFull(NamedTuple):
    """The host's ``full`` recompute.

    ``uniform`` makes a checkpoint of every ``num_layers`` layers, ``block`` one of each of the
    first ``num_layers`` layers of a stage.
    """

    method: str
    num_layers: int


def stage_segments(
    residual: ResidualConfig,
    layout: StageLayout,
    depth: DepthMap | None,
    stage: int,
    host_full: HostFull | None = None,
) -> list[Segment]:
    """How the sublayers of a stage are cut: by our policy, or by the host's full recompute."""
    sublayers = layout.sublayers(stage)
    if not sublayers:
        return []
    if depth is not None and residual.recompute_policy in ("block", "block+layer"):
        by_layer = residual.recompute_policy == "block+layer"
        return block_segments(layout, depth, sublayers, by_layer=by_layer)
    if host_full is None:
        return [Segment(sublayers, False)]
    if host_full.method == "uniform":
        parts = layer_ranges(layout, sublayers, host_full.num_layers)
        return [Segment(part, True) for part in parts]
    layers = layer_ranges(layout, sublayers)
    return [Segment(part, index < host_full.num_layers) for index, part in enumerate(layers)]


def block_segments(
    layout: StageLayout, depth: DepthMap, sublayers: range, *, by_layer: bool
) -> list[Segment]:
    """One checkpoint for the part of each block that lies in a stage.

    ``by_layer`` makes every layer inside a checkpoint of its own, so that a replay holds one layer.
    """
    segments = []
    for part in cut_at_blocks(depth, sublayers):
        inner = layer_ranges(layout, part) if by_layer else ()
        # one layer inside is the checkpoint itself
        segments.append(Segment(part, True, inner if len(inner) > 1 else ()))
    return segments


def layer_ranges(layout: StageLayout, sublayers: range, every: int = 1) -> tuple[range, ...]:
    """The sublayers cut at each ``every``-th layer boundary, counted from their start's layer."""
    if not sublayers:
        return ()
    first, last = layout.layer_of(sublayers[0]), layout.layer_of(sublayers[-1])
    cuts = [layout.sublayers_of_layer(layer).start for layer in range(first, last + 1, every)]
    bounds = [sublayers.start, *cuts[1:], sublayers.stop]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(bounds))


def stage_group_length(residual: ResidualConfig, num_sublayers: int) -> int | None:
    """Sublayers for which streams are kept once under the policy ``group``; None under others."""
    if residual.recompute_policy != "group":
        return None
    return residual.group_length or group_length(residual.rows, num_sublayers)


def group_length(num_streams: int, num_sublayers: int) -> int:
    """r that minimises n ceil(L / r) + (n + 2) r, the streams kept and those of one replay.

    mHC, section 4.3.2: about sqrt(n L / (n + 2)). L counts the sublayers of one stage; the smallest
    r wins a tie.
    """

    def cost(r: int) -> int:
        return num_streams * -(-num_sublayers // r) + (num_streams + 2) * r

    return min(range(1, max(num_sublayers, 1) + 1), key=lambda r: (cost(r), r))
