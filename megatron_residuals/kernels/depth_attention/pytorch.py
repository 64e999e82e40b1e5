# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The backend in plain PyTorch, a few tokens at a time so that they stay in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_residuals.functional.depth_attention import (
    ClosedRead,
    SourceScores,
    mix_sources,
    score_sources,
)
from megatron_residuals.kernels.common.scratch import Scratch, ranges
from megatron_residuals.kernels.depth_attention.contract import Merged, OptionalTensors

# of a chunk's numbers in float32; where there is no cache to stay in, few and large operations
CHUNK_BYTES = {"cpu": 2**20}
OTHER_CHUNK_BYTES = 2**27


def read_sources(
    sources: Sequence[Tensor], direction: Tensor, eps: float
) -> tuple[Tensor, SourceScores]:
    """x [T, d], and scores [m, T] of one reader, as the reference computes them."""
    scores = score_sources(sources, direction, eps=eps)
    return mix_sources(sources, torch.softmax(scores.logits, dim=0)), scores


def read_sources_backward(
    gradient: Tensor,
    sources: Sequence[Tensor],
    direction: Tensor,
    scores: SourceScores,
    sums: OptionalTensors,
    fresh: OptionalTensors,
) -> Tensor:
    """`read_closed_backward` of one reader."""
    by_token = SourceScores(scores.dots.T.contiguous().unsqueeze(0), scores.rstd.T.contiguous())
    zeros = [_zeros(new, direction.dtype) for new in fresh]
    totals = [total if new is None else new for new, total in zip(zeros, sums, strict=True)]
    directions = direction.unsqueeze(0)
    found = read_closed_backward([gradient], [None], sources, directions, by_token, totals)
    for new, total in zip(fresh, zeros, strict=True):
        if new is not None and total is not None:
            Scratch.store(new, total)
    return found[0]


