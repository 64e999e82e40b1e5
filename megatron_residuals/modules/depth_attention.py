# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Attention Residuals: Block AttnRes, and Full AttnRes as blocks of one sublayer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_residuals.kernels import read_sources
from megatron_residuals.modules.base import Float32Module, ResidualHead, SublayerResidual
from megatron_residuals.modules.state import SourceState


class DepthQuery(Float32Module):
    """A learned query and key gain over the sources of one reader: query, key_gain [d], float32.

    A zero query weighs all sources equally, which makes the whole model equal to its plain
    counterpart up to the eps of the norms (Attention Residuals, section 3). Both parameters are
    1-D: no weight decay and no Muon by the host's own rules.
    """

    def __init__(self, hidden_size: int, *, eps: float, device: torch.device | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.query = nn.Parameter(torch.empty(hidden_size, device=device))
        self.key_gain = nn.Parameter(torch.empty(hidden_size, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zero query, unit gain."""
        nn.init.zeros_(self.query)
        nn.init.ones_(self.key_gain)

    def attend(self, state: SourceState) -> Tensor:
        """Weighted sum of the finished sources and the running one -> [..., d]."""
        sources = (*state.sources, state.partial)
        return read_sources(sources, self.query, self.key_gain, eps=self.eps, buffers=state.buffers)


class DepthAttention(DepthQuery, SublayerResidual[SourceState, SourceState]):
    """Reads by attention over depth; writes into the running sum of its block.

    The first sublayer of a block (``opens_block``) still reads the finished sum of the previous
    block as the running source; only then is that sum closed and a fresh one started. The first
    sublayer of all has one source, the embedding, whose weight is exactly one; its query gets an
    exact zero gradient, so that every parameter takes part in every step.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        opens_block: bool,
        eps: float,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(hidden_size, eps=eps, device=device)
        self.opens_block = opens_block

    def read(self, state: SourceState) -> tuple[Tensor, SourceState]:
        """Attention over every finished source and the running one."""
        return self.attend(state), state

    def reread(self, pending: SourceState) -> Tensor:
        """The same attention again."""
        return self.attend(pending)

    def write(self, pending: SourceState, output: Tensor) -> SourceState:
        """Close the running sum and start the next with the output, or add the output to it."""
        if self.opens_block:
            return pending.closed(pending.partial)._replace(partial=output)
        return pending._replace(partial=pending.partial + output)


class DepthHead(DepthQuery, ResidualHead[SourceState]):
    """The final read, with a query of its own."""

    def close(self, state: SourceState) -> Tensor:
        """Attention over all blocks, the last possibly short."""
        return self.attend(state)
