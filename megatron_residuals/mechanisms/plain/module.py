# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The plain residual connection as a mechanism: the baseline, bitwise equal to the host's own."""

from __future__ import annotations

from torch import Tensor

from megatron_residuals.modules.base import ResidualHead, SublayerResidual
from megatron_residuals.modules.state import PlainState


class PlainResidual(SublayerResidual[PlainState, PlainState]):
    """x = h,  h' = h + y."""

    def forward(self, state: PlainState) -> tuple[Tensor, PlainState]:
        """``read``: the stream itself."""
        return state.hidden, state

    def reread(self, pending: PlainState) -> Tensor:
        """The stream itself."""
        return pending.hidden

    def write(self, pending: PlainState, output: Tensor) -> PlainState:
        """The stream plus the sublayer's output."""
        return PlainState(pending.hidden + output)


class PlainHead(ResidualHead[PlainState]):
    """The stream is the hidden state."""

    def close(self, state: PlainState) -> Tensor:
        """The stream."""
        return state.hidden
