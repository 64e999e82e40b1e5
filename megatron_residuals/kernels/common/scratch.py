# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Memory for working on a few tokens at a time, so that they stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def ranges(tokens: int, size: int) -> Iterator[slice]:
    """All tokens, at most ``size`` at a time."""
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


class Scratch:
    """Chunks of tensors in one dtype: themselves, or copies in memory that every chunk uses again.

    A piece of memory has a name, and is what it was until somebody asks for that name again.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._found: dict[str, Tensor] = {}

    def new(self, name: str, like: Tensor) -> Tensor:
        """Memory of the shape of a chunk."""
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
