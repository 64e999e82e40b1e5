# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The steps of autograd that touch streams, around any backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_residuals.functional.precision import wide_dtype, without_autocast
from megatron_residuals.functional.streams import MhcOptions, MhcWeights, StreamRead, StreamUpdate
from megatron_residuals.kernels.common.autograd import rows, wanted
from megatron_residuals.kernels.common.dispatch import Backend
from megatron_residuals.kernels.streams import pytorch
from megatron_residuals.kernels.streams.contract import Kept, StreamBackend


class ReadStreams(torch.autograd.Function):
    """x = sum_n h_pre[n] streams[n];  dstreams[n] = h_pre[n] g,  dh_pre[n] = <g, streams[n]>."""

    @staticmethod
    def forward(ctx: Any, name: Backend, streams: Tensor, h_pre: Tensor) -> Tensor:
        """The weighted sum."""
        ctx.name = name
        ctx.save_for_backward(streams, h_pre)
        dtype = wide_dtype(streams, h_pre)
        with without_autocast(streams):
            x = _backend(name).read_streams(rows(streams, 2), rows(h_pre).to(dtype))
        return x.view(*streams.shape[:-2], streams.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the streams and of the weights."""
        streams, h_pre = ctx.saved_tensors
        dtype = wide_dtype(streams, h_pre)
        with without_autocast(streams):
            d_streams, d_pre = _backend(ctx.name).read_streams_backward(
                rows(gradient), rows(streams, 2), rows(h_pre).to(dtype)
            )
        d_pre = d_pre.view(h_pre.shape).to(h_pre.dtype)
        return wanted(ctx, None, d_streams.view(streams.shape), d_pre)


class WriteStreams(torch.autograd.Function):
    """streams'[j] = sum_i h_res[j, i] streams[i] + h_post[j] y.

    dstreams[i] = sum_j h_res[j, i] g[j]       dh_res[j, i] = <g[j], streams[i]>
    dy          = sum_j h_post[j] g[j]         dh_post[j]   = <g[j], y>
    """

    @staticmethod
    def forward(ctx: Any, name: Backend, *update: Any) -> Tensor:
        """The streams after the write."""
        ctx.name = name
        ctx.save_for_backward(*update)
        given = StreamUpdate(*update)
        with without_autocast(given.streams):
            written = _backend(name).write_streams(_rows_of(given))
        return written.view(given.streams.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the streams, the sublayer's output and the two coefficients."""
        given = StreamUpdate(*ctx.saved_tensors)
        with without_autocast(given.streams):
            found = _backend(ctx.name).write_streams_backward(rows(gradient, 2), _rows_of(given))
        return wanted(ctx, None, *_shaped(found, given))


class UpdateAndRead(torch.autograd.Function):
    """The values of ``StreamRead``. Without an update, the streams come out as they went in.

    They do come out, so that in backward their gradient meets that of the read here. h_pre has a
    gradient where it is not what was read with.
    """

    @staticmethod
    def forward(
        ctx: Any,
        name: Backend,
        options: MhcOptions,
        reads: Tensor | None,
        streams: Tensor,
        output: Tensor | None,
        h_post: Tensor | None,
        h_res: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """One pass over the streams."""
        ctx.name, ctx.options = name, options
        given = _given(streams, output, h_post, h_res)
        before = rows(streams, 2) if given is None else _rows_of(given)
        wide = _wide(weights, streams)
        given_reads = None if reads is None else rows(reads).to(wide.mapping.dtype)
        with without_autocast(streams):
            found, mixes = _backend(name).update_and_read(before, wide, options, given_reads)
        written = streams.view_as(streams) if given is None else found.streams.view(streams.shape)
        x, h_pre, new_post = (_led(value, streams) for value in found[1:4])
        new_res = None if found.h_res is None else _led(found.h_res, streams)
        ctx.reads = None if reads is None else reads.dtype
        if reads is None:
            ctx.mark_non_differentiable(h_pre)
        kept = Kept(streams if given is None else written, h_pre if reads is None else reads, mixes)
        ctx.save_for_backward(streams, output, h_post, h_res, *kept, *weights)
        return written, x, h_pre, new_post, new_res

    @staticmethod
    def backward(
        ctx: Any,
        d_streams: Tensor,
        d_x: Tensor,
        d_pre: Tensor,
        d_post: Tensor,
        d_res: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """One pass; for frozen inputs None."""
        streams, output, h_post, h_res, *kept, mapping, bias, alpha = ctx.saved_tensors
        read, h_pre, mixes = kept
        given, weights = _given(streams, output, h_post, h_res), (mapping, bias, alpha)
        mixing = None if d_res is None else rows(d_res, 2)
        gradients = StreamRead(rows(d_streams, 2), rows(d_x), rows(d_pre), rows(d_post), mixing)
        with without_autocast(streams):
            wide = _wide(weights, streams)
            d_before, d_weights, d_read = _backend(ctx.name).update_and_read_backward(
                gradients,
                Kept(rows(read, 2), rows(h_pre).to(wide.mapping.dtype), mixes),
                None if given is None else _rows_of(given),
                wide,
                ctx.options,
                reads=ctx.reads is not None,
            )
        found: tuple[Tensor | None, ...]
        if isinstance(d_before, Tensor):
            found = (d_before.view(streams.shape), None, None, None)
        else:
            found = _shaped(d_before, StreamUpdate(streams, output, h_post, h_res))
        narrowed = [new.to(each.dtype) for new, each in zip(d_weights, weights, strict=True)]
        d_reads = None if ctx.reads is None else d_read.view(h_pre.shape).to(ctx.reads)
        return wanted(ctx, None, None, d_reads, *found, *narrowed)


def _led(value: Tensor, streams: Tensor) -> Tensor:
    """Rows with the leading dimensions of the streams."""
    return value.view(*streams.shape[:-2], *value.shape[1:])


def _backend(name: Backend) -> StreamBackend:
    if name == "torch":
        return pytorch
    from megatron_residuals.kernels.streams import triton

    return triton


def _given(
    streams: Tensor, output: Tensor | None, h_post: Tensor | None, h_res: Tensor | None
) -> StreamUpdate | None:
    if output is None or h_post is None:
        return None
    return StreamUpdate(streams, output, h_post, h_res)


def _rows_of(update: StreamUpdate) -> StreamUpdate:
    """A write in rows, its coefficients in float32 or wider."""
    streams, output, h_post, h_res = update
    dtype = wide_dtype(streams, h_post)
    mixing = None if h_res is None else rows(h_res, 2).to(dtype)
    return StreamUpdate(rows(streams, 2), rows(output), rows(h_post).to(dtype), mixing)


def _shaped(flat: StreamUpdate, given: StreamUpdate) -> StreamUpdate:
    """Gradients of a write in the shapes and dtypes of what it took."""

    def like(found: Tensor, one: Tensor) -> Tensor:
        return found.view(one.shape).to(one.dtype)

    return StreamUpdate(
        like(flat.streams, given.streams),
        like(flat.output, given.output),
        like(flat.h_post, given.h_post),
        None if flat.h_res is None or given.h_res is None else like(flat.h_res, given.h_res),
    )


def _wide(weights: tuple[Tensor, ...], streams: Tensor) -> MhcWeights:
    dtype = wide_dtype(streams, weights[0])
    return MhcWeights(*[weight.to(dtype) for weight in weights])
