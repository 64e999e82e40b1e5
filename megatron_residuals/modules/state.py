# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What flows between sublayers: explicit values, never attributes of a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from megatron_residuals.functional import ClosedRead, StreamUpdate
from megatron_residuals.kernels import GradientBuffer, buffered, depositing, write_streams
from megatron_residuals.modules.packing import Packed, Unpacked


class PlainState(NamedTuple):
    """The ordinary residual stream: hidden [..., d]."""

    hidden: Tensor

    def settled(self) -> PlainState:
        """Itself."""
        return self

    def pack(self) -> Tensor:
        """The stream."""
        return self.hidden

    @classmethod
    def unpack(cls, payload: Tensor, rows: int) -> PlainState:
        """Inverse of ``pack``."""
        return cls(payload)


class StreamState(NamedTuple):
    """n parallel residual streams: streams [..., n, d].

    With an ``update``, those in front of the last sublayer, whose write is still to be done; the
    next read does it on its way, with ``kernels``. Whoever wants the streams alone settles first.
    ``reads`` [..., n], float32 or wider, are the weights of the next read, where the sublayer in
    front of it has predicted them.
    """

    streams: Tensor
    update: StreamUpdate | None = None
    kernels: str = "auto"
    reads: Tensor | None = None

    def settled(self) -> StreamState:
        """The state with nothing left to be done."""
        if self.update is None:
            return self
        return StreamState(write_streams(self.update, backend=self.kernels), reads=self.reads)

    def pack(self) -> Tensor:
        """The memory of the streams seen as rows; of a copy, with ``reads`` behind them."""
        streams = self.settled().streams
        if self.reads is not None:
            payload: Tensor = Packed.apply(streams, self.reads)
            return payload
        return streams.view(-1, *streams.shape[1:-2], streams.shape[-1])

    @classmethod
    def unpack_with_reads(cls, payload: Tensor, rows: int) -> StreamState:
        """Inverse of ``pack`` where the state has ``reads``."""
        streams, reads = Unpacked.apply(payload, rows, rows)
        return cls(streams, reads=reads)

    @classmethod
    def unpack(cls, payload: Tensor, rows: int) -> StreamState:
        """Inverse of ``pack``."""
        sequence, *between, width = payload.shape
        return cls(payload.view(sequence // rows, *between, rows, width))


class SourceState(NamedTuple):
    """Depth sources, finished ones first: sources m x [..., d], and the running sum [..., d].

    Before the first sublayer there is no finished source and the running sum is the embedding.
    Sources are held by reference, each once, whatever the number of readers. Each has a buffer in
    which its readers sum their gradients in float32 or wider.

    Inside a part of a block whose sublayers read in two phases, and nowhere else, ``reads`` is what
    the finished sources have given to the coming readers, the next first, and ``output`` may be the
    last sublayer's, which the next read adds to the running sum.
    """

    sources: tuple[Tensor, ...]
    partial: Tensor
    buffers: tuple[GradientBuffer | None, ...] = ()
    reads: tuple[ClosedRead, ...] = ()
    output: Tensor | None = None

    @classmethod
    def of(cls, sources: Sequence[Tensor], partial: Tensor) -> SourceState:
        """A state whose sources get new buffers, as at the entry of a stage or a checkpoint."""
        state = cls((), partial)
        for source in sources:
            state = state.closed(source)
        return state

    def closed(self, source: Tensor) -> SourceState:
        """The state with one more finished source."""
        source, buffer = buffered(source)
        return self._replace(sources=(*self.sources, source), buffers=(*self.buffers, buffer))

    def closing(self) -> SourceState:
        """The state whose last finished source is the running sum; the same if it is already."""
        if self.is_closed:
            return self
        state = self.closed(self.partial)
        return state._replace(partial=state.sources[-1])

    @property
    def is_closed(self) -> bool:
        """Whether the running sum is the last of the finished sources, as where a block opens."""
        return len(self.sources) > 0 and self.sources[-1] is self.partial

    @property
    def readable(self) -> tuple[Tensor, ...]:
        """What the next sublayer attends to, the running sum last."""
        if self.is_closed:
            return self.sources
        return *self.sources, self.partial if self.output is None else self.partial + self.output

    @property
    def visible(self) -> tuple[Tensor, ...]:
        """``readable`` for readers whose gradients autograd sums: each goes through its buffer."""
        return self.outgoing if self.is_closed else (*self.outgoing, self.readable[-1])

    @property
    def outgoing(self) -> tuple[Tensor, ...]:
        """The finished sources for readers that know no buffers: a payload, a checkpoint."""
        pairs = zip(self.sources, self.buffers, strict=True)
        return tuple(depositing(source, buffer) for source, buffer in pairs)


class RowState(Protocol):
    """A state that is a fixed number of rows, of a mechanism here or elsewhere."""

    def settled(self) -> RowState:
        """The state with nothing left to be done."""

    def pack(self) -> Tensor:
        """The state [s, b, …] as one tensor [rows * s, b, d], on the wire and in checkpoints.

        With numbers of every token (``Mechanism.numbers``) it is longer by a tail.
        """

    @classmethod
    def unpack(cls, payload: Tensor, rows: int) -> RowState:
        """Inverse of ``pack``."""


ResidualState: TypeAlias = RowState | SourceState
