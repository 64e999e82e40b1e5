# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a backend of streams is: a module with these functions, on rows of tokens, no autograd.

For a function of ``functional.streams`` it has one of the same name, and one for its gradients. All
tensors are contiguous, one row for each token: streams [T, n, d], x and outputs [T, d], h_pre and
h_post [T, n], h_res [T, n, n], or None for the identity; coefficients and weights are float32 or
wider. K is the number of coefficients of a token.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_residuals.functional.streams import MhcOptions, MhcWeights, StreamRead, StreamUpdate


class Kept(NamedTuple):
    """What ``update_and_read`` leaves for its backward.

    Attributes:
        streams: those that were read, updated or not.
        h_pre: the coefficients of the read; those given, where they were.
        mixes: K + 1 numbers per token, from which all coefficients can be computed again.
    """

    streams: Tensor
    h_pre: Tensor
    mixes: Tensor


class StreamBackend(Protocol):
    """The functions of a backend."""

    def read_streams(self, streams: Tensor, h_pre: Tensor) -> Tensor:
        """x."""

    def read_streams_backward(
        self, gradient: Tensor, streams: Tensor, h_pre: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the streams and of h_pre from that of x."""

    def write_streams(self, update: StreamUpdate) -> Tensor:
        """The streams behind the write."""

    def write_streams_backward(self, gradient: Tensor, update: StreamUpdate) -> StreamUpdate:
        """Gradients of all that a write takes, from that of the streams behind it."""

    def update_and_read(
        self,
        before: StreamUpdate | Tensor,
        weights: MhcWeights,
        options: MhcOptions,
        reads: Tensor | None,
    ) -> tuple[StreamRead, Tensor]:
        """What the reference gives (of streams alone, these streams), and the ``mixes`` to keep."""

    def update_and_read_backward(
        self,
        gradients: StreamRead,
        kept: Kept,
        update: StreamUpdate | None,
        weights: MhcWeights,
        options: MhcOptions,
        *,
        reads: bool,
    ) -> tuple[StreamUpdate | Tensor, MhcWeights, Tensor]:
        """Gradients of the arguments, and that of the coefficients of the read.

        The gradient of h_pre is looked at only where ``reads`` were given: otherwise it is that of
        the read, and h_pre is not differentiable.
        """
