# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Modules over depth sources: Block AttnRes, and Full AttnRes as blocks of one sublayer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_residuals.kernels import merge_running, read_by_heads, read_closed, read_sources
from megatron_residuals.modules.base import (
    Float32Module,
    ResidualHead,
    SublayerResidual,
    new_parameter,
)
from megatron_residuals.modules.state import SourceState


class DepthQuery(Float32Module):
    """A learned query and key gain over the sources of one reader: query, key_gain [d], float32.

    A zero query weighs all sources equally, which makes the whole model equal to its plain
    counterpart up to the eps of the norms (Attention Residuals, section 3). Both parameters are
    1-D: no weight decay and no Muon by the host's own rules. ``kernels`` chooses what computes.

    With several ``heads`` the query is cut, and each slice of d has weights of its own; with
    ``additive`` what is read is added to the sum of all sources. Both are computed in PyTorch.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float,
        heads: int = 1,
        additive: bool = False,
        kernels: str = "auto",
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if hidden_size % heads:
            raise ValueError(
                f"attnres_heads is {heads}, which does not divide the hidden size {hidden_size}; "
                "give a number of heads that does"
            )
        self.eps, self.kernels = eps, kernels
        self.heads, self.additive = heads, additive
        self.query = new_parameter(hidden_size, device=device)
        self.key_gain = new_parameter(hidden_size, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zero query, unit gain."""
        nn.init.zeros_(self.query)
        nn.init.ones_(self.key_gain)

    def attend(self, state: SourceState, query: Tensor, key_gain: Tensor) -> Tensor:
        """Weighted sum of the finished sources and the running one -> [..., d]."""
        sources = (*state.sources, state.partial)
        if self.heads > 1 or self.additive:
            return read_by_heads(
                sources,
                query,
                key_gain,
                eps=self.eps,
                heads=self.heads,
                additive=self.additive,
                buffers=state.buffers,
            )
        return read_sources(
            sources,
            query,
            key_gain,
            eps=self.eps,
            buffers=state.buffers,
            backend=self.kernels,
        )


class SourceResidual(SublayerResidual[SourceState, SourceState]):
    """Writes into the running sum of a block; how it reads is left to ``attend``.

    The first sublayer of a block (``opens_block``) still reads the finished sum of the previous
    block as the running source; only then is that sum closed and a fresh one started.
    """

    opens_block: bool = False

    def attend(self, sources: tuple[Tensor, ...]) -> Tensor:
        """x [..., d] from the finished sources [..., d] each, the running sum last."""
        raise NotImplementedError(
            f"{type(self).__name__} has no attend(sources), which returns the sublayer's input"
        )

    def forward(self, state: SourceState) -> tuple[Tensor, SourceState]:
        """``read``: the finished sources as readers see them that sum gradients by autograd."""
        return self.attend(state.visible), state

    def reread(self, pending: SourceState) -> Tensor:
        """The same read again."""
        return self.read(pending)[0]

    def write(self, pending: SourceState, output: Tensor) -> SourceState:
        """Close the running sum and start the next with the output, or add the output to it."""
        if self.opens_block:
            return pending.closing()._replace(partial=output)
        return pending._replace(partial=pending.partial + output)


class DepthAttention(DepthQuery, SublayerResidual[SourceState, SourceState]):
    """Reads by attention over depth; writes as `SourceResidual` does.

    The first sublayer of all has one source, the embedding, whose weight is exactly one; its query
    gets an exact zero gradient, so that every parameter takes part in every step.

    With ``two_phase`` a pass over the finished sources serves all readers of a part of a block
    (`begin`), and what is left to each is to merge with the running sum.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        opens_block: bool,
        two_phase: bool = False,
        eps: float,
        heads: int = 1,
        additive: bool = False,
        kernels: str = "auto",
        device: torch.device | None = None,
    ) -> None:
        super().__init__(
            hidden_size, eps=eps, heads=heads, additive=additive, kernels=kernels, device=device
        )
        self.opens_block, self.two_phase = opens_block, two_phase

    def forward(self) -> tuple[Tensor, Tensor]:
        """The query and the key gain [d].

        Some reads ask for them ahead of the sublayer's turn; asked for by a call, the hooks of
        wrappers that gather parameters fire in time.
        """
        return self.query, self.key_gain

    def begin(
        self, readers: Sequence[SublayerResidual[Any, Any]], state: SourceState
    ) -> SourceState:
        """Phase 1 for all of them, where reads are in two phases."""
        return open_reads(state, readers) if self.two_phase else state

    def read(self, state: SourceState) -> tuple[Tensor, SourceState]:
        """Attention over every finished source and the running one; phase 2 where 1 has been."""
        if not state.reads:
            return self.attend(state, *self()), state
        if self.opens_block:
            return state.reads[0].values, state
        x, partial = merge_running(
            state.reads[0], state.partial, state.output, eps=self.eps, backend=self.kernels
        )
        return x, state._replace(partial=partial, output=None)

    def rereader(self, pending: SourceState) -> Callable[[], Tensor]:
        """``reread`` that holds no more than sources and the running sum."""
        two_phase = len(pending.reads) > 0
        return functools.partial(self._reread, pending._replace(reads=()), two_phase)

    def reread(self, pending: SourceState) -> Tensor:
        """The same attention again."""
        return self.rereader(pending)()

    def _reread(self, state: SourceState, two_phase: bool) -> Tensor:
        return self.read(open_reads(state, [self]) if two_phase else state)[0]

    def write(self, pending: SourceState, output: Tensor) -> SourceState:
        """Close the running sum and start the next with the output, or add the output to it.

        In front of a read in two phases the addition is left to that read.
        """
        reads = pending.reads[1:]
        if self.opens_block:
            return pending.closing()._replace(partial=output, reads=reads)
        if reads:
            return pending._replace(output=output, reads=reads)
        return pending._replace(partial=pending.partial + output, reads=())


def open_reads(state: SourceState, readers: Sequence[SublayerResidual[Any, Any]]) -> SourceState:
    """Phase 1 of consecutive sublayers of one block: the state with what each will find.

    One pass over the finished sources for all readers; the first reader's block is opened if it
    opens one, which finishes one source more.
    """
    first = readers[0]
    assert isinstance(first, DepthAttention), "of one mechanism"
    if first.opens_block:
        state = state.closing()
    asked = [reader() for reader in readers]
    reads = read_closed(
        state.sources,
        torch.stack([query * key_gain for query, key_gain in asked]),
        eps=first.eps,
        buffers=state.buffers,
        backend=first.kernels,
    )
    return state._replace(reads=reads)


class DepthHead(DepthQuery, ResidualHead[SourceState]):
    """The final read, with a query of its own."""

    def close(self, state: SourceState) -> Tensor:
        """Attention over all blocks, the last possibly short."""
        return self.attend(state, self.query, self.key_gain)
