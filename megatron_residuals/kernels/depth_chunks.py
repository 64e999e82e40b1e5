# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over depth in plain PyTorch, a few tokens at a time so that they stay in the cache.

Functions without autograd, on flat tensors: sources, values and gradients [T, d]; directions [S, d]
in float32, or in the dtype of the sources where that is wider.

Whatever is computed for a reader is computed by operations on its numbers alone, in one order and
one shape: the result does not depend, to the last bit, on which other readers share the pass.
Gradients of sources are added reader by reader, the last first, to sums that already hold those of
later readers; so a sum does not depend on it either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_residuals.functional.depth_attention import mix_sources, score_sources
from megatron_residuals.kernels.planes import Buffers

# of a chunk's numbers in float32; where there is no cache to stay in, few and large operations
CHUNK_BYTES = {"cpu": 2**20}
OTHER_CHUNK_BYTES = 2**27


class ClosedForward(NamedTuple):
    """What reading finished sources leaves.

    Attributes:
        values: one [T, d] for each reader, in the dtype of the sources.
        log_sums: [S, T], float32 or wider like the rest.
        dots: <source_j, direction_s>, [S, T, m].
        inverse_rms: [T, m].
    """

    values: list[Tensor]
    log_sums: Tensor
    dots: Tensor
    inverse_rms: Tensor


class MergeForward(NamedTuple):
    """What merging leaves: x and the running sum [T, d]; numbers [T], float32 or wider."""

    x: Tensor
    partial: Tensor
    dots: Tensor
    inverse_rms: Tensor
    share: Tensor


class MergeBackward(NamedTuple):
    """Gradients of what was merged; ``partial`` is also that of an output added to it."""

    values: Tensor
    log_sum: Tensor
    direction: Tensor
    partial: Tensor


def read_forward(
    sources: Sequence[Tensor], direction: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, d], dots and 1 / rms [m, T] of one reader, as the reference computes them."""
    gain = torch.ones_like(direction)
    dots, inverse_rms = score_sources(sources, direction, gain, eps=eps)
    return mix_sources(sources, torch.softmax(inverse_rms * dots, dim=0)), dots, inverse_rms


def read_backward(
    gradient: Tensor,
    sources: Sequence[Tensor],
    direction: Tensor,
    dots: Tensor,
    inverse_rms: Tensor,
    totals: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """`closed_backward` of one reader: the gradient of its direction [d], and fresh ones."""
    by_token = dots.T.contiguous().unsqueeze(0), inverse_rms.T.contiguous()
    found, fresh = closed_backward(
        [gradient], [None], sources, direction.unsqueeze(0), *by_token, totals, wanted
    )
    return found[0], fresh


def closed_forward(sources: Sequence[Tensor], directions: Tensor, eps: float) -> ClosedForward:
    """Weighted sums of the sources for every reader, one pass over the sources."""
    size, (tokens, d), m = len(directions), sources[0].shape, len(sources)
    dots = directions.new_empty(size, tokens, m)
    inverse_rms = directions.new_empty(tokens, m)
    values = [torch.empty_like(sources[0]) for _ in range(size)]
    keys_scratch = directions.new_empty(_step(m * d, directions, 1), m, d)
    buffers = Buffers(directions.dtype)
    for part in _chunks(tokens, len(keys_scratch)):
        keys = _gather(sources, part, keys_scratch)
        rows = keys.view(-1, d)
        _inverse_rms(rows, eps, out=inverse_rms[part].view(-1))
        for s in range(size):
            torch.mv(rows, directions[s], out=dots[s, part].view(-1))
            weights = torch.softmax(dots[s, part] * inverse_rms[part], dim=1)
            chunk = values[s][part]
            mixed = buffers.target("mixed", chunk)
            torch.bmm(weights.unsqueeze(1), keys, out=mixed.unsqueeze(1))
            buffers.store(chunk, mixed)
    log_sums = [torch.logsumexp(each * inverse_rms, dim=1) for each in dots]
    return ClosedForward(values, torch.stack(log_sums), dots, inverse_rms)


def closed_backward(
    gradients: Sequence[Tensor | None],
    d_log_sums: Sequence[Tensor | None],
    sources: Sequence[Tensor],
    directions: Tensor,
    dots: Tensor,
    inverse_rms: Tensor,
    totals: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradient of the directions [S, d], and those of wanted sources that have no total.

    With g the gradient of a reader's values, h that of its log_sum, u_j = <g, V_j>, r = 1 / rms:

        dlogit_j = a_j (u_j - sum_i a_i u_i + h)
        dV_j    += a_j g + dlogit_j (r_j direction - dot_j r_j^3 V_j / d)
        d direction = sum_j dlogit_j r_j V_j

    Args:
        gradients, d_log_sums: [T, d] and [T] by reader; None where there is none.
        totals: sums [T, d], float32 or wider, to which the gradients of sources are added.
        wanted: of which sources the gradient is wanted at all.
    """
    (tokens, d), m = sources[0].shape, len(sources)
    d_directions = torch.zeros_like(directions)
    fresh = [
        torch.zeros_like(source, dtype=directions.dtype) if want and total is None else None
        for source, total, want in zip(sources, totals, wanted, strict=True)
    ]
    sums_of = [
        (new if total is None else total) if want else None
        for new, total, want in zip(fresh, totals, wanted, strict=True)
    ]
    keys_scratch = directions.new_empty(_step(m * d, directions, 2), m, d)
    sums_scratch = torch.zeros_like(keys_scratch)
    pair_scratch = directions.new_empty(len(keys_scratch), 2, d)
    for part in _chunks(tokens, len(keys_scratch)):
        keys = _gather(sources, part, keys_scratch)
        sums, pair = sums_scratch[: len(keys)], pair_scratch[: len(keys)]
        _copy(sums_of, part, sums)
        for s in reversed(range(len(directions))):
            gradient, d_log_sum = gradients[s], d_log_sums[s]
            if gradient is None and d_log_sum is None:
                continue
            pair[:, 0] = 0 if gradient is None else gradient[part]
            pair[:, 1] = directions[s]
            r, dot = inverse_rms[part], dots[s, part]
            weights = torch.softmax(dot * r, dim=1)
            # with both of the pair, as one column of it would be multiplied the slow way
            products = torch.bmm(keys, pair.transpose(1, 2))[:, :, 0]
            mean = (weights * products).sum(1, keepdim=True)
            if d_log_sum is not None:
                mean -= d_log_sum[part].unsqueeze(1)
            d_logits = weights * (products - mean)
            d_dots = d_logits * r
            sums.baddbmm_(torch.stack((weights, d_dots), dim=2), pair)
            shrink = d_dots * dot * r.square() / d
            sums.addcmul_(keys, shrink.unsqueeze(2), value=-1)
            d_directions[s].addmv_(keys.view(-1, d).T, d_dots.view(-1))
        for j, total in enumerate(sums_of):
            if total is not None:
                total[part] = sums[:, j]
    dtype = sources[0].dtype
    return d_directions, [None if new is None else new.to(dtype) for new in fresh]


