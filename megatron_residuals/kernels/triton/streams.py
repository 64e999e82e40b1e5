# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The Triton implementation of streams: the names of ``torch_streams``, over custom operators."""

from __future__ import annotations

from torch import Tensor

from megatron_residuals.kernels.coefficients import MhcWeights
from megatron_residuals.kernels.planes import BoundaryValues, Update
from megatron_residuals.kernels.planes_backward import BoundaryGradients, Cotangents, Kept
from megatron_residuals.kernels.sinkhorn import MhcOptions
from megatron_residuals.kernels.triton import operators


def read(streams: Tensor, h_pre: Tensor) -> Tensor:
    """As ``planes.read``."""
    result: Tensor = operators.streams_read(streams, h_pre)
    return result


def read_backward(gradient: Tensor, streams: Tensor, h_pre: Tensor) -> tuple[Tensor, Tensor]:
    """As ``planes_backward.read_backward``."""
    d_streams, d_pre = operators.streams_read_backward(gradient, streams, h_pre)
    return d_streams, d_pre


def write(update: Update) -> Tensor:
    """As ``planes.write``."""
    written: Tensor = operators.streams_write(*update)
    return written


def write_backward(gradient: Tensor, update: Update) -> Update:
    """As ``planes_backward.write_backward``."""
    return Update(*operators.streams_write_backward(gradient, *update))


def update_and_read(
    before: Update | Tensor, weights: MhcWeights, options: MhcOptions
) -> BoundaryValues:
    """As ``planes.update_and_read``."""
    update = before if isinstance(before, Update) else (before, None, None, None)
    written, *others = operators.mhc_boundary(*update, *weights, *options)
    return BoundaryValues(written if isinstance(before, Update) else None, *others)


def update_and_read_backward(
    cotangents: Cotangents,
    kept: Kept,
    weights: MhcWeights,
    options: MhcOptions,
    update: Update | None,
) -> BoundaryGradients:
    """As ``planes_backward.update_and_read_backward``."""
    found = operators.mhc_boundary_backward(
        *cotangents, *kept, *(update or (None,) * 4), *weights, *options
    )
    before = found[0] if update is None else Update(*found[:4])
    return BoundaryGradients(before, *found[4:])