def _zeros(like: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The tensor itself, if it has the dtype."""
    if like is None:
        return None
    return like.zero_() if like.dtype == dtype else torch.zeros_like(like, dtype=dtype)


def read_closed(
    sources: Sequence[Tensor], directions: Tensor, eps: float
) -> tuple[list[Tensor], Tensor, SourceScores]:
    """Values, lse [S, T], dots [S, T, m] and rstd [T, m] in one pass over the sources."""
    size, (tokens, d), m = len(directions), sources[0].shape, len(sources)
    scores = SourceScores(directions.new_empty(size, tokens, m), directions.new_empty(tokens, m))
    values = [torch.empty_like(sources[0]) for _ in range(size)]
    keys_scratch = directions.new_empty(_step(m * d, directions, 1), m, d)
    scratch = Scratch(directions.dtype)
    for part in ranges(tokens, len(keys_scratch)):
        keys = _gather(sources, part, keys_scratch)
        rows, rstd = keys.view(-1, d), scores.rstd[part]
        _rstd(rows, eps, out=rstd.view(-1))
        for s in range(size):
            dots, chunk = scores.dots[s, part], values[s][part]
            torch.mv(rows, directions[s], out=dots.view(-1))
            weights = torch.softmax(dots * rstd, dim=1)
            mixed = scratch.target("mixed", chunk)
            torch.bmm(weights.unsqueeze(1), keys, out=mixed.unsqueeze(1))
            scratch.store(chunk, mixed)
    lses = [torch.logsumexp(dots * scores.rstd, dim=1) for dots in scores.dots]
    return values, torch.stack(lses), scores


def read_closed_backward(
    gradients: OptionalTensors,
    d_lses: OptionalTensors,
    sources: Sequence[Tensor],
    directions: Tensor,
    scores: SourceScores,
    sums: OptionalTensors,
) -> Tensor:
    """One pass over the sources, in each chunk of tokens the last reader first."""
    (tokens, d), m = sources[0].shape, len(sources)
    d_directions = torch.zeros_like(directions)
    keys_scratch = directions.new_empty(_step(m * d, directions, 2), m, d)
    sums_scratch = torch.zeros_like(keys_scratch)
    pair_scratch = directions.new_empty(len(keys_scratch), 2, d)
    for part in ranges(tokens, len(keys_scratch)):
        keys = _gather(sources, part, keys_scratch)
        totals, pair = sums_scratch[: len(keys)], pair_scratch[: len(keys)]
        _copy(sums, part, totals)
        for s in reversed(range(len(directions))):
            gradient, d_lse = gradients[s], d_lses[s]
            if gradient is None and d_lse is None:
                continue
            pair[:, 0] = 0 if gradient is None else gradient[part]
            pair[:, 1] = directions[s]
            rstd, dots = scores.rstd[part], scores.dots[s, part]
            weights = torch.softmax(dots * rstd, dim=1)
            # with both of the pair, as one column of it would be multiplied the slow way
            products = torch.bmm(keys, pair.transpose(1, 2))[:, :, 0]
            mean = (weights * products).sum(1, keepdim=True)
            if d_lse is not None:
                mean -= d_lse[part].unsqueeze(1)
            d_dots = weights * (products - mean) * rstd
            totals.baddbmm_(torch.stack((weights, d_dots), dim=2), pair)
            shrink = d_dots * dots * rstd.square() / d
            totals.addcmul_(keys, shrink.unsqueeze(2), value=-1)
            d_directions[s].addmv_(keys.view(-1, d).T, d_dots.view(-1))
        for j, total in enumerate(sums):
            if total is not None:
                total[part] = totals[:, j]
    return d_directions


def merge_running(read: ClosedRead, partial: Tensor, output: Tensor | None, eps: float) -> Merged:
    """Add, score and merge, chunk by chunk."""
    direction, (tokens, d) = read.direction, partial.shape
    total = partial if output is None else torch.empty_like(partial)
    numbers = (direction.new_empty(tokens) for _ in range(3))
    merged, scratch = Merged(torch.empty_like(partial), total, *numbers), Scratch(direction.dtype)
    for part in ranges(tokens, _step(d, direction, 4)):
        if output is not None:
            torch.add(partial[part], output[part], out=total[part])
        x, chunk, dots, rstd, weight = (each[part] for each in merged)
        keys = scratch.wide("keys", chunk)
        _rstd(keys, eps, out=rstd)
        torch.mv(keys, direction, out=dots)
        torch.sigmoid(dots * rstd - read.lse[part], out=weight)
        mixed, values = scratch.target("merged", x), scratch.wide("values", read.values[part])
        torch.lerp(values, keys, weight.unsqueeze(1), out=mixed)
        scratch.store(x, mixed)
    return merged


def merge_running_backward(
    gradient: Tensor, d_partial: Tensor | None, direction: Tensor, merged: Merged
) -> tuple[ClosedRead, Tensor]:
    """All gradients of a chunk while it is in the cache."""
    tokens, d = merged.x.shape
    d_values, d_total = torch.empty_like(merged.x), torch.empty_like(merged.partial)
    d_lse, d_direction = torch.empty_like(merged.weight), torch.zeros_like(direction)
    scratch = Scratch(direction.dtype)
    for part in ranges(tokens, _step(d, direction, 6)):
        x, partial, dots, rstd, p = (each[part] for each in merged)
        g = scratch.wide("gradient", gradient[part])
        keys, mean = scratch.wide("keys", partial), scratch.wide("x", x)
        d_logit = p * (torch.linalg.vecdot(g, keys) - torch.linalg.vecdot(g, mean))
        torch.neg(d_logit, out=d_lse[part])
        chunk = d_values[part]
        others = scratch.target("values", chunk)
        torch.mul(g, (1 - p).unsqueeze(1), out=others)
        scratch.store(chunk, others)
        d_dots = d_logit * rstd
        d_direction.addmv_(keys.T, d_dots)
        chunk = d_total[part]
        total = scratch.target("total", chunk)
        torch.mul(g, p.unsqueeze(1), out=total)
        total.addcmul_(d_dots.unsqueeze(1), direction)
        total.addcmul_((d_dots * dots * rstd.square() / d).unsqueeze(1), keys, value=-1)
        if d_partial is not None:
            total += d_partial[part]
        scratch.store(chunk, total)
    return ClosedRead(d_values, d_lse, d_direction), d_total


def _step(numbers: int, like: Tensor, buffers: int) -> int:
    """Tokens of a chunk, of which ``buffers`` copies of so many numbers each are in the cache."""
    budget = CHUNK_BYTES.get(like.device.type, OTHER_CHUNK_BYTES)
    return max(1, budget // max(1, buffers * numbers * like.element_size()))


def _gather(sources: Sequence[Tensor], part: slice, scratch: Tensor) -> Tensor:
    """Some tokens of every source, as [tokens, m, d] in the scratch's dtype."""
    gathered = scratch[: part.stop - part.start]
    _copy(sources, part, gathered)
    return gathered


def _copy(tensors: OptionalTensors, part: slice, into: Tensor) -> None:
    for j, tensor in enumerate(tensors):
        if tensor is not None:
            into[:, j] = tensor[part]


def _rstd(rows: Tensor, eps: float, *, out: Tensor) -> None:
    torch.linalg.vector_norm(rows, dim=1, out=out)
    out.square_().div_(rows.shape[1]).add_(eps).rsqrt_()
