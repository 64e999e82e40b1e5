# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""How long a rank keeps a source: from the first stage that has it to the last that fetches it.

One micro-batch, one source, on a rank whose stages are g, g+P, g+2P:

    stage    event          value               gradient
    g        stash          put in the cache    slot opened
    g+P      fetch          stays               \\
    g+2P     last fetch     dropped             /  each fetch deposits one in its stage's backward
    g        backward       -                   deposits collected: as many as fetches
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_residuals.depth import DepthMap
from megatron_residuals.pipeline.boundary import Boundary
from megatron_residuals.pipeline.layout import StageLayout


@dataclass(frozen=True)
class SourceLife:
    """A source on a rank: the stage that owns it there and the stages that fetch it.

    `by_wire` tells whether the owner received the source (stash on entry) or finished it (on exit).
    """

    rank: int
    source: int
    owner: int
    by_wire: bool
    fetch_stages: tuple[int, ...]


class StageCache(NamedTuple):
    """What one stage does with its rank's cache; `rows_after` sources lie in it afterwards."""

    fetches: tuple[int, ...]
    last_fetch: tuple[int, ...]
    stash_on_entry: tuple[int, ...]
    stash_on_exit: tuple[int, ...]
    rows_after: int


def source_lives(
    layout: StageLayout, depth: DepthMap | None, boundaries: Sequence[Boundary]
) -> tuple[SourceLife, ...]:
    """Every source that some rank fetches, ordered by rank and source."""
    fetchers: dict[tuple[int, int], list[int]] = {}
    for boundary in boundaries:
        for source in boundary.held:
            fetchers.setdefault((boundary.receiver_rank, source), []).append(boundary.stage)
    if depth is None or not fetchers:
        return ()
    owners: dict[tuple[int, int], tuple[int, bool]] = {}
    for g in range(layout.num_stages):
        rank = layout.rank(g)
        for source in boundaries[g - 1].arrivals if g else ():
            owners.setdefault((rank, source), (g, True))
        for source in _finished(layout, depth, g):
            owners.setdefault((rank, source), (g, False))
    return tuple(
        SourceLife(rank, source, *owners[rank, source], tuple(stages))
        for (rank, source), stages in sorted(fetchers.items())
    )


def _finished(layout: StageLayout, depth: DepthMap, g: int) -> range:
    """Sources that stage g completes, the finished sum that it sends as a partial included."""
    sublayers = layout.sublayers(g)
    complete_before = depth.num_complete(sublayers.start) if g else 0
    return range(complete_before, depth.num_complete(sublayers.stop))


def stage_caches(layout: StageLayout, lives: Sequence[SourceLife]) -> tuple[StageCache, ...]:
    """The same lives, seen stage by stage."""
    by_rank: list[list[SourceLife]] = [[] for _ in range(layout.num_ranks)]
    for life in lives:
        by_rank[life.rank].append(life)

    def view(g: int) -> StageCache:
        local = by_rank[layout.rank(g)]
        owned = [life for life in local if life.owner == g]
        return StageCache(
            fetches=tuple(life.source for life in local if g in life.fetch_stages),
            last_fetch=tuple(life.source for life in local if g == life.fetch_stages[-1]),
            stash_on_entry=tuple(life.source for life in owned if life.by_wire),
            stash_on_exit=tuple(life.source for life in owned if not life.by_wire),
            rows_after=sum(life.owner <= g < life.fetch_stages[-1] for life in local),
        )

    return tuple(view(g) for g in range(layout.num_stages))
