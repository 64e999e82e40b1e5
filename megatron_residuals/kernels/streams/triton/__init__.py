# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The backend in Triton: the functions of the contract, over custom operators.

Imported only when it is chosen.
"""

from __future__ import annotations

from torch import Tensor

from megatron_residuals.functional.streams import MhcOptions, MhcWeights, StreamRead, StreamUpdate
from megatron_residuals.kernels.streams.contract import Kept
from megatron_residuals.kernels.streams.triton import operators
from megatron_residuals.kernels.streams.triton.operators import present


def read_streams(streams: Tensor, h_pre: Tensor) -> Tensor:
    """As the contract says."""
    x: Tensor = operators.read_streams(streams, h_pre)
    return x


def read_streams_backward(
    gradient: Tensor, streams: Tensor, h_pre: Tensor
) -> tuple[Tensor, Tensor]:
    """As the contract says."""
    d_streams, d_pre = operators.read_streams_backward(gradient, streams, h_pre)
    return d_streams, d_pre


def write_streams(update: StreamUpdate) -> Tensor:
    """As the contract says."""
    written: Tensor = operators.write_streams(present(update))
    return written


def write_streams_backward(gradient: Tensor, update: StreamUpdate) -> StreamUpdate:
    """As the contract says."""
    return StreamUpdate(*operators.write_streams_backward(gradient, present(update)))


def update_and_read(
    before: StreamUpdate | Tensor,
    weights: MhcWeights,
    options: MhcOptions,
    reads: Tensor | None,
) -> tuple[StreamRead, Tensor]:
    """As the contract says."""
    tensors = present(before) if isinstance(before, StreamUpdate) else [before]
    *found, mixes = operators.update_and_read(tensors, list(weights), reads, *options)
    streams = [] if isinstance(before, StreamUpdate) else [before]
    return StreamRead(*streams, *found), mixes


def update_and_read_backward(
    gradients: StreamRead,
    kept: Kept,
    update: StreamUpdate | None,
    weights: MhcWeights,
    options: MhcOptions,
    *,
    reads: bool,
) -> tuple[StreamUpdate | Tensor, MhcWeights, Tensor]:
    """As the contract says."""
    *before, mapping, bias, alpha, d_read = operators.update_and_read_backward(
        present(gradients), list(kept), present(update or ()), list(weights), reads, *options
    )
    d_before = before[0] if update is None else StreamUpdate(*before)
    return d_before, MhcWeights(mapping, bias, alpha), d_read
