# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What crosses every stage boundary of a pipeline, and what every rank keeps, as data.

A row is one `[s, b, h]` tensor. A message into a stage is `rows` of them: complete sources first,
in ascending id, then one last row that always travels, the running partial. With `delta` transport
a rank is sent a complete source only if that source has never been on it: neither received (also
as a finished partial, where a boundary and a block end coincide) nor finished by one of its stages.

A stage without layers reads nothing. It is sent, or takes from its rank's cache, only what a later
stage still lacks; so every row that travels is used, and every row taken from a cache is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

from megatron_residuals.config import TRANSPORTS, ResidualConfig
from megatron_residuals.depth import DepthMap, source_names
from megatron_residuals.pipeline.boundary import Boundary, source_boundary, stream_boundary
from megatron_residuals.pipeline.grid import plan_grid
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.lifetimes import SourceLife, StageCache, source_lives, stage_caches
from megatron_residuals.pipeline.routes import delta_route, full_route
from megatron_residuals.text import count_faults, raise_faults

__all__ = ["Boundary", "SourceLife", "StageCache", "StageLayout", "TransferPlan"]


@dataclass(frozen=True)
class TransferPlan:
    """The boundaries of a layout (num_stages - 1 of them) under one transport.

    Build it with `for_residual`, or with `for_sources` and `for_streams`; two equal plans describe
    the same traffic.

    What happens to the state in a stage follows from its hops. It ``receives`` and ``sends`` one,
    or a single hidden state; it ``opens`` one from the embedding where it has received none but
    leaves or closes one; it ``closes`` it, to the hidden state, behind the last layer. Depth
    sources open at the embedding; streams where the first layer is, so that n of them are not sent
    for one embedding.
    """

    layout: StageLayout
    transport: str
    depth: DepthMap | None
    num_streams: int
    boundaries: tuple[Boundary, ...]

    @classmethod
    def for_residual(cls, residual: ResidualConfig, layout: StageLayout) -> TransferPlan:
        """The plan of a model with this residual connection."""
        depth = residual.depth_map(layout.num_layers, layout.sublayers_per_layer)
        if depth is not None:
            return cls.for_sources(layout, depth, residual.transport)
        return cls.for_streams(layout, residual.rows)

    @classmethod
    def for_sources(
        cls, layout: StageLayout, depth: DepthMap, transport: str = "delta"
    ) -> TransferPlan:
        """Full and Block AttnRes: sources and a running partial cross.

        Raises:
            ValueError: unknown transport, or the layout and the depth differ in sublayers.
        """
        faults = []
        if transport not in TRANSPORTS:
            faults.append(f"transport is {transport!r}; allowed: {', '.join(TRANSPORTS)}.")
        if layout.num_sublayers != depth.num_sublayers:
            faults.append(
                f"the layout has {layout.num_sublayers} sublayers and the depth "
                f"{depth.num_sublayers}; build both for the same model."
            )
        raise_faults("TransferPlan", faults)
        route = delta_route if transport == "delta" else full_route
        held, sent = route(layout, depth)
        boundaries = tuple(
            source_boundary(layout, depth, g, held[g], sent[g]) for g in range(1, layout.num_stages)
        )
        return cls(layout, transport, depth, 1, boundaries)

    @classmethod
    def for_streams(cls, layout: StageLayout, num_streams: int) -> TransferPlan:
        """Residual streams: n rows cross between layers, one before the first and after the last.

        `num_streams=1` is the plain residual. Every stream changes in every sublayer, so nothing
        can be kept and the transport is always `full`.
        """
        raise_faults("TransferPlan", count_faults(1, num_streams=num_streams))
        boundaries = tuple(
            stream_boundary(layout, g, num_streams) for g in range(1, layout.num_stages)
        )
        return cls(layout, "full", None, num_streams, boundaries)

    def boundary_into(self, g: int) -> Boundary | None:
        """The hop into stage g; None for stage 0, which reads the embedding."""
        self.layout.rank(g)
        return self.boundaries[g - 1] if g > 0 else None

    def rows_in(self, g: int) -> int:
        """Rows received by stage g per micro-batch; its backward sends as many."""
        boundary = self.boundary_into(g)
        return 0 if boundary is None else boundary.rows

    def rows_out(self, g: int) -> int:
        """Rows sent by stage g per micro-batch; its backward receives as many."""
        return 0 if g == self.layout.num_stages - 1 else self.rows_in(g + 1)

    def receives(self, g: int) -> bool:
        """Whether the payload into stage g is a state rather than a hidden state."""
        boundary = self.boundary_into(g)
        return boundary is not None and boundary.carries_state

    def sends(self, g: int) -> bool:
        """Whether the payload out of stage g is a state rather than a hidden state."""
        return g < self.layout.num_stages - 1 and self.receives(g + 1)

    def closes(self, g: int) -> bool:
        """Whether the last layer is in stage g, behind which the state becomes a hidden state."""
        return self.layout.is_last_with_layers(g)

    def opens(self, g: int) -> bool:
        """Whether the embedding becomes the state in stage g."""
        return not self.receives(g) and (self.sends(g) or self.closes(g))

    def with_transport(self, transport: str) -> TransferPlan:
        """The same pipeline under another transport; streams know only one."""
        if self.depth is None or transport == self.transport:
            return self
        return TransferPlan.for_sources(self.layout, self.depth, transport)

    @property
    def rows(self) -> int:
        """Rows over all hops, one micro-batch, forward; the backward moves as many."""
        return sum(boundary.rows for boundary in self.boundaries)

    @property
    def max_rows(self) -> int:
        """Rows on the widest hop."""
        return max((boundary.rows for boundary in self.boundaries), default=0)

    @cached_property
    def rows_full(self) -> int:
        """``rows`` with full transport."""
        return self.with_transport("full").rows

    @cached_property
    def rows_delta(self) -> int:
        """``rows`` with delta transport."""
        return self.with_transport("delta").rows

    @cached_property
    def max_rows_full(self) -> int:
        """``max_rows`` with full transport."""
        return self.with_transport("full").max_rows

    @cached_property
    def max_rows_delta(self) -> int:
        """``max_rows`` with delta transport."""
        return self.with_transport("delta").max_rows

    @cached_property
    def lives(self) -> tuple[SourceLife, ...]:
        """Every source that a rank keeps for one of its later stages."""
        return source_lives(self.layout, self.depth, self.boundaries)

    @cached_property
    def _caches(self) -> tuple[StageCache, ...]:
        return stage_caches(self.layout, self.lives)

    def fetches(self, g: int) -> tuple[int, ...]:
        """Sources that stage g takes from its rank's cache on entry."""
        return self._cache(g).fetches

    def stash_on_entry(self, g: int) -> tuple[int, ...]:
        """Sources that arrive at stage g by wire and that its rank will fetch later."""
        return self._cache(g).stash_on_entry

    def stash_on_exit(self, g: int) -> tuple[int, ...]:
        """Sources that stage g finishes and that its rank will fetch later."""
        return self._cache(g).stash_on_exit

    def stashes(self, g: int) -> tuple[int, ...]:
        """Everything that stage g puts into its rank's cache."""
        return self.stash_on_entry(g) + self.stash_on_exit(g)

    def last_fetch(self, g: int) -> tuple[int, ...]:
        """The fetched sources whose cached value is dropped once stage g has it."""
        return self._cache(g).last_fetch

    def expected_deposits(self, g: int, source: int) -> int:
        """Gradients that the rank's later stages return to stage g for a source it stashed.

        Raises:
            ValueError: stage g does not stash that source.
        """
        if (g, source) not in self._deposits:
            raise ValueError(f"stage {g} stashes {source_names(self.stashes(g))}, not s{source}.")
        return self._deposits[g, source]

    @cached_property
    def _deposits(self) -> dict[tuple[int, int], int]:
        return {(life.owner, life.source): len(life.fetch_stages) for life in self.lives}

    def _cache(self, g: int) -> StageCache:
        self.layout.rank(g)
        return self._caches[g]

    @cached_property
    def cache_rows_per_rank(self) -> tuple[int, ...]:
        """Per rank, the most sources of one micro-batch that lie in its cache at a time."""
        rows_after = [cache.rows_after for cache in self._caches]
        num_ranks = self.layout.num_ranks
        return tuple(max(rows_after[rank::num_ranks]) for rank in range(num_ranks))

    @property
    def cache_rows(self) -> int:
        """The largest of `cache_rows_per_rank`."""
        return max(self.cache_rows_per_rank)

    def grid(self, row_bytes: int | None = None) -> str:
        """Printable table of the hops with totals; sizes too when a row's bytes are given."""
        return plan_grid(self, row_bytes)

    def __str__(self) -> str:
        return self.grid()

    def digest(self) -> str:
        """16 hex digits that differ when any boundary, the layout or the depth differs."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, object]:
        """The plan's fields, its totals and its digest, as plain JSON types."""
        fields: dict[str, object] = json.loads(json.dumps(asdict(self)))
        return fields | {
            "rows": self.rows,
            "max_rows": self.max_rows,
            "rows_full": self.rows_full,
            "rows_delta": self.rows_delta,
            "max_rows_full": self.max_rows_full,
            "max_rows_delta": self.max_rows_delta,
            "cache_rows": self.cache_rows,
            "cache_rows_per_rank": list(self.cache_rows_per_rank),
            "digest": self.digest(),
        }

    def to_json(self) -> str:
        """``to_dict`` as text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> TransferPlan:
        """Rebuild a plan from `to_json`.

        Raises:
            ValueError: not such a text, or its boundaries are not those this version derives.
        """
        try:
            fields = json.loads(text)
            plan = _rebuild(fields)
            stated = fields["boundaries"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the JSON of a TransferPlan: {error!r}.") from error
        if stated != plan.to_dict()["boundaries"]:
            raise ValueError(
                "the boundaries in this JSON are not those derived from its layout and depth; it "
                "was edited, or written by another version. Make the plan anew."
            )
        return plan


def _rebuild(fields: Mapping[str, object]) -> TransferPlan:
    layout_fields, depth_fields = fields["layout"], fields["depth"]
    if not isinstance(layout_fields, dict):
        raise TypeError("layout is not an object")
    layout = StageLayout(**layout_fields)
    if isinstance(depth_fields, dict):
        depth = DepthMap(depth_fields["num_sublayers"], depth_fields["block_sublayers"], 1)
        return TransferPlan.for_sources(layout, depth, str(fields["transport"]))
    streams = fields["num_streams"]
    if not isinstance(streams, int):
        raise TypeError("num_streams is not an integer")
    return TransferPlan.for_streams(layout, streams)
