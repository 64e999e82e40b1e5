# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What flows between sublayers: explicit values, never attributes of a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from megatron_residuals.kernels import GradientBuffer, buffered


class PlainState(NamedTuple):
    """The ordinary residual stream: hidden [..., d]."""

    hidden: Tensor


class StreamState(NamedTuple):
    """n parallel residual streams: streams [..., n, d]."""

    streams: Tensor


class SourceState(NamedTuple):
    """Depth sources, finished ones first: sources m x [..., d], and the running sum [..., d].

    Before the first sublayer there is no finished source and the running sum is the embedding.
    Sources are held by reference, each once, whatever the number of readers. In 16-bit models each
    has a buffer in which its readers sum their gradients in float32.
    """

    sources: tuple[Tensor, ...]
    partial: Tensor
    buffers: tuple[GradientBuffer | None, ...] = ()

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


ResidualState: TypeAlias = PlainState | StreamState | SourceState
