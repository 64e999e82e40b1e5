# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Planes that a residual mechanism moves through a GPU's memory, beyond the plain residual.

A plane is one [s, b, h] row read or written once. n streams, N what a sublayer attends to (the
running sum included), S sublayers of a block on one stage:

                              forward             backward
    plain residual, pre-norm  4                   4
    HC, mHC                   3n + 2              5n + 4
      head                    n + 1               2n + 1
    AttnRes, one pass         N + 3               3N + 1
             two phases       6 + (N - 1) / S     6 + 4 (N - 1) / S
      head                    N + 1               3N + 1

These are what fused kernels reach: streams and sums updated, read, normalised and prepared for the
next sublayer without a round trip in between; the gradient of a source is added to in place. Of the
two ways to read sources the one that moves less is taken for each block. What the plain residual
moves is part of the share of peak that a stock model reaches, so only the difference to it counts.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from megatron_residuals.config import ResidualConfig
from megatron_residuals.depth import DepthMap
from megatron_residuals.mechanisms.streams import Streams
from megatron_residuals.pipeline.layout import StageLayout

PLAIN_PLANES = 4


class Planes(NamedTuple):
    """Planes per micro-batch, more than the plain residual moves."""

    forward: float
    backward: float

    def __add__(self, other: tuple[object, ...]) -> Planes:
        assert isinstance(other, Planes)
        return Planes(self.forward + other.forward, self.backward + other.backward)


def stage_planes(layout: StageLayout, residual: ResidualConfig, stage: int) -> Planes:
    """What the sublayers of a stage move, the head included where the last layer is."""
    num_sublayers = 2 * layout.layers[stage]
    first = 2 * layout.first_layer(stage)
    has_head = num_sublayers > 0 and first + num_sublayers == 2 * layout.num_layers
    if isinstance(residual.entry, Streams):
        n = residual.streams
        planes = Planes(
            num_sublayers * (3 * n + 2 - PLAIN_PLANES), num_sublayers * (5 * n + 4 - PLAIN_PLANES)
        )
        return planes + Planes(n + 1, 2 * n + 1) if has_head else planes
    depth = residual.depth_map(layout.num_layers)
    if depth is None:
        return Planes(0, 0)
    planes = Planes(0, 0)
    sublayers = range(first, first + num_sublayers)
    for _, of_block in groupby(sublayers, key=lambda i: i // depth.block_sublayers):
        planes += _block_planes(depth, list(of_block))
    if has_head:
        read = depth.num_read(depth.num_sublayers)
        planes += Planes(read + 1, 3 * read + 1)
    return planes


def _block_planes(depth: DepthMap, sublayers: list[int]) -> Planes:
    reads = [depth.num_read(i) for i in sublayers]
    plain, others = PLAIN_PLANES * len(reads), max(reads) - 1
    one_pass = Planes(sum(n + 3 for n in reads), sum(3 * n + 1 for n in reads))
    two_phases = Planes(6 * len(reads) + others, 6 * len(reads) + 4 * others)
    best = min(one_pass, two_phases, key=sum)
    return Planes(best.forward - plain, best.backward - plain)
