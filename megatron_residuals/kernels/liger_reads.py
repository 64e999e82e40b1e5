# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Reads of depth sources by Liger (``liger_kernel``), where its result is ours.

Only on explicit wish, and only single reads: its kernel returns no log_sum, which two phases need.
It reads one tensor, so every read copies all its sources and keeps the copy for backward.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_residuals.kernels import external

MAX_OFFSET = 2**31  # its kernels address with 32 bits


def read_sources(
    sources: Sequence[Tensor], query: Tensor, key_gain: Tensor, *, eps: float
) -> Tensor:
    """``functional.read_sources`` by ``liger_kernel.transformers.functional.liger_attn_res``.

    Raises:
        RuntimeError: it is not installed, or does not compute what the reference computes here.
        ValueError: it has no kernel for the dtype, or the sources are too large.
    """
    external.check_dtypes("liger", sources[0], query, key_gain)
    if (numbers := len(sources) * sources[0].numel()) >= MAX_OFFSET:
        raise ValueError(
            f"kernels='liger' reads at most 2^31 - 1 numbers at once, and {len(sources)} sources "
            f"{tuple(sources[0].shape)} are {numbers}; use kernels='auto'"
        )
    _fused()
    external.check_read("liger", "liger_attn_res", _read, sources)
    return _read(sources, query, key_gain, eps)


def _fused() -> Callable[..., Tensor]:
    fused: Callable[..., Tensor] = external.imported(
        "liger",
        "liger_kernel.transformers.functional.liger_attn_res",
        "reads of depth sources",
        lambda: importlib.import_module("liger_kernel.transformers.functional").liger_attn_res,
    )
    return fused


def _read(sources: Sequence[Tensor], query: Tensor, key_gain: Tensor, eps: float) -> Tensor:
    shape = sources[0].shape
    stacked = torch.stack([source.reshape(-1, shape[-1]) for source in sources])
    return _fused()(stacked, query, key_gain, eps).to(stacked.dtype).view(shape)