def merge_forward(
    values: Tensor,
    log_sum: Tensor,
    direction: Tensor,
    partial: Tensor,
    output: Tensor | None,
    eps: float,
) -> MergeForward:
    """The running sum, an output added to it, merged with a reader's values."""
    tokens, d = partial.shape
    total = partial if output is None else torch.empty_like(partial)
    x = torch.empty_like(partial)
    dots, inverse_rms, share = (direction.new_empty(tokens) for _ in range(3))
    buffers = Buffers(direction.dtype)
    for part in _chunks(tokens, _step(d, direction, 4)):
        if output is not None:
            torch.add(partial[part], output[part], out=total[part])
        keys = buffers.wide("keys", total[part])
        _inverse_rms(keys, eps, out=inverse_rms[part])
        torch.mv(keys, direction, out=dots[part])
        logits = dots[part] * inverse_rms[part]
        torch.sigmoid(logits - log_sum[part], out=share[part])
        chunk = x[part]
        merged = buffers.target("merged", chunk)
        weight = share[part].unsqueeze(1)
        torch.lerp(buffers.wide("values", values[part]), keys, weight, out=merged)
        buffers.store(chunk, merged)
    return MergeForward(x, total, dots, inverse_rms, share)


def merge_backward(
    gradient: Tensor, d_partial: Tensor | None, direction: Tensor, saved: MergeForward
) -> MergeBackward:
    """All gradients from those of x and of the running sum.

    With p the share of the running sum P, its logit has the gradient p (<g, P> - <g, x>), as x is
    the weighted mean: the values themselves are not needed, nor is anything divided by a weight.
    """
    x, partial, dots, inverse_rms, share = saved
    tokens, d = partial.shape
    d_values, found = torch.empty_like(x), torch.empty_like(partial)
    d_log_sum, d_direction = torch.empty_like(share), torch.zeros_like(direction)
    buffers = Buffers(direction.dtype)
    for part in _chunks(tokens, _step(d, direction, 6)):
        g = buffers.wide("gradient", gradient[part])
        keys, mean = buffers.wide("keys", partial[part]), buffers.wide("x", x[part])
        p, r = share[part], inverse_rms[part]
        d_logit = p * (torch.linalg.vecdot(g, keys) - torch.linalg.vecdot(g, mean))
        torch.neg(d_logit, out=d_log_sum[part])
        chunk = d_values[part]
        others = buffers.target("values", chunk)
        torch.mul(g, (1 - p).unsqueeze(1), out=others)
        buffers.store(chunk, others)
        d_dots = d_logit * r
        d_direction.addmv_(keys.T, d_dots)
        chunk = found[part]
        total = buffers.target("total", chunk)
        torch.mul(g, p.unsqueeze(1), out=total)
        total.addcmul_(d_dots.unsqueeze(1), direction)
        total.addcmul_((d_dots * dots[part] * r.square() / d).unsqueeze(1), keys, value=-1)
        if d_partial is not None:
            total += d_partial[part]
        buffers.store(chunk, total)
    return MergeBackward(d_values, d_log_sum, d_direction, found)


def _step(numbers: int, like: Tensor, buffers: int) -> int:
    """Tokens of a chunk, of which ``buffers`` copies of so many numbers each are in the cache."""
    budget = CHUNK_BYTES.get(like.device.type, OTHER_CHUNK_BYTES)
    return max(1, budget // max(1, buffers * numbers * like.element_size()))


def _chunks(tokens: int, step: int) -> Iterator[slice]:
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


def _gather(sources: Sequence[Tensor], part: slice, scratch: Tensor) -> Tensor:
    """Some tokens of every source, as [tokens, m, d] in the scratch's dtype."""
    gathered = scratch[: part.stop - part.start]
    _copy(sources, part, gathered)
    return gathered


def _copy(tensors: Sequence[Tensor | None], part: slice, into: Tensor) -> None:
    for j, tensor in enumerate(tensors):
        if tensor is not None:
            into[:, j] = tensor[part]


def _inverse_rms(rows: Tensor, eps: float, *, out: Tensor) -> None:
    torch.linalg.vector_norm(rows, dim=1, out=out)
    out.square_().div_(rows.shape[1]).add_(eps).rsqrt_()
