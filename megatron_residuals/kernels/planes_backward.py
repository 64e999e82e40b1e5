# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The way back through ``planes``: all gradients of a chunk of tokens while it is in the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_residuals.kernels.coefficients import (
    MhcWeights,
    bias_and_alpha_backward,
    gate_slopes,
    mixes_backward,
    tokens_last,
    update_coefficients_backward,
)
from megatron_residuals.kernels.planes import Buffers, Update, chunks
from megatron_residuals.kernels.sinkhorn import MhcOptions


def read_backward(gradient: Tensor, streams: Tensor, h_pre: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of streams [T, n, d] and h_pre [T, n] from that of what was read [T, d]."""
    d_streams, d_pre = torch.empty_like(streams), torch.empty_like(h_pre)
    buffers = Buffers(h_pre.dtype)
    for chunk in chunks(streams):
        wide = buffers.wide("streams", streams[chunk])
        g = buffers.wide("read", gradient[chunk])
        torch.bmm(wide, g.unsqueeze(2), out=d_pre[chunk].unsqueeze(2))
        target = buffers.target("gradient", d_streams[chunk])
        torch.bmm(h_pre[chunk].unsqueeze(2), g.unsqueeze(1), out=target)
        d_streams[chunk].copy_(target)
    return d_streams, d_pre


class _UpdateBackward:
    """Collects the gradients of a write from those of the streams behind it, chunk by chunk."""

    def __init__(self, update: Update, buffers: Buffers) -> None:
        self._update, self._buffers = update, buffers
        self.gradients = Update(*map(torch.empty_like, update))

    def add(self, chunk: slice, gradient: Tensor) -> None:
        """The gradient of the streams behind the write, for some tokens; all chunks once."""
        buffers, update, found = self._buffers, self._update.part(chunk), self.gradients.part(chunk)
        output = buffers.wide("output", update.output)
        streams = buffers.wide("streams", update.streams)
        found.h_post.copy_(torch.bmm(gradient, output.unsqueeze(2)).squeeze(2))
        found.h_res.copy_(torch.bmm(gradient, streams.transpose(1, 2)))
        target = buffers.target("output", found.output)
        torch.bmm(update.h_post.unsqueeze(1), gradient, out=target.unsqueeze(1))
        buffers.store(found.output, target)
        target = buffers.target("streams", found.streams)
        torch.bmm(update.h_res.transpose(1, 2), gradient, out=target)
        buffers.store(found.streams, target)


def write_backward(gradient: Tensor, update: Update) -> Update:
    """Gradients of all that a write takes, from that of the streams behind it [T, n, d]."""
    buffers = Buffers(update.h_res.dtype)
    backward = _UpdateBackward(update, buffers)
    for chunk in chunks(gradient):
        backward.add(chunk, buffers.wide("gradient", gradient[chunk]))
    return backward.gradients


class BoundaryGradients(NamedTuple):
    """Gradients of what ``update_and_read`` takes: of a write, or of streams alone; of weights."""

    before: Update | Tensor
    mapping: Tensor
    bias: Tensor
    alpha: Tensor


class Cotangents(NamedTuple):
    """Gradients of streams [T, n, d], of what was read [T, d], h_post [T, n], h_res [T, n, n]."""

    written: Tensor
    read: Tensor
    h_post: Tensor
    h_res: Tensor


class Kept(NamedTuple):
    """Of ``BoundaryValues``; ``written`` are the streams that were read, updated or not."""

    written: Tensor
    h_pre: Tensor
    mixes: Tensor


def update_and_read_backward(
    cotangents: Cotangents,
    kept: Kept,
    weights: MhcWeights,
    options: MhcOptions,
    update: Update | None,
) -> BoundaryGradients:
    """The gradient of a chunk's streams is formed, used for all that it gives, and forgotten."""
    written, h_pre, mixes = kept
    n = written.shape[1]
    buffers = Buffers(mixes.dtype)
    backward = None if update is None else _UpdateBackward(update, buffers)
    before: Update | Tensor = torch.empty_like(written) if backward is None else backward.gradients
    d_mapping = torch.zeros_like(weights.mapping)
    d_logits = torch.empty_like(mixes[:-1])
    d_logits[n:] = update_coefficients_backward(
        mixes, *tokens_last(cotangents.h_post, cotangents.h_res), weights, options
    )
    d_logits[:n] = gate_slopes(mixes, weights, n, options)
    for chunk in chunks(written):
        wide = buffers.wide("written", written[chunk])
        d_read = buffers.wide("read", cotangents.read[chunk])
        d_pre = torch.bmm(wide, d_read.unsqueeze(2)).squeeze(2)
        d_logits[:n, chunk].mul_(d_pre.t())
        d_mixes = mixes_backward(d_logits[:, chunk], mixes[:, chunk], weights, options.eps)
        d_mapping.addmm_(d_mixes[:-1], wide.flatten(1))
        g = buffers.new("gradient", wide)
        torch.mm(d_mixes[:-1].t(), weights.mapping, out=g.flatten(1))
        g.add_(buffers.wide("written gradient", cotangents.written[chunk]))
        g.addcmul_(wide, d_mixes[-1].view(-1, 1, 1))
        g.baddbmm_(h_pre[chunk].unsqueeze(2), d_read.unsqueeze(1))
        if backward is not None:
            backward.add(chunk, g)
        else:
            before[chunk].copy_(g)
    return BoundaryGradients(
        before,
        d_mapping,
        *bias_and_alpha_backward(d_logits, mixes, weights, options.eps),
    )
