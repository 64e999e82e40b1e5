# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Custom operators, opaque to compilers and graph capture, around the launches.

Shapes are those of ``planes``. An operator's results are never views of its arguments; one that
has nothing to return in a place returns an empty tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_residuals.kernels.coefficients import MhcWeights
from megatron_residuals.kernels.planes import Update
from megatron_residuals.kernels.planes_backward import Cotangents, Kept
from megatron_residuals.kernels.sinkhorn import MhcOptions
from megatron_residuals.kernels.triton import launches, projected
from megatron_residuals.kernels.triton.projected import mixes_shape


@torch.library.custom_op("megatron_residuals::streams_read", mutates_args=())
def streams_read(streams: Tensor, h_pre: Tensor) -> Tensor:
    """[T, n, d], [T, n] -> [T, d]"""
    return launches.read(streams, h_pre)


@streams_read.register_fake
def _(streams: Tensor, h_pre: Tensor) -> Tensor:
    return streams.new_empty(streams.shape[0], streams.shape[2])


@torch.library.custom_op("megatron_residuals::streams_read_backward", mutates_args=())
def streams_read_backward(
    gradient: Tensor, streams: Tensor, h_pre: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of streams and h_pre."""
    d_pre = launches.products(gradient, streams, h_pre.dtype)
    read = launches.ReadBackward(gradient, h_pre)
    return launches.planes_backward(None, read, None, streams).d_streams, d_pre


@streams_read_backward.register_fake
def _(gradient: Tensor, streams: Tensor, h_pre: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(streams), torch.empty_like(h_pre)


@torch.library.custom_op("megatron_residuals::streams_write", mutates_args=())
def streams_write(streams: Tensor, output: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """[T, n, d], [T, d], [T, n], [T, n, n] -> [T, n, d]"""
    return launches.write(Update(streams, output, h_post, h_res))


@streams_write.register_fake
def _(streams: Tensor, output: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return torch.empty_like(streams)


@torch.library.custom_op("megatron_residuals::streams_write_backward", mutates_args=())
def streams_write_backward(
    gradient: Tensor, streams: Tensor, output: Tensor, h_post: Tensor, h_res: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of streams, output, h_post and h_res."""
    update = Update(streams, output, h_post, h_res)
    found = launches.planes_backward(gradient, None, update, streams)
    return found.d_streams, *found.update


@streams_write_backward.register_fake
def _(
    gradient: Tensor, streams: Tensor, output: Tensor, h_post: Tensor, h_res: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    post, res = torch.empty_like(h_post), torch.empty_like(h_res)
    return torch.empty_like(streams), torch.empty_like(output), post, res


@torch.library.custom_op("megatron_residuals::mhc_boundary", mutates_args=())
def mhc_boundary(
    streams: Tensor,
    output: Tensor | None,
    h_post: Tensor | None,
    h_res: Tensor | None,
    mapping: Tensor,
    bias: Tensor,
    alpha: Tensor,
    convention: str,
    iterations: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Streams written (empty without an output), read, h_pre, h_post, h_res, mixes."""
    before: Update | Tensor = streams
    if output is not None and h_post is not None and h_res is not None:
        before = Update(streams, output, h_post, h_res)
    weights, options = MhcWeights(mapping, bias, alpha), MhcOptions(convention, iterations, eps)
    return projected.forward(before, weights, options)


@mhc_boundary.register_fake
def _(
    streams: Tensor,
    output: Tensor | None,
    h_post: Tensor | None,
    h_res: Tensor | None,
    mapping: Tensor,
    bias: Tensor,
    alpha: Tensor,
    convention: str,
    iterations: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, n, d = streams.shape
    return (
        streams.new_empty(0) if output is None else torch.empty_like(streams),
        streams.new_empty(tokens, d),
        mapping.new_empty(tokens, n),
        mapping.new_empty(tokens, n),
        mapping.new_empty(tokens, n, n),
        mapping.new_empty(*mixes_shape(tokens, n)),
    )


@torch.library.custom_op("megatron_residuals::mhc_boundary_backward", mutates_args=())
def mhc_boundary_backward(
    d_written: Tensor,
    d_read: Tensor,
    d_post: Tensor,
    d_res: Tensor,
    written: Tensor,
    h_pre: Tensor,
    mixes: Tensor,
    streams: Tensor | None,
    output: Tensor | None,
    h_post: Tensor | None,
    h_res: Tensor | None,
    mapping: Tensor,
    bias: Tensor,
    alpha: Tensor,
    convention: str,
    iterations: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of streams, output, h_post, h_res (three empty without), mapping, bias, alpha."""
    update = None
    if streams is not None and output is not None and h_post is not None and h_res is not None:
        update = Update(streams, output, h_post, h_res)
    weights, options = MhcWeights(mapping, bias, alpha), MhcOptions(convention, iterations, eps)
    cotangents = Cotangents(d_written, d_read, d_post, d_res)
    kept = Kept(written, h_pre, mixes)
    return projected.backward(cotangents, kept, weights, options, update)


@mhc_boundary_backward.register_fake
def _(
    d_written: Tensor,
    d_read: Tensor,
    d_post: Tensor,
    d_res: Tensor,
    written: Tensor,
    h_pre: Tensor,
    mixes: Tensor,
    streams: Tensor | None,
    output: Tensor | None,
    h_post: Tensor | None,
    h_res: Tensor | None,
    mapping: Tensor,
    bias: Tensor,
    alpha: Tensor,
    convention: str,
    iterations: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    n = written.shape[1]
    d_output, tokens = written.new_empty(0), 0
    if output is not None:
        d_output, tokens = torch.empty_like(output), output.shape[0]
    d_update = (d_output, mixes.new_empty(tokens, n), mixes.new_empty(tokens, n, n))
    d_weights = (torch.empty_like(mapping), torch.empty_like(bias), torch.empty_like(alpha))
    return torch.empty_like(written), *d_update, *d_weights
