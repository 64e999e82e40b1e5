# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Reading, writing and weighing residual streams with lean autograd."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron_residuals.functional import streams as reference
from megatron_residuals.functional.precision import wide_dtype, without_autocast
from megatron_residuals.functional.streams import StreamCoefficients
from megatron_residuals.kernels import liger_streams
from megatron_residuals.kernels.dispatch import Backend, resolve
from megatron_residuals.kernels.external import outside_graphs
from megatron_residuals.kernels.layout import (
    flat_update,
    implementation,
    public_update,
    rows,
    wanted,
)
from megatron_residuals.kernels.recomputed import recomputed


def read_streams(streams: Tensor, h_pre: Tensor, *, backend: str = "auto") -> Tensor:
    """``functional.read_streams``; keeps references to both inputs.

    Raises:
        ValueError: unknown backend, or one that does not take the dtype.
        RuntimeError: the backend was asked for and cannot run.
    """
    if backend == "liger":
        return outside_graphs(liger_streams.read_streams)(streams, h_pre)
    chosen = resolve(backend, streams, what="read_streams", libraries=("liger",))
    x: Tensor = _ReadStreams.apply(chosen, streams, h_pre)
    return x


def write_streams(
    streams: Tensor, h_post: Tensor, h_res: Tensor, output: Tensor, *, backend: str = "auto"
) -> Tensor:
    """``functional.write_streams``; keeps references to its inputs. Raises as ``read_streams``."""
    if backend == "liger":
        return outside_graphs(liger_streams.write_streams)(streams, h_post, h_res, output)
    chosen = resolve(backend, streams, what="write_streams", libraries=("liger",))
    written: Tensor = _WriteStreams.apply(chosen, streams, h_post, h_res, output)
    return written


def mhc_coefficients(
    streams: Tensor,
    mapping: Tensor,
    bias: Tensor,
    alpha: Tensor,
    *,
    convention: str,
    iterations: int,
    eps: float,
) -> StreamCoefficients:
    """``functional.mhc_coefficients``; keeps a reference to the streams, and the logits.

    The Sinkhorn iterates are worked out again in backward and differentiated exactly.
    """
    logits = recomputed(
        functools.partial(reference.mhc_logits, eps=eps), streams, mapping, bias, alpha
    )
    activate = functools.partial(
        reference.mhc_activations,
        num_streams=streams.shape[-2],
        convention=convention,
        iterations=iterations,
        eps=eps,
    )
    return StreamCoefficients(*recomputed(activate, logits))


def mhc_head_weights(
    streams: Tensor, mapping: Tensor, bias: Tensor, scale: Tensor, *, eps: float
) -> Tensor:
    """``functional.mhc_head_weights``; keeps a reference to the streams."""
    head = functools.partial(reference.mhc_head_weights, eps=eps)
    weights: Tensor = recomputed(head, streams, mapping, bias, scale)
    return weights


def hc_coefficients(
    streams: Tensor,
    static: StreamCoefficients,
    mapping: Tensor | None,
    scale: Tensor | None,
    *,
    norm: str,
    eps: float,
) -> StreamCoefficients:
    """``functional.hc_coefficients``; keeps a reference to the streams."""
    if mapping is None or scale is None:
        return reference.hc_coefficients(streams, static, mapping, scale, norm=norm, eps=eps)

    def compute(streams: Tensor, mapping: Tensor, scale: Tensor, *static: Tensor) -> Any:
        return tuple(
            reference.hc_coefficients(
                streams, StreamCoefficients(*static), mapping, scale, norm=norm, eps=eps
            )
        )

    return StreamCoefficients(*recomputed(compute, streams, mapping, scale, *static))


class _ReadStreams(torch.autograd.Function):
    """x = sum_n h_pre[n] streams[n];  dstreams[n] = h_pre[n] g,  dh_pre[n] = <g, streams[n]>."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, streams: Tensor, h_pre: Tensor) -> Tensor:
        """The weighted sum."""
        ctx.backend = backend
        ctx.save_for_backward(streams, h_pre)
        dtype = wide_dtype(streams, h_pre)
        with without_autocast(streams):
            x: Tensor = implementation(backend).read(rows(streams, 2), rows(h_pre, 1).to(dtype))
        return x.view(*streams.shape[:-2], streams.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the streams and of the weights."""
        streams, h_pre = ctx.saved_tensors
        dtype = wide_dtype(streams, h_pre)
        with without_autocast(streams):
            d_streams, d_pre = implementation(ctx.backend).read_backward(
                rows(gradient, 1), rows(streams, 2), rows(h_pre, 1).to(dtype)
            )
        d_pre = d_pre.view(h_pre.shape).to(h_pre.dtype)
        return wanted(ctx, None, d_streams.view(streams.shape), d_pre)


class _WriteStreams(torch.autograd.Function):
    """streams'[j] = sum_i h_res[j, i] streams[i] + h_post[j] y.

    dstreams[i] = sum_j h_res[j, i] g[j]       dh_res[j, i] = <g[j], streams[i]>
    dy          = sum_j h_post[j] g[j]         dh_post[j]   = <g[j], y>
    """

    @staticmethod
    def forward(
        ctx: Any, backend: Backend, streams: Tensor, h_post: Tensor, h_res: Tensor, output: Tensor
    ) -> Tensor:
        """The streams after the write."""
        ctx.backend = backend
        ctx.save_for_backward(streams, h_post, h_res, output)
        with without_autocast(streams):
            flat = flat_update(streams, output, h_post, h_res)
            written: Tensor = implementation(backend).write(flat)
        return written.view(streams.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the streams, the two coefficients and the sublayer's output."""
        streams, h_post, h_res, output = ctx.saved_tensors
        with without_autocast(streams):
            found = implementation(ctx.backend).write_backward(
                rows(gradient, 2), flat_update(streams, output, h_post, h_res)
            )
        d_streams, d_output, d_post, d_res = public_update(found, streams, output, h_post, h_res)
        return wanted(ctx, None, d_streams, d_post, d_res, d_output)
