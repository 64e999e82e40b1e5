# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over depth whose backward needs references to the sources and two numbers for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_residuals.functional.depth_attention import mix_sources, score_sources
from megatron_residuals.functional.precision import without_autocast
from megatron_residuals.kernels.gradient_buffer import GradientBuffer


def read_sources(
    sources: Sequence[Tensor],
    query: Tensor,
    key_gain: Tensor,
    *,
    eps: float,
    buffers: Sequence[GradientBuffer | None] = (),
) -> Tensor:
    """``functional.read_sources``, with lean autograd.

    ``buffers`` may give, for the first sources, where their gradients are to be added in float32
    instead of going through autograd.
    """
    padded = (*buffers, *[None] * (len(sources) - len(buffers)))
    x: Tensor = _ReadSources.apply(eps, padded, query, key_gain, *sources)
    return x


class _ReadSources(torch.autograd.Function):
    """x = sum_j softmax_j(r_j dot_j) V_j with dot_j = <V_j, q o gain> and r_j = 1 / rms(V_j).

    Saved besides the inputs: dot and r, float32 [m, ...]. With g = dL/dx and u_j = <g, V_j>:

        dlogit_j = a_j (u_j - sum_i a_i u_i)
        dV_j     = a_j g + dlogit_j (r_j q o gain - dot_j r_j^3 V_j / d)
        d(q o gain) = sum_j dlogit_j r_j V_j
    """

    @staticmethod
    def forward(
        ctx: Any,
        eps: float,
        buffers: tuple[GradientBuffer | None, ...],
        query: Tensor,
        key_gain: Tensor,
        *sources: Tensor,
    ) -> Tensor:
        """The weighted sum, as the reference computes it."""
        dots, inverse_rms = score_sources(sources, query, key_gain, eps=eps)
        ctx.buffers = buffers
        ctx.save_for_backward(query, key_gain, dots, inverse_rms, *sources)
        return mix_sources(sources, torch.softmax(inverse_rms * dots, dim=0))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """One pass over the sources for their products with g, one for their gradients."""
        query, key_gain, dots, inverse_rms, *sources = ctx.saved_tensors
        dtype, size = dots.dtype, query.shape[0]
        gradient = gradient.to(dtype)
        direction = query.to(dtype) * key_gain.to(dtype)
        weights = torch.softmax(inverse_rms * dots, dim=0)
        with without_autocast(gradient):
            products = torch.stack([(gradient * source.to(dtype)).sum(-1) for source in sources])
            d_logits = weights * (products - (weights * products).sum(0))
            d_dots = d_logits * inverse_rms
            # of the norm: d(mean square) times 2 / d, as a factor of the source itself
            shrink = d_logits * dots * inverse_rms.pow(3) / size
            d_direction = torch.zeros_like(direction)
            results: list[Tensor | None] = []
            for j, source in enumerate(sources):
                wide = source.to(dtype)
                d_direction += torch.mv(wide.reshape(-1, size).T, d_dots[j].reshape(-1))
                if not ctx.needs_input_grad[4 + j]:
                    results.append(None)
                    continue
                d_source = weights[j].unsqueeze(-1) * gradient
                d_source += d_dots[j].unsqueeze(-1) * direction
                d_source -= shrink[j].unsqueeze(-1) * wide
                results.append(_deliver(d_source, source.dtype, ctx.buffers[j]))
        d_query = (d_direction * key_gain).to(query.dtype)
        d_gain = (d_direction * query).to(key_gain.dtype)
        return None, None, d_query, d_gain, *results


def _deliver(gradient: Tensor, dtype: torch.dtype, buffer: GradientBuffer | None) -> Tensor | None:
    if buffer is None:
        return gradient.to(dtype)
    buffer.add(gradient)
    return None
