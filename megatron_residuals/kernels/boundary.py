# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Everything mHC does between two sublayers as one step of autograd.

The write of a sublayer, the coefficients of the next one and its read belong together: the streams
between them are written and read back once, and their gradient is never stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_residuals.functional import streams as reference
from megatron_residuals.functional.precision import wide_dtype, without_autocast
from megatron_residuals.functional.streams import Boundary, StreamUpdate
from megatron_residuals.kernels import liger_streams
from megatron_residuals.kernels.coefficients import MhcWeights
from megatron_residuals.kernels.dispatch import Backend, resolve
from megatron_residuals.kernels.external import outside_graphs
from megatron_residuals.kernels.layout import (
    flat_update,
    implementation,
    public_update,
    rows,
    wanted,
)
from megatron_residuals.kernels.planes_backward import Cotangents, Kept
from megatron_residuals.kernels.sinkhorn import MhcOptions


def update_and_read(
    streams: Tensor,
    update: StreamUpdate | None,
    mapping: Tensor,
    bias: Tensor,
    alpha: Tensor,
    *,
    convention: str,
    iterations: int,
    eps: float,
    backend: str = "auto",
) -> Boundary:
    """``functional.update_and_read``; h_pre is for looking at and has no gradient.

    Keeps references to its inputs, the streams and h_pre, and 2n + n^2 + 1 numbers per token. With
    the backend ``liger`` it is three steps instead of one, and keeps more.

    Raises:
        ValueError: unknown convention or backend, or one that does not take the dtype or shape.
        RuntimeError: the backend was asked for and cannot run.
    """
    if backend == "liger":
        return outside_graphs(liger_streams.update_and_read)(
            streams,
            update,
            *(mapping, bias, alpha),
            convention=convention,
            iterations=iterations,
            eps=eps,
        )
    options = MhcOptions(convention, iterations, eps).checked()
    narrow = wide_dtype(streams, mapping) == torch.float32
    what = "boundary of mHC sublayers"
    chosen = resolve(backend, streams, what=what, supported=narrow, libraries=("liger",))
    if chosen == "torch" and torch.compiler.is_compiling():
        # a compiler fuses the plain formulas better than the chunks made for a cache
        return reference.update_and_read(streams, update, mapping, bias, alpha, **options._asdict())
    before = (None, None, None) if update is None else update
    return Boundary(*_UpdateAndRead.apply(options, chosen, streams, *before, mapping, bias, alpha))


class _UpdateAndRead(torch.autograd.Function):
    """The values of ``Boundary``. Without an update, the streams come out as they went in.

    They do come out, so that in backward their gradient meets that of the read here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        options: MhcOptions,
        backend: Backend,
        streams: Tensor,
        output: Tensor | None,
        h_post: Tensor | None,
        h_res: Tensor | None,
        mapping: Tensor,
        bias: Tensor,
        alpha: Tensor,
    ) -> tuple[Tensor, ...]:
        """In the flat layouts of ``planes``."""
        ctx.options, ctx.backend = options, backend
        lead = streams.shape[:-2]
        dtype = wide_dtype(streams, mapping)
        weights = MhcWeights(*(weight.to(dtype) for weight in (mapping, bias, alpha)))
        update = None
        if output is not None and h_post is not None and h_res is not None:
            update = flat_update(streams, output, h_post, h_res)
        with without_autocast(streams):
            found = implementation(backend).update_and_read(
                rows(streams, 2) if update is None else update, weights, options
            )
        written = streams.view_as(streams)
        if found.written is not None:
            written = found.written.view(streams.shape)
        kept = streams if found.written is None else written
        small = (found.read, found.h_pre, found.h_post, found.h_res)
        read, h_pre, *coefficients = (value.view(*lead, *value.shape[1:]) for value in small)
        ctx.mark_non_differentiable(h_pre)
        ctx.save_for_backward(
            streams, output, h_post, h_res, kept, h_pre, found.mixes, mapping, bias, alpha
        )
        return written, read, h_pre, *coefficients

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """One pass; for frozen inputs None."""
        streams, output, h_post, h_res, *kept, mapping, bias, alpha = ctx.saved_tensors
        written, h_pre, mixes = kept
        d_written, d_read, _, d_post, d_res = gradients
        weights = MhcWeights(*(weight.to(mixes.dtype) for weight in (mapping, bias, alpha)))
        update = None if output is None else flat_update(streams, output, h_post, h_res)
        cotangents = Cotangents(
            rows(d_written, 2), rows(d_read, 1), rows(d_post, 1), rows(d_res, 2)
        )
        with without_autocast(streams):
            found = implementation(ctx.backend).update_and_read_backward(
                cotangents,
                Kept(rows(written, 2), rows(h_pre, 1), mixes),
                weights,
                ctx.options,
                update,
            )
        d_before: tuple[Tensor | None, ...]
        if update is None:
            d_before = (found.before.view(streams.shape), None, None, None)
        else:
            d_before = public_update(found.before, streams, output, h_post, h_res)
        return wanted(
            ctx,
            *(None, None),
            *d_before,
            found.mapping.to(mapping.dtype),
            found.bias.to(bias.dtype),
            found.alpha.to(alpha.dtype),
        )
