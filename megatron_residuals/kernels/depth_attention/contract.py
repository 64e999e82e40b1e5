# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a backend of depth attention is: a module with these functions, on rows, no autograd.

For a function of ``functional.depth_attention`` it has one of the same name, and one for its
gradients. Tensors are contiguous, one row for each token: sources, values and gradients [T, d];
numbers per token [T]. A direction is query o key_gain [d], those of S readers are [S, d];
directions and numbers are float32, or of the dtype of the sources where that is wider. How scores
lie in memory is the backend's own affair.

Whatever is computed for a reader is computed by operations on its numbers alone, in one order and
one shape: the result does not depend, to the last bit, on which other readers share the pass.
Gradients of sources are added reader by reader, the last first, to sums that already hold those of
later readers; so a sum does not depend on it either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_residuals.functional.depth_attention import ClosedRead, SourceScores

OptionalTensors = Sequence[Tensor | None]


class Merged(NamedTuple):
    """What ``merge_running`` gives: x and the running sum [T, d], and numbers for its backward.

    Attributes:
        dots, rstd: the scores of the running sum [T].
        weight: that of the running sum in x [T].
    """

    x: Tensor
    partial: Tensor
    dots: Tensor
    rstd: Tensor
    weight: Tensor


class DepthBackend(Protocol):
    """The functions of a backend."""

    def read_sources(
        self, sources: Sequence[Tensor], direction: Tensor, eps: float
    ) -> tuple[Tensor, SourceScores]:
        """x of one reader."""

    def read_sources_backward(
        self,
        gradient: Tensor,
        sources: Sequence[Tensor],
        direction: Tensor,
        scores: SourceScores,
        sums: OptionalTensors,
        fresh: OptionalTensors,
    ) -> Tensor:
        """The gradient of the direction from that of x.

        By source, its gradient is added to ``sums`` (float32 or wider), or written to ``fresh`` (of
        the source's dtype), or neither.
        """

    def read_closed(
        self, sources: Sequence[Tensor], directions: Tensor, eps: float
    ) -> tuple[list[Tensor], Tensor, SourceScores]:
        """Phase 1: the values of every reader and their lse [S, T]."""

    def read_closed_backward(
        self,
        gradients: OptionalTensors,
        d_lses: OptionalTensors,
        sources: Sequence[Tensor],
        directions: Tensor,
        scores: SourceScores,
        sums: OptionalTensors,
    ) -> Tensor:
        """The gradients of the directions from those of values [T, d] and lse [T], where given.

        With g the gradient of a reader's values, h that of its lse, u_j = <g, V_j>:

            dlogit_j = a_j (u_j - sum_i a_i u_i + h)
            dV_j    += a_j g + dlogit_j (rstd_j direction - dot_j rstd_j^3 V_j / d)
            d direction = sum_j dlogit_j rstd_j V_j

        dV_j is added to the sum of a source, float32 or wider, that has one.
        """

    def merge_running(
        self, read: ClosedRead, partial: Tensor, output: Tensor | None, eps: float
    ) -> Merged:
        """Phase 2: the running sum, an output added to it, merged with a reader's values."""

    def merge_running_backward(
        self, gradient: Tensor, d_partial: Tensor | None, direction: Tensor, merged: Merged
    ) -> tuple[ClosedRead, Tensor]:
        """Gradients of the read, and of the running sum, which is that of an output too.

        With p the weight of the running sum P, its logit has the gradient p (<g, P> - <g, x>), as x
        is the weighted mean: the values themselves are not needed, nor is anything divided by a
        weight.
        """
