# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The passes over streams: written, projected, read, and on the way back all gradients at once.

A chunk of tokens fits the cache: 16-bit ones are widened to float32 there, and all that is wanted
of it is done before the next one is touched.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_residuals.functional.streams import MhcOptions, MhcWeights, StreamRead, StreamUpdate
from megatron_residuals.kernels.common.scratch import Scratch, ranges
from megatron_residuals.kernels.streams.contract import Kept
from megatron_residuals.kernels.streams.pytorch.coefficients import (
    bias_and_alpha_backward,
    gate,
    gate_slopes,
    mixes_backward,
    tokens_first,
    tokens_last,
    update_coefficients,
    update_coefficients_backward,
)

CACHED_NUMBERS = 2**18  # of one chunk's streams: a megabyte in float32
UNCACHED_NUMBERS = 2**28  # off the CPU only the memory of the temporaries counts


def chunks(streams: Tensor) -> Iterator[slice]:
    """Ranges of tokens to be worked on together."""
    tokens, n, d = streams.shape
    numbers = CACHED_NUMBERS if streams.device.type == "cpu" else UNCACHED_NUMBERS
    return ranges(tokens, max(16, numbers // (n * d)))


def read_streams(streams: Tensor, h_pre: Tensor) -> Tensor:
    """sum_i h_pre[i] streams[i].    [T, n, d], [T, n] -> [T, d]"""
    result, scratch = streams.new_empty(streams.shape[0], streams.shape[2]), Scratch(h_pre.dtype)
    for chunk in chunks(streams):
        _read_chunk(scratch.wide("wide", streams[chunk]), h_pre[chunk], result[chunk], scratch)
    return result


def _read_chunk(wide: Tensor, h_pre: Tensor, result: Tensor, scratch: Scratch) -> None:
    mixed = scratch.target("read", result)
    torch.bmm(h_pre.unsqueeze(1), wide, out=mixed.unsqueeze(1))
    scratch.store(result, mixed)


def read_streams_backward(
    gradient: Tensor, streams: Tensor, h_pre: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of streams [T, n, d] and h_pre [T, n] from that of what was read [T, d]."""
    d_streams, d_pre = torch.empty_like(streams), torch.empty_like(h_pre)
    scratch = Scratch(h_pre.dtype)
    for chunk in chunks(streams):
        wide = scratch.wide("streams", streams[chunk])
        g = scratch.wide("read", gradient[chunk])
        torch.bmm(wide, g.unsqueeze(2), out=d_pre[chunk].unsqueeze(2))
        part = d_streams[chunk]
        target = scratch.target("gradient", part)
        torch.bmm(h_pre[chunk].unsqueeze(2), g.unsqueeze(1), out=target)
        scratch.store(part, target)
    return d_streams, d_pre


def write_streams(update: StreamUpdate) -> Tensor:
    """sum_i h_res[j, i] streams[i] + h_post[j] output.    -> [T, n, d]"""
    result, scratch = torch.empty_like(update.streams), Scratch(update.h_post.dtype)
    for chunk in chunks(result):
        _write_chunk(_part(update, chunk), result[chunk], scratch)
    return result


def _part(update: StreamUpdate, chunk: slice) -> StreamUpdate:
    return update.each(lambda tensor: tensor[chunk])


def _write_chunk(update: StreamUpdate, result: Tensor, scratch: Scratch) -> Tensor:
    """The result as well before it is rounded."""
    streams = scratch.wide("streams", update.streams)
    output = scratch.wide("output", update.output)
    wide = scratch.target("wide", result)
    if update.h_res is None:
        wide.copy_(streams)
    else:
        torch.bmm(update.h_res, streams, out=wide)
    wide.baddbmm_(update.h_post.unsqueeze(2), output.unsqueeze(1))
    scratch.store(result, wide)
    return wide


def write_streams_backward(gradient: Tensor, update: StreamUpdate) -> StreamUpdate:
    """Gradients of all that a write takes, from that of the streams behind it [T, n, d]."""
    scratch = Scratch(update.h_post.dtype)
    backward = _WriteBackward(update, scratch)
    for chunk in chunks(gradient):
        backward.add(chunk, scratch.wide("gradient", gradient[chunk]))
    return backward.gradients


class _WriteBackward:
    """Collects the gradients of a write from those of the streams behind it, chunk by chunk."""

    def __init__(self, update: StreamUpdate, scratch: Scratch) -> None:
        self._update, self._scratch = update, scratch
        self.gradients = update.each(torch.empty_like)

    def add(self, chunk: slice, gradient: Tensor) -> None:
        """The gradient of the streams behind the write, for some tokens; all chunks once."""
        scratch, update = self._scratch, _part(self._update, chunk)
        found = _part(self.gradients, chunk)
        output = scratch.wide("output", update.output)
        found.h_post.copy_(torch.bmm(gradient, output.unsqueeze(2)).squeeze(2))
        target = scratch.target("output", found.output)
        torch.bmm(update.h_post.unsqueeze(1), gradient, out=target.unsqueeze(1))
        scratch.store(found.output, target)
        if update.h_res is None or found.h_res is None:
            found.streams.copy_(gradient)
            return
        streams = scratch.wide("streams", update.streams)
        found.h_res.copy_(torch.bmm(gradient, streams.transpose(1, 2)))
        target = scratch.target("streams", found.streams)
        torch.bmm(update.h_res.transpose(1, 2), gradient, out=target)
        scratch.store(found.streams, target)


def update_and_read(
    before: StreamUpdate | Tensor,
    weights: MhcWeights,
    options: MhcOptions,
    reads: Tensor | None,
) -> tuple[StreamRead, Tensor]:
    """Writes (unless given just the streams), projects and reads in one pass over the streams."""
    update = before if isinstance(before, StreamUpdate) else None
    streams = before.streams if isinstance(before, StreamUpdate) else before
    tokens, n, d = streams.shape
    scratch = Scratch(weights.mapping.dtype)
    written = streams if update is None else torch.empty_like(streams)
    x = streams.new_empty(tokens, d)
    mixes = weights.mapping.new_empty(weights.bias.shape[0] + 1, tokens)
    h_pre = weights.mapping.new_empty(tokens, n)
    for chunk in chunks(streams):
        part = written[chunk]
        if update is not None:
            wide = _write_chunk(_part(update, chunk), part, scratch)
            # rounded, as everyone else will see it
            wide = wide if wide is part else wide.copy_(part)
        else:
            wide = scratch.wide("wide", part)
        project(wide.flatten(1), weights.mapping, mixes[:, chunk])
        h_pre[chunk] = gate(mixes[:, chunk], weights, n, options).t()
        _read_chunk(wide, (h_pre if reads is None else reads)[chunk], x[chunk], scratch)
    rest = tokens_first(*update_coefficients(mixes, weights, n, options))
    return StreamRead(written, x, h_pre, *rest), mixes


def project(flat: Tensor, mapping: Tensor, mixes: Tensor) -> None:
    """mapping x and |x|^2 of streams [t, n d], into mixes [K + 1, t]."""
    mixes[:-1] = torch.mm(flat, mapping.t()).t()
    torch.square(torch.linalg.vector_norm(flat, dim=1), out=mixes[-1])


def update_and_read_backward(
    gradients: StreamRead,
    kept: Kept,
    update: StreamUpdate | None,
    weights: MhcWeights,
    options: MhcOptions,
    *,
    reads: bool,
) -> tuple[StreamUpdate | Tensor, MhcWeights, Tensor]:
    """The gradient of a chunk's streams is formed, used for all that it gives, and forgotten."""
    streams, h_pre, mixes = kept
    n = streams.shape[1]
    scratch = Scratch(mixes.dtype)
    backward = None if update is None else _WriteBackward(update, scratch)
    before = torch.empty_like(streams) if backward is None else backward.gradients
    d_mapping = torch.zeros_like(weights.mapping)
    d_logits = torch.empty_like(mixes[:-1])
    d_logits[n:] = update_coefficients_backward(
        mixes, *tokens_last(gradients.h_post, gradients.h_res), weights, options
    )
    d_logits[:n] = gate_slopes(mixes, weights, n, options)
    if reads:
        d_logits[:n].mul_(gradients.h_pre.t())
    d_read = torch.empty_like(h_pre)
    for chunk in chunks(streams):
        wide = scratch.wide("written", streams[chunk])
        d_x = scratch.wide("read", gradients.x[chunk])
        torch.bmm(wide, d_x.unsqueeze(2), out=d_read[chunk].unsqueeze(2))
        if not reads:
            d_logits[:n, chunk].mul_(d_read[chunk].t())
        d_mixes = mixes_backward(d_logits[:, chunk], mixes[:, chunk], weights, n, options.eps)
        d_mapping.addmm_(d_mixes[:-1], wide.flatten(1))
        g = scratch.new("gradient", wide)
        torch.mm(d_mixes[:-1].t(), weights.mapping, out=g.flatten(1))
        g.add_(scratch.wide("written gradient", gradients.streams[chunk]))
        g.addcmul_(wide, d_mixes[-1].view(-1, 1, 1))
        g.baddbmm_(h_pre[chunk].unsqueeze(2), d_x.unsqueeze(1))
        if backward is not None:
            backward.add(chunk, g)
        elif isinstance(before, Tensor):
            before[chunk].copy_(g)
    d_bias, d_alpha = bias_and_alpha_backward(d_logits, mixes, weights, n, options.eps)
    return before, MhcWeights(d_mapping, d_bias, d_alpha), d_read
