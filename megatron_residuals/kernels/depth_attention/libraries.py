# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Reads of depth sources by ``fla`` or Liger, where their result is ours.

Only on explicit wish, and only single reads: their kernels return no lse, which two phases need.
Liger's reads one tensor, so every read copies all its sources and keeps the copy for backward.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_residuals.functional import depth_attention as reference
from megatron_residuals.kernels.common import libraries

Read = Callable[[Sequence[Tensor], Tensor, Tensor, float], Tensor]

FUNCTIONS = {
    "fla": ("fla.ops.attnres", "fused_attnres"),
    "liger": ("liger_kernel.transformers.functional", "liger_attn_res"),
}


def read_sources(
    library: str, sources: Sequence[Tensor], query: Tensor, key_gain: Tensor, *, eps: float
) -> Tensor:
    """``functional.read_sources`` by the library's own kernel.

    Raises:
        RuntimeError: it is not installed, or does not compute what the reference computes here.
        ValueError: it has no kernel for the dtype, or the sources are too large.
    """
    libraries.check_dtypes(library, sources[0], query, key_gain)
    numbers = len(sources) * sources[0].numel()
    if library == "liger" and numbers >= libraries.MAX_OFFSET:
        raise ValueError(
            f"kernels='liger' reads at most 2^31 - 1 numbers at once, and {len(sources)} sources "
            f"{tuple(sources[0].shape)} are {numbers}; use kernels='auto'"
        )
    _function(library)
    first = sources[0]
    # kernels are made for powers of two; the largest of a kind shows a source that is left out
    count = 1 << max(2, (len(sources) - 1).bit_length())
    _check(library, count, first.shape[-1], first.dtype, first.device)
    return READS[library](sources, query, key_gain, eps)


def _function(library: str) -> Callable[..., Tensor]:
    module, name = FUNCTIONS[library]
    function: Callable[..., Tensor] = libraries.imported(
        library,
        f"{module}.{name}",
        "reads of depth sources",
        lambda: getattr(importlib.import_module(module), name),
    )
    return function


def _read_by_fla(sources: Sequence[Tensor], query: Tensor, key_gain: Tensor, eps: float) -> Tensor:
    shape = sources[0].shape
    values = [source.reshape(1, -1, shape[-1]) for source in sources]
    return _function("fla")(query, values, key_gain, rms_eps=eps).view(shape)


def _read_by_liger(
    sources: Sequence[Tensor], query: Tensor, key_gain: Tensor, eps: float
) -> Tensor:
    shape = sources[0].shape
    stacked = torch.stack([source.reshape(-1, shape[-1]) for source in sources])
    read = _function("liger")(stacked, query, key_gain, eps)
    return read.to(stacked.dtype).view(shape)


READS: dict[str, Read] = {"fla": _read_by_fla, "liger": _read_by_liger}


@functools.cache
def _check(
    library: str, count: int, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a read that differs from the reference; once for each kind."""
    draw, eps = libraries.Draw(device), 1e-6
    sources = [draw(libraries.TOKENS, hidden_size).to(dtype) for _ in range(count)]
    query, gain = draw(hidden_size), 1 + 0.3 * draw(hidden_size)
    query = 2 * query / hidden_size**0.5

    def theirs(*tensors: Tensor) -> list[Tensor]:
        *sources, query, gain = tensors
        return [READS[library](sources, query, gain, eps)]

    def expected(*tensors: Tensor) -> list[Tensor]:
        *sources, query, gain = tensors
        return [reference.read_sources(sources, query, gain, eps=eps)]

    inputs = [*sources, query, gain]
    libraries.compare(library, FUNCTIONS[library][1], theirs, expected, inputs)
