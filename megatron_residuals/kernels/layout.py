# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Between the public shapes [..., ...] and rows of tokens [T, ...], for functions of streams."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_residuals.functional.precision import wide_dtype
from megatron_residuals.kernels.dispatch import Backend
from megatron_residuals.kernels.planes import Update


def implementation(backend: Backend) -> Any:
    """The module ``torch_streams``, or its Triton twin."""
    if backend == "torch":
        from megatron_residuals.kernels import torch_streams

        return torch_streams
    from megatron_residuals.kernels.triton import streams as triton_streams

    return triton_streams


def rows(tensor: Tensor, ndim: int) -> Tensor:
    """[..., *rest] -> [T, *rest], contiguous; ``ndim`` dimensions are the rest."""
    return tensor.reshape(-1, *tensor.shape[tensor.ndim - ndim :]).contiguous()


def flat_update(streams: Tensor, output: Tensor, h_post: Tensor, h_res: Tensor) -> Update:
    """A write in rows, its coefficients in float32 or wider."""
    dtype = wide_dtype(streams, h_res)
    return Update(
        rows(streams, 2), rows(output, 1), rows(h_post, 1).to(dtype), rows(h_res, 2).to(dtype)
    )


def public_update(
    flat: Update, streams: Tensor, output: Tensor, h_post: Tensor, h_res: Tensor
) -> Update:
    """Gradients of a write in the shapes and dtypes of what it took."""
    pairs = zip(flat, (streams, output, h_post, h_res), strict=True)
    return Update(*[found.view(given.shape).to(given.dtype) for found, given in pairs])


def wanted(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """None in the place of gradients that nobody needs."""
    pairs = zip(gradients, ctx.needs_input_grad, strict=True)
    return tuple(gradient if needed else None for gradient, needed in pairs)
