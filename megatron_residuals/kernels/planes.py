# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Streams written, projected and read in plain PyTorch, a few tokens at a time.

Streams are [T, n, d], one row for each token [T, d]. A chunk of tokens fits the cache: 16-bit ones
are widened to float32 there, and all that is wanted of it is done before the next one is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_residuals.kernels.coefficients import MhcWeights, gate, update_coefficients
from megatron_residuals.kernels.sinkhorn import MhcOptions

CACHED_NUMBERS = 2**18  # of one chunk's streams: a megabyte in float32
UNCACHED_NUMBERS = 2**28  # off the CPU only the memory of the temporaries counts


def chunks(streams: Tensor) -> Iterator[slice]:
    """Ranges of tokens to be worked on together."""
    tokens, n, d = streams.shape
    numbers = CACHED_NUMBERS if streams.device.type == "cpu" else UNCACHED_NUMBERS
    size = max(16, numbers // (n * d))
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


class Buffers:
    """Chunks of planes in one dtype: themselves, or copies in memory that every chunk uses again.

    A buffer has a name, and is what it was until somebody asks for that name again.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._found: dict[str, Tensor] = {}

    def new(self, name: str, like: Tensor) -> Tensor:
        """A buffer of the shape of a chunk."""
        found = self._found.get(name)
        if found is None or found.shape[0] < like.shape[0]:
            found = self._found[name] = torch.empty_like(like, dtype=self._dtype)
        return found[: like.shape[0]]

    def wide(self, name: str, chunk: Tensor) -> Tensor:
        """The chunk to read from."""
        return chunk if chunk.dtype == self._dtype else self.new(name, chunk).copy_(chunk)

    def target(self, name: str, chunk: Tensor) -> Tensor:
        """Where to write what goes into a chunk, by `store` in the end."""
        return chunk if chunk.dtype == self._dtype else self.new(name, chunk)

    @staticmethod
    def store(chunk: Tensor, target: Tensor) -> None:
        """Round a target into its chunk, if it is not the chunk itself."""
        if chunk is not target:
            chunk.copy_(target)


def read(streams: Tensor, h_pre: Tensor) -> Tensor:
    """sum_i h_pre[i] streams[i].    [T, n, d], [T, n] -> [T, d]"""
    result = streams.new_empty(streams.shape[0], streams.shape[2])
    buffers = Buffers(h_pre.dtype)
    for chunk in chunks(streams):
        _read_chunk(buffers.wide("wide", streams[chunk]), h_pre[chunk], result[chunk], buffers)
    return result


def _read_chunk(wide: Tensor, h_pre: Tensor, result: Tensor, buffers: Buffers) -> None:
    mixed = buffers.target("read", result)
    torch.bmm(h_pre.unsqueeze(1), wide, out=mixed.unsqueeze(1))
    buffers.store(result, mixed)


class Update(NamedTuple):
    """A write: streams [T, n, d], output [T, d], h_post [T, n], h_res [T, n, n]."""

    streams: Tensor
    output: Tensor
    h_post: Tensor
    h_res: Tensor

    def part(self, chunk: slice) -> Update:
        """Of some tokens."""
        return Update(*(each[chunk] for each in self))


def write(update: Update) -> Tensor:
    """sum_i h_res[j, i] streams[i] + h_post[j] output.    -> [T, n, d]"""
    result, buffers = torch.empty_like(update.streams), Buffers(update.h_res.dtype)
    for chunk in chunks(result):
        _write_chunk(update.part(chunk), result[chunk], buffers)
    return result


def _write_chunk(update: Update, result: Tensor, buffers: Buffers) -> Tensor:
    """The result as well before it is rounded."""
    streams = buffers.wide("streams", update.streams)
    output = buffers.wide("output", update.output)
    wide = torch.bmm(update.h_res, streams, out=buffers.target("wide", result))
    wide.baddbmm_(update.h_post.unsqueeze(2), output.unsqueeze(1))
    buffers.store(result, wide)
    return wide


class BoundaryValues(NamedTuple):
    """What ``update_and_read`` computes.

    Attributes:
        written: the streams [T, n, d] after the write; None without one.
        read: what the next sublayer gets [T, d].
        h_pre, h_post, h_res: coefficients of that sublayer, [T, n] and [T, n, n].
        mixes: 2n + n^2 + 1 numbers per token, from which they can be computed again.
    """

    written: Tensor | None
    read: Tensor
    h_pre: Tensor
    h_post: Tensor
    h_res: Tensor
    mixes: Tensor


def update_and_read(
    before: Update | Tensor, weights: MhcWeights, options: MhcOptions
) -> BoundaryValues:
    """Writes (unless given just the streams), projects and reads in one pass over the streams."""
    update = before if isinstance(before, Update) else None
    streams = before.streams if isinstance(before, Update) else before
    tokens, n, d = streams.shape
    buffers = Buffers(weights.mapping.dtype)
    written = streams if update is None else torch.empty_like(streams)
    read = streams.new_empty(tokens, d)
    mixes = weights.mapping.new_empty(weights.bias.shape[0] + 1, tokens)
    h_pre = weights.mapping.new_empty(tokens, n)
    for chunk in chunks(streams):
        part = written[chunk]
        if update is not None:
            wide = _write_chunk(update.part(chunk), part, buffers)
            # rounded, as everyone else will see it
            wide = wide if wide is part else wide.copy_(part)
        else:
            wide = buffers.wide("wide", part)
        project(wide.flatten(1), weights.mapping, mixes[:, chunk])
        h_pre[chunk] = gate(mixes[:, chunk], weights, n, options).t()
        _read_chunk(wide, h_pre[chunk], read[chunk], buffers)
    h_post, h_res = update_coefficients(mixes, weights, n, options)
    others = (h_post.t(), h_res.permute(2, 0, 1), mixes)
    return BoundaryValues(None if update is None else written, read, h_pre, *others)


def project(flat: Tensor, mapping: Tensor, mixes: Tensor) -> None:
    """mapping x and |x|^2 of streams [t, n d], into mixes [K + 1, t]."""
    mixes[:-1] = torch.mm(flat, mapping.t()).t()
    torch.square(torch.linalg.vector_norm(flat, dim=1), out=mixes[-1])
