# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Reads of depth sources by flash-linear-attention (``fla``), where its result is ours.

Only on explicit wish, and only single reads: its kernel returns no log_sum, which two phases need.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from torch import Tensor

from megatron_residuals.kernels import external


def read_sources(
    sources: Sequence[Tensor], query: Tensor, key_gain: Tensor, *, eps: float
) -> Tensor:
    """``functional.read_sources`` by ``fla.ops.attnres.fused_attnres``.

    Raises:
        RuntimeError: it is not installed, or does not compute what the reference computes here.
        ValueError: it has no kernel for the dtype.
    """
    external.check_dtypes("fla", sources[0], query, key_gain)
    _fused()
    external.check_read("fla", "fused_attnres", _read, sources)
    return _read(sources, query, key_gain, eps)


def _fused() -> Callable[..., Tensor]:
    fused: Callable[..., Tensor] = external.imported(
        "fla",
        "fla.ops.attnres.fused_attnres",
        "reads of depth sources",
        lambda: importlib.import_module("fla.ops.attnres").fused_attnres,
    )
    return fused


def _read(sources: Sequence[Tensor], query: Tensor, key_gain: Tensor, eps: float) -> Tensor:
    shape = sources[0].shape
    values = [source.reshape(1, -1, shape[-1]) for source in sources]
    return _fused()(query, values, key_gain, rms_eps=eps).view(shape)
