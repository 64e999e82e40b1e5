# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over depth: a sublayer's learned query attends to the outputs of earlier sublayers.

Shapes: every source [..., d]; query and key_gain [d]. Queries are parameters, so all sublayers of a
block can attend to the finished sources at once (phase 1, `read_closed`) and later merge what they
got with the running sum (phase 2, `merge_running`); that is the same function as `read_sources`
over all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_residuals.functional.precision import wide_dtype, without_autocast


class SourceScores(NamedTuple):
    """What the logits of m sources are made of, float32 or wider: <source_j, direction>, 1 / rms.

    ``direction`` is query o key_gain, into which the gain of the keys' norm folds.
    """

    dots: Tensor
    rstd: Tensor

    @property
    def logits(self) -> Tensor:
        """query . RMSNorm(source_j; key_gain)."""
        return self.rstd * self.dots


class ClosedRead(NamedTuple):
    """What the finished sources alone give one reader.

    Attributes:
        values: weighted sum over these sources [..., d], in their dtype.
        lse: log of the sum of the exponentials of their logits [...], float32 or wider.
        direction: query o key_gain of the reader [d], float32 or wider.
    """

    values: Tensor
    lse: Tensor
    direction: Tensor


def direction_of(query: Tensor, key_gain: Tensor, source: Tensor) -> Tensor:
    """query o key_gain [d] in the dtype of the scores of a source: float32 or wider."""
    dtype = wide_dtype(source)
    return query.to(dtype) * key_gain.to(dtype)


def score_sources(sources: Sequence[Tensor], direction: Tensor, *, eps: float) -> SourceScores:
    """dot_j = <source_j, direction> and rstd_j = 1 / rms(source_j).    -> two of [m, ...]

    The sources are read one by one, never stacked.
    """
    dots, rstd = [], []
    for source in sources:
        keys = source.to(direction.dtype)
        rstd.append(torch.rsqrt(keys.square().mean(-1) + eps))
        with without_autocast(keys):
            scores = torch.mv(keys.reshape(-1, keys.shape[-1]), direction)
        dots.append(scores.view(keys.shape[:-1]))
    return SourceScores(torch.stack(dots), torch.stack(rstd))


def depth_weights(
    sources: Sequence[Tensor], query: Tensor, key_gain: Tensor, *, eps: float
) -> Tensor:
    """alpha = softmax_j( query . RMSNorm(source_j; key_gain) ).    -> [m, ...], float32 or wider

    Attention Residuals (arXiv 2603.15031), section 3: no 1/sqrt(d), one softmax per token over the
    m sources.
    """
    direction = direction_of(query, key_gain, sources[0])
    return torch.softmax(score_sources(sources, direction, eps=eps).logits, dim=0)


def mix_sources(sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    """x = sum_j weights_j source_j.    weights [m, ...] -> [..., d] in the dtype of the sources"""
    mixed = weights[0].unsqueeze(-1) * sources[0].to(weights.dtype)
    for weight, source in zip(weights[1:], sources[1:], strict=True):
        mixed = mixed + weight.unsqueeze(-1) * source.to(weights.dtype)
    return mixed.to(sources[0].dtype)


def read_sources(
    sources: Sequence[Tensor], query: Tensor, key_gain: Tensor, *, eps: float
) -> Tensor:
    """x = sum_j alpha_j source_j, with the raw (not normalised) sources as values.

    -> [..., d] in the dtype of the sources (Attention Residuals, eq. 3 and 6).
    """
    return mix_sources(sources, depth_weights(sources, query, key_gain, eps=eps))


def read_closed(
    sources: Sequence[Tensor], directions: Tensor, *, eps: float
) -> tuple[ClosedRead, ...]:
    """Phase 1: what every reader gets from the finished sources.

    directions [S, d] are the products query o key_gain of S readers (Attention Residuals, section
    4.2).
    """
    reads = []
    for direction in directions.to(wide_dtype(sources[0])).unbind():
        logits = score_sources(sources, direction, eps=eps).logits
        values = mix_sources(sources, torch.softmax(logits, dim=0))
        reads.append(ClosedRead(values, torch.logsumexp(logits, dim=0), direction))
    return tuple(reads)


def merge_running(
    read: ClosedRead, partial: Tensor, output: Tensor | None = None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Phase 2: one reader's x [..., d] and the running sum, an output added to it first.

    x = (1 - p) values + p partial with p = sigmoid(logit of the partial - lse): the online softmax
    over the finished sources and one more. ``output`` is what a sublayer has returned and nobody
    added yet.
    """
    if output is not None:
        partial = partial + output
    direction = read.direction.to(wide_dtype(partial))
    weight = torch.sigmoid(score_sources([partial], direction, eps=eps).logits[0] - read.lse)
    x = mix_sources([read.values, partial], torch.stack([1 - weight, weight]))
    return x, partial


def head_weights(
    sources: Sequence[Tensor], query: Tensor, key_gain: Tensor, *, eps: float, heads: int
) -> Tensor:
    """alpha^(h) = softmax_j( query_h . RMSNorm(source_j; key_gain)_h ).    -> [m, ..., heads]

    Keys are normalised over all of d and then cut into H slices, each with a softmax of its own
    (Multi-Head Attention Residuals, arXiv 2607.27230, eq. 3): one head is ``depth_weights``.
    """
    direction = direction_of(query, key_gain, sources[0]).view(heads, -1)
    logits = []
    for source in sources:
        keys = _by_heads(source.to(direction.dtype), heads)
        rstd = torch.rsqrt(keys.square().mean((-2, -1)) + eps)
        logits.append((keys * direction).sum(-1) * rstd.unsqueeze(-1))
    return torch.softmax(torch.stack(logits), dim=0)


def read_by_heads(
    sources: Sequence[Tensor],
    query: Tensor,
    key_gain: Tensor,
    *,
    eps: float,
    heads: int = 1,
    additive: bool = False,
) -> Tensor:
    """``read_sources`` with weights of their own for each of H slices of d.    -> [..., d]

    ``additive`` adds what is read to the stream of a plain model, which is the sum of all sources
    (Delta Attention Residuals, arXiv 2605.18855): x^(h) = sum_j (1 + alpha^(h)_j) source^(h)_j.
    """
    wide = [source.to(wide_dtype(source)) for source in sources]  # once: one rounding of gradients
    weights = head_weights(wide, query, key_gain, eps=eps, heads=heads) + additive
    pairs = zip(weights.unsqueeze(-1), wide, strict=True)
    parts = (weight * _by_heads(source, heads) for weight, source in pairs)
    mixed: Tensor = functools.reduce(torch.add, parts).flatten(-2)
    return mixed.to(sources[0].dtype)


def _by_heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor.view(*tensor.shape[:-1], heads, -1)
