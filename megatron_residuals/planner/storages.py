# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Every storage that a stage keeps between a forward and its backward, by name.

A name means one storage of one micro-batch on one rank, so that what two stages of a rank share (a
source that one fetched from the other) counts once in a union:

    payload:g       what stage g received: all rows in one storage
    embedding       the embedding's output; streams: its copies
    after:i         what sublayer i left: the hidden state, the streams or the running sum
    x:i  norm:i  stats:i  host:i  y:i      of sublayer i
    numbers:i  vectors:i                   what the mechanism keeps of it, per token and not
    mask:g          the attention mask as stage g got it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_residuals.config import ResidualConfig
from megatron_residuals.depth import DepthMap
from megatron_residuals.mechanisms import Reading
from megatron_residuals.pipeline.layout import ATTENTION
from megatron_residuals.pipeline.plan import TransferPlan
from megatron_residuals.pipeline.segments import (
    HostFull,
    Segment,
    stage_group_length,
    stage_segments,
)
from megatron_residuals.planner.sizes import ModelSizes, host_bytes

HOST, RESIDUAL, OUTSIDE = "attention_and_mlp", "residual", "outside_layers"
PARTS = (HOST, RESIDUAL, OUTSIDE)


class Storage(NamedTuple):
    """One storage: its name on the rank, its bytes, and the part of the model it belongs to."""

    name: str
    bytes: int
    part: str


Sizes = dict[str, int]
"""Bytes by name of storage."""


