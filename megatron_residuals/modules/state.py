# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What flows between sublayers: explicit values, never attributes of a module."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from torch import Tensor


class PlainState(NamedTuple):
    """The ordinary residual stream: hidden [..., d]."""

    hidden: Tensor


class StreamState(NamedTuple):
    """n parallel residual streams: streams [..., n, d]."""

    streams: Tensor


class SourceState(NamedTuple):
    """Depth sources, finished ones first: sources m x [..., d], and the running sum [..., d].

    Before the first sublayer there is no finished source and the running sum is the embedding.
    Sources are held by reference, each once, whatever the number of readers.
    """

    sources: tuple[Tensor, ...]
    partial: Tensor


ResidualState: TypeAlias = PlainState | StreamState | SourceState
