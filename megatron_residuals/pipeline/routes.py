# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which complete sources each hop of a pipeline carries, and which its receiver has already."""

from __future__ import annotations

from megatron_residuals.depth import DepthMap
from megatron_residuals.pipeline.layout import StageLayout


def between_layers(layout: StageLayout, g: int) -> bool:
    """Whether layers lie on both sides of the hop into stage g."""
    return 0 < layout.first_layer(g) < layout.num_layers


def full_route(layout: StageLayout, depth: DepthMap) -> tuple[list[set[int]], list[set[int]]]:
    """Per stage: nothing held, every complete source sent."""
    sent = []
    for g in range(layout.num_stages):
        sources = range(depth.num_sources(layout.first_sublayer(g)))
        sent.append(set(sources) if between_layers(layout, g) else set())
    return [set() for _ in sent], sent


def delta_route(layout: StageLayout, depth: DepthMap) -> tuple[list[set[int]], list[set[int]]]:
    """Per stage: the sources it takes from its rank's cache, and those the hop into it carries.

    Each stage that has layers pulls what its rank never had from the nearest earlier stage whose
    rank has it. Without empty stages that is always the stage just before.
    """
    held: list[set[int]] = [set() for _ in layout.layers]
    sent: list[set[int]] = [set() for _ in layout.layers]
    on_rank: list[set[int]] = [set() for _ in range(layout.num_ranks)]
    for g in range(layout.num_stages):
        here, sublayers = on_rank[layout.rank(g)], layout.sublayers(g)
        entry = sublayers.start
        if sublayers:
            for source in range(depth.num_sources(entry)):
                hop = g
                while source not in on_rank[layout.rank(hop)]:
                    sent[hop].add(source)
                    hop -= 1
                for passed in range(hop + 1, g + 1):
                    on_rank[layout.rank(passed)].add(source)
                # A stage with layers has the source in its state anyway; others fetch to pass on.
                if hop == g or not layout.layers[hop]:
                    held[hop].add(source)
            here.update(range(depth.num_complete(sublayers.stop)))
        elif depth.partial_is_complete(entry) and entry < depth.num_sublayers:
            here.add(depth.partial_id(entry))
    return held, sent