@dataclass(frozen=True)
class StageStorages:
    """What one stage keeps under the policy ``residual.recompute``.

    ``host_full`` instead takes the host's full recompute with that many layers in a checkpoint;
    ``stock`` means the host's own block, which is what the plain residual stands for then.
    """

    plan: TransferPlan
    residual: ResidualConfig
    sizes: ModelSizes
    stage: int
    host_full: int = 0
    stock: bool = False

    @cached_property
    def kept(self) -> tuple[Storage, ...]:
        """Between the forward and the backward of one micro-batch."""
        storages = (*self._front(), *self._inside(), *self._behind())
        return tuple({each.name: each for each in storages if each.bytes}.values())

    @cached_property
    def moments(self) -> tuple[Sizes, ...]:
        """What is there at the height of each replay of the backward, first layer first.

        A replay refills memory that was given up, or builds the graph of its sublayers anew; that
        of coefficients is built again under every policy. What later layers keep is gone by then.
        """
        alive = _sizes(self._front())
        found = []
        for unit in self._units():
            alive |= _sizes(self._kept_by(unit))
            replays = [alive | replayed for replayed in self._replay(unit)]
            last = unit.sublayers[-1]
            if self._policy == "mix":
                # a write's backward precedes the replay, and nothing else wanted the output
                replays[-1].pop(f"y:{last}", None)
            found += replays
            if self._rebuilt_bytes:
                # attention or MLP and what is behind it have gone before the coefficients' turn
                gone = {f"{name}:{last}" for name in ("y", "host", "norm", "stats", "x")}
                rest = {name: size for name, size in replays[-1].items() if name not in gone}
                found.append(rest | {"coefficient graph": self._rebuilt_bytes})
        return tuple(found)

    def cached(self, *sources: int) -> Sizes:
        """Sources in the rank's cache; their storages are kept as well as by whoever reads them."""
        return _sizes(self._value(self._location(source)) for source in sources)

    @cached_property
    def transient_bytes(self) -> int:
        """What the largest replay holds besides `kept`."""
        kept = {storage.name for storage in self.kept}
        replays = [sum(size for name, size in m.items() if name not in kept) for m in self.moments]
        return max(replays, default=0)

    @cached_property
    def sublayers(self) -> range:
        """Global indices of this stage's sublayers."""
        return self.plan.layout.sublayers(self.stage)

    @cached_property
    def group_length(self) -> int | None:
        """Sublayers of one group under the policy ``group``; None under others."""
        return stage_group_length(self.residual, len(self.sublayers))

    # units of recomputation

    @property
    def _policy(self) -> str:
        return "host full" if self.host_full else self.residual.recompute_policy

    @property
    def _is_checkpoint(self) -> bool:
        return self._policy in ("host full", "block", "block+layer")

    def _units(self) -> Iterator[Segment]:
        """The parts that are replayed one at a time."""
        full = HostFull("uniform", self.host_full) if self.host_full else None
        plan, length = self.plan, self.group_length or 1
        for segment in stage_segments(self.residual, plan.layout, plan.depth, self.stage, full):
            if segment.checkpoint:
                yield segment
                continue
            for start in segment.sublayers[::length]:
                yield Segment(range(start, min(start + length, segment.sublayers.stop)), False)

    def _kept_by(self, unit: Segment) -> Iterator[Storage]:
        if self._is_checkpoint:
            yield from self._state(unit.sublayers.start)
        else:
            for i in unit.sublayers:
                yield from self._sublayer(i)

    def _replay(self, unit: Segment) -> Iterator[Sizes]:
        """What a unit's replay adds; one entry for each part that is replayed by itself."""
        if self._is_checkpoint:
            fronts: Sizes = {}
            for part in unit.inner or (unit.sublayers,):
                fronts |= _sizes(self._everything._state(part.start))
                yield fronts | _sizes(s for i in part for s in self._everything._sublayer(i, part))
            return
        row = self.sizes.row_bytes
        refilled = {f"x:{i}": row for i in unit.sublayers} if self._policy != "none" else {}
        if self._policy == "mix":
            refilled[f"norm:{unit.sublayers.start}"] = row
        elif self._policy == "group":
            inner = unit.sublayers[1:]
            refilled |= _sizes(self._value(self._before(i)) for i in inner)
        yield refilled

    @cached_property
    def _everything(self) -> StageStorages:
        """The same stage when nothing is recomputed, which is what a checkpoint's replay builds."""
        residual = dataclasses.replace(self.residual, recompute="none")
        return dataclasses.replace(self, residual=residual, host_full=0)

    # what is kept

    def _front(self) -> Iterator[Storage]:
        """Kept in front of the layers: by the embedding, and by the host's checkpoints alike."""
        sizes = self.sizes
        if self.stage == 0:
            indices = sizes.region_tokens * 8 * (1 if sizes.rope else 2)
            yield Storage("token indices", indices, OUTSIDE)
        if self.host_full and self.stock and self.sublayers:
            # an argument of the host's checkpoints; ours leave it to who has it
            yield self._mask

    def _inside(self) -> Iterator[Storage]:
        if self._is_checkpoint:
            for unit in self._units():
                yield from self._kept_by(unit)
        else:
            for i in self.sublayers:
                yield from self._sublayer(i)

    def _behind(self) -> Iterator[Storage]:
        """What is kept behind the last layer, and gone before any layer's backward."""
        sizes, residual = self.sizes, self.residual
        if self.plan.closes(self.stage):
            end = self.sublayers.stop
            numbers = residual.entry.head_numbers(residual, self._reading(end))
            if numbers is not None:
                yield from self._state(end)
                yield self._numbers("head", numbers)
        if self.stage == self.plan.layout.num_stages - 1:
            yield Storage("hidden", sizes.row_bytes * sizes.norm_keeps_input, OUTSIDE)
            yield Storage("hidden normed", sizes.row_bytes, OUTSIDE)
            yield Storage("hidden stats", sizes.norm_bytes, OUTSIDE)
            logits = sizes.region_tokens * sizes.vocab_size // sizes.tp
            yield Storage("logits", logits * sizes.logit_bytes, OUTSIDE)
            yield Storage("labels", sizes.region_tokens * 8 if logits else 0, OUTSIDE)

    def _sublayer(self, i: int, within: range | None = None) -> Iterator[Storage]:
        """What is kept by sublayer i, which runs together with those ``within``: its stage's."""
        sizes, residual = self.sizes, self.residual
        kind, reading = self.plan.layout.kind(i), self._reading(i, within)
        if kind == ATTENTION:
            yield self._mask
        yield Storage(f"host:{i}", host_bytes(sizes, kind), HOST)
        if self._policy == "none":
            yield Storage(f"stats:{i}", sizes.norm_bytes, RESIDUAL)
            yield Storage(f"norm:{i}", sizes.row_bytes, RESIDUAL)
            if not residual.entry.is_stock:
                kept = sizes.norm_keeps_input or residual.entry.keeps_input(residual, reading)
                yield Storage(f"x:{i}", sizes.row_bytes * kept, RESIDUAL)
        if self._keeps_state(i):
            yield from self._state(i)
        if residual.entry.keeps_output:
            yield Storage(f"y:{i}", sizes.row_bytes, RESIDUAL)
        vectors = residual.entry.kept_vectors(residual, reading) * sizes.hidden_size
        yield Storage(f"vectors:{i}", vectors * sizes.wide_bytes, RESIDUAL)
        yield self._numbers(f"numbers:{i}", residual.entry.kept_numbers(residual, reading))

    def _keeps_state(self, i: int) -> bool:
        if self._policy == "group" and self.group_length is not None:
            return (i - self.sublayers.start) % self.group_length == 0
        return not self.residual.entry.is_stock or self.sizes.norm_keeps_input

    def _reading(self, i: int, within: range | None = None) -> Reading:
        return Reading(i, within or self.sublayers, self.plan.depth)

    def _numbers(self, name: str, count: int) -> Storage:
        """So many numbers per token."""
        return Storage(name, count * self.sizes.tokens * self.sizes.wide_bytes, RESIDUAL)

    @property
    def _rebuilt_bytes(self) -> int:
        """The graph of one sublayer's coefficients, where backward builds it again."""
        sizes, residual = self.sizes, self.residual
        copies = sizes.element_bytes < sizes.wide_bytes
        numbers = residual.entry.rebuilt_numbers(residual, sizes.hidden_size, copies=copies)
        return numbers * sizes.tokens * sizes.wide_bytes

    @property
    def _mask(self) -> Storage:
        """[s, s] bool; only the host's local attention has one."""
        local = self.sizes.host_layer_bytes is None and not self.sizes.fused
        mask = self.sizes.seq_length // self.sizes.cp * self.sizes.seq_length
        return Storage(f"mask:{self.stage}", mask if local else 0, OUTSIDE)

    # where values are

    @property
    def _depth(self) -> DepthMap:
        assert self.plan.depth is not None, "only for depth sources"
        return self.plan.depth

    def _state(self, i: int) -> Iterator[Storage]:
        """The state in front of sublayer i: finished sources, then what `_before` names."""
        if self.plan.depth is not None:
            yield from self._sources[: self._depth.num_sources(i)]
        yield self._value(self._before(i))

    @cached_property
    def _sources(self) -> list[Storage]:
        """Every source that is finished by the end of this stage, by its id."""
        names = []
        for source in range(self._depth.num_sources(self.sublayers.stop)):
            last = self._last_sublayer(source)
            here = last >= self.sublayers.start
            names.append(f"after:{last}" if here else self._location(source))
        return [self._value(name) for name in names]

    def _before(self, i: int) -> str:
        if i > self.sublayers.start:
            return f"after:{i - 1}"
        if self.residual.entry.copies_embedding and i == 0:
            return "streams"
        return f"payload:{self.stage}" if self.stage else "embedding"

    def _location(self, source: int) -> str:
        """The storage in which this rank has a source from another stage, or for one."""
        boundary = self.plan.boundary_into(self.stage)
        arrives = boundary is not None and source in boundary.arrivals
        owner, by_wire = self._owners.get(source, (self.stage, arrives))
        last = self._last_sublayer(source)
        if by_wire:
            return f"payload:{owner}"
        return f"after:{last}" if last >= 0 else "embedding"

    def _last_sublayer(self, source: int) -> int:
        """The sublayer that finishes a source; -1 for the embedding."""
        block = self._depth.block_range(source)
        return block[-1] if block else -1

    @cached_property
    def _owners(self) -> dict[int, tuple[int, bool]]:
        """By source that stages of this rank share: the stage that has it first, and if by wire."""
        rank = self.plan.layout.rank(self.stage)
        lives = (life for life in self.plan.lives if life.rank == rank)
        return {life.source: (life.owner, life.by_wire) for life in lives}

    def _value(self, name: str) -> Storage:
        rows = 1
        if name.startswith("payload:"):
            rows = self.plan.rows_in(int(name.removeprefix("payload:")))
        elif name != "embedding":
            rows = self.residual.rows
        return Storage(name, rows * self.sizes.row_bytes, RESIDUAL)


def _sizes(storages: Iterator[Storage]) -> Sizes:
    return {storage.name: storage.bytes for storage in storages}
