# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""One hop between neighbouring pipeline stages: what its receiver holds and what it is sent."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_residuals.depth import DepthMap
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.routes import between_layers


@dataclass(frozen=True)
class Boundary:
    """The hop from stage `stage - 1` into `stage`.

    Attributes:
        stage: the receiving stage.
        sender_rank, receiver_rank, receiver_chunk: where the two stages run.
        sublayer: global index of the first sublayer behind the boundary.
        held: complete sources that the receiver takes from its rank's cache, ascending.
        sent: complete sources on the wire in front of the last row, ascending.
        partial: id of the running partial, the last row; None where the rows are no sources
            (residual streams, or the hidden state behind the last layer).
        partial_complete: whether that partial is a finished source.
        rows: `[s, b, h]` rows on the wire.
        carries_state: whether they are the state between two sublayers, rather than one hidden
            state: the embedding, or what is behind the last layer.
    """

    stage: int
    sender_rank: int
    receiver_rank: int
    receiver_chunk: int
    sublayer: int
    held: tuple[int, ...]
    sent: tuple[int, ...]
    partial: int | None
    partial_complete: bool
    rows: int
    carries_state: bool

    @property
    def arrivals(self) -> tuple[int, ...]:
        """Every complete source that this hop brings to the receiver."""
        if self.partial is None or not self.partial_complete:
            return self.sent
        return (*self.sent, self.partial)


def _boundary(
    layout: StageLayout,
    g: int,
    sublayer: int,
    *,
    held: tuple[int, ...] = (),
    sent: tuple[int, ...] = (),
    partial: int | None = None,
    partial_complete: bool = False,
    rows: int,
    carries_state: bool,
) -> Boundary:
    return Boundary(
        stage=g,
        sender_rank=layout.rank(g - 1),
        receiver_rank=layout.rank(g),
        receiver_chunk=layout.chunk(g),
        sublayer=sublayer,
        held=held,
        sent=sent,
        partial=partial,
        partial_complete=partial_complete,
        rows=rows,
        carries_state=carries_state,
    )


def source_boundary(
    layout: StageLayout, depth: DepthMap, g: int, held: set[int], sent: set[int]
) -> Boundary:
    """The hop into stage g of a plan for sources, given what it holds and what is sent."""
    sublayer = layout.first_sublayer(g)
    behind_last_layer = sublayer == depth.num_sublayers
    return _boundary(
        layout,
        g,
        sublayer,
        held=tuple(sorted(held)),
        sent=tuple(sorted(sent)),
        partial=None if behind_last_layer else depth.partial_id(sublayer),
        partial_complete=not behind_last_layer and depth.partial_is_complete(sublayer),
        rows=len(sent) + 1,
        carries_state=not behind_last_layer,
    )


def stream_boundary(layout: StageLayout, g: int, num_streams: int) -> Boundary:
    """The hop into stage g of a plan for residual streams."""
    inside = between_layers(layout, g)
    rows = num_streams if inside else 1
    return _boundary(layout, g, layout.first_sublayer(g), rows=rows, carries_state=inside)
