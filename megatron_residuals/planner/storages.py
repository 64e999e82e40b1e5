# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Every storage that a stage keeps between a forward and its backward, by name.

A name means one storage of one micro-batch on one rank, so that what two stages of a rank share (a
source that one fetched from the other) counts once in a union:

    payload:g       what stage g received: all rows in one storage
    embedding       the embedding's output
    after:i         what sublayer i left: the hidden state, the streams or the running sum
    x:i  norm:i  y:i  coefficients:i  scores:i  stats:i    of sublayer i
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_residuals.config import ResidualConfig
from megatron_residuals.depth import DepthMap
from megatron_residuals.pipeline.plan import TransferPlan
from megatron_residuals.planner.sizes import ModelSizes, host_layer_bytes
from megatron_residuals.recompute.segments import block_segments, group_length

HOST, RESIDUAL, OUTSIDE = "attention_and_mlp", "residual", "outside_layers"
PARTS = (HOST, RESIDUAL, OUTSIDE)


class Storage(NamedTuple):
    """One storage: its name on the rank, its bytes, and the part of the model it belongs to."""

    name: str
    bytes: int
    part: str


@dataclass(frozen=True)
class StageStorages:
    """What one stage keeps under the policy ``residual.recompute``.

    ``stock_full`` instead takes the host's full/uniform/1 recompute, for the plain residual.
    """

    plan: TransferPlan
    residual: ResidualConfig
    sizes: ModelSizes
    stage: int
    stock_full: bool = False

    def kept(self) -> list[Storage]:
        """Between the forward and the backward of one micro-batch."""
        found = {storage.name: storage for storage in self._kept() if storage.bytes}
        return list(found.values())

    def _kept(self) -> Iterator[Storage]:
        yield from self._outside()
        for source in self.plan.stash_on_entry(self.stage):
            yield self._value(self._location(source))
        for source in self.plan.stash_on_exit(self.stage):
            yield self._value(self._location(source))
        if not self.sublayers:
            return
        if self.stock_full:
            for i in self.sublayers[::2]:
                yield self._value(self._before(i))
            return
        if self.policy in ("block", "block+layer"):
            yield from self._blocks()
        else:
            for i in self.sublayers:
                yield from self._sublayer(i)
        if self._closes:
            yield from self._head()

    def replays(self) -> list[int]:
        """Bytes that each replay of this stage's backward keeps besides `kept`, first layer first.

        A replay refills memory that was given up, or builds the graph of its sublayers anew.
        """
        kept = {storage.name for storage in self.kept()}
        everything = dataclasses.replace(
            self, residual=dataclasses.replace(self.residual, recompute="none")
        )
        sizes = []
        for parts in self._replayed():
            # nested: the states in front of all parts, and the graph of the largest
            fronts = {everything._before(part.start) for part in parts[1:]}
            graphs = []
            for part in parts:
                found = {s.name: s.bytes for i in part for s in everything._sublayer(i)}
                found |= {name: everything._value(name).bytes for name in fronts}
                graphs.append(sum(size for name, size in found.items() if name not in kept))
            sizes.append(max(graphs))
        return sizes

    def _replayed(self) -> Iterator[tuple[range, ...]]:
        sublayers, policy = self.sublayers, self.policy
        if self.stock_full:
            yield from ((range(i, i + 2),) for i in sublayers[::2])
        elif policy == "mix":
            yield from ((range(i, i + 1),) for i in sublayers)
        elif policy == "group":
            for start in sublayers[:: self.group_length]:
                yield (range(start, min(start + self.group_length, sublayers.stop)),)
        elif policy in ("block", "block+layer"):
            assert self.depth is not None, "the policy is for depth sources"
            by_layer = policy == "block+layer"
            for segment in block_segments(self.depth, sublayers, by_layer=by_layer):
                yield segment.inner or (segment.sublayers,)

    # where values are

    @property
    def policy(self) -> str:
        return self.residual.recompute_policy

    @property
    def depth(self) -> DepthMap | None:
        return self.plan.depth

    @cached_property
    def sublayers(self) -> range:
        """Global indices of this stage's sublayers."""
        first = 2 * self.plan.layout.first_layer(self.stage)
        return range(first, first + 2 * self.plan.layout.layers[self.stage])

    @property
    def _closes(self) -> bool:
        return bool(self.sublayers) and self.sublayers.stop == 2 * self.plan.layout.num_layers

    @property
    def _entry(self) -> str:
        return f"payload:{self.stage}" if self.stage else "embedding"

    def _before(self, i: int) -> str:
        """The state that sublayer i finds: of sources, the running sum."""
        if i > self.sublayers.start:
            return f"after:{i - 1}"
        opened_here = self.residual.is_streams and i == 0
        return "streams" if opened_here else self._entry

    def _location(self, source: int) -> str:
        """The storage in which this rank has a source that its stages share."""
        rank = self.plan.layout.rank(self.stage)
        for life in self.plan.lives:
            if (life.rank, life.source) == (rank, source):
                return self._at(source, life.owner, life.by_wire)
        boundary = self.plan.boundary_into(self.stage)
        by_wire = boundary is not None and source in boundary.arrivals
        return self._at(source, self.stage, by_wire)

    def _at(self, source: int, stage: int, by_wire: bool) -> str:
        if by_wire:
            return f"payload:{stage}"
        assert self.depth is not None, "only depth sources are shared"
        block = self.depth.block_range(source)
        return f"after:{block[-1]}" if block else "embedding"

    def _value(self, name: str) -> Storage:
        rows = 1
        if name.startswith("payload:"):
            rows = self.plan.rows_in(int(name.partition(":")[2]))
        elif self.residual.is_streams and name != "embedding":
            rows = self.residual.streams
        return Storage(name, rows * self.sizes.row_bytes, RESIDUAL)

    # what is kept

    def _sublayer(self, i: int) -> Iterator[Storage]:
        sizes, policy = self.sizes, self.policy
        host = host_layer_bytes(sizes)
        yield Storage(f"host:{i}", host.mlp if i % 2 else host.attention, HOST)
        if policy == "none":
            yield Storage(f"stats:{i}", self._norm_stats_bytes, RESIDUAL)
            yield Storage(f"norm:{i}", sizes.row_bytes, RESIDUAL)
            if self.residual.mechanism != "residual":
                yield Storage(f"x:{i}", sizes.row_bytes, RESIDUAL)
        if self.residual.is_streams:
            if self._keeps_streams(i):
                yield self._value(self._before(i))
            yield Storage(f"y:{i}", sizes.row_bytes, RESIDUAL)
            yield Storage(f"coefficients:{i}", self._coefficient_bytes, RESIDUAL)
        elif self.depth is not None:
            yield from self._read(i)
        else:
            yield self._value(self._before(i))

    def _keeps_streams(self, i: int) -> bool:
        if self.policy != "group":
            return True
        return (i - self.sublayers.start) % self.group_length == 0

    @cached_property
    def group_length(self) -> int:
        """Sublayers of one group under the policy ``group``."""
        return self.residual.group_length or group_length(
            self.residual.streams, len(self.sublayers)
        )

    def _blocks(self) -> Iterator[Storage]:
        """The state in front of every checkpoint."""
        assert self.depth is not None, "the policy is for depth sources"
        for segment in block_segments(self.depth, self.sublayers, by_layer=False):
            yield from self._sources(segment.sublayers.start)

    def _head(self) -> Iterator[Storage]:
        if self.depth is not None:
            yield from self._read(self.depth.num_sublayers)
        elif self.residual.is_streams and self.residual.resolved_contraction == "learned":
            yield self._value(f"after:{self.sublayers[-1]}")
            weights = self.residual.streams * self.sizes.tokens * self.sizes.wide_bytes
            yield Storage("contraction weights", weights, RESIDUAL)

    def _read(self, i: int) -> Iterator[Storage]:
        """A read: the sources by reference, two numbers per token for each."""
        assert self.depth is not None, "only depth sources are read so"
        yield from self._sources(i)
        scores = 2 * self.depth.num_read(i) * self.sizes.tokens * self.sizes.wide_bytes
        yield Storage(f"scores:{i}", scores, RESIDUAL)

    def _sources(self, i: int) -> Iterator[Storage]:
        assert self.depth is not None, "only depth sources are read so"
        for source in range(self.depth.num_sources(i)):
            block = self.depth.block_range(source)
            # finished in this stage, or there on entry
            here = (block[-1] if block else -1) >= self.sublayers.start
            yield self._value(f"after:{block[-1]}" if here else self._location(source))
        yield self._value(f"after:{i - 1}" if i > self.sublayers.start else self._entry)

    @property
    def _coefficient_bytes(self) -> int:
        """mHC: the logits; both: the gates and the mixing matrix. Static HC expands parameters."""
        n = self.residual.streams
        if self.residual.mechanism == "hc" and not self.residual.hc_dynamic:
            return 0
        copies = 2 if self.residual.mechanism == "mhc" else 1
        return copies * (2 * n + n * n) * self.sizes.tokens * self.sizes.wide_bytes

    @property
    def _norm_stats_bytes(self) -> int:
        """Mean and inverse deviation of a LayerNorm; an RMSNorm has one of the two."""
        return 2 * self.sizes.tokens * self.sizes.wide_bytes

    def _outside(self) -> Iterator[Storage]:
        """What is kept in front of the first layer and behind the last one, under every policy."""
        sizes = self.sizes
        if self.stage == 0:
            indices = sizes.region_tokens * 8 * (1 if sizes.rope else 2)
            yield Storage("token indices", indices, OUTSIDE)
        sequence = sizes.seq_length // sizes.cp
        # The checkpoints of blocks leave the mask to whoever has it; the host's keep the angles too.
        if self.sublayers and self.policy not in ("block", "block+layer"):
            mask = 0 if sizes.host_layer_bytes else sequence * sizes.seq_length
            yield Storage(f"mask:{self.stage}", mask, OUTSIDE)
        if self.sublayers and self.stock_full and sizes.rope:
            angles = sequence * sizes.hidden_size // sizes.num_heads * sizes.wide_bytes
            yield Storage("angles", angles, OUTSIDE)
        yield from self.behind()

    def behind(self) -> Iterator[Storage]:
        """What is kept behind the last layer, and gone before any layer's backward."""
        sizes = self.sizes
        if self.stage < self.plan.layout.num_stages - 1:
            return
        yield Storage("hidden", sizes.row_bytes, OUTSIDE)
        yield Storage("hidden normed", sizes.row_bytes, OUTSIDE)
        yield Storage("hidden stats", self._norm_stats_bytes, OUTSIDE)
        logits = sizes.vocab_size // sizes.tp
        yield Storage("logits", sizes.region_tokens * logits * sizes.logit_bytes, OUTSIDE)
        yield Storage("labels", sizes.region_tokens * 8 if logits else 0, OUTSIDE)
