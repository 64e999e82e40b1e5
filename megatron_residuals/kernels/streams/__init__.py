# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hyper-Connections as they are trained: streams read, written and weighed with lean autograd."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron_residuals.functional import streams as reference
from megatron_residuals.functional.precision import wide_dtype
from megatron_residuals.functional.streams import (
    MhcOptions,
    MhcWeights,
    StreamCoefficients,
    StreamRead,
    StreamUpdate,
)
from megatron_residuals.kernels.common.autograd import recomputed
from megatron_residuals.kernels.common.dispatch import resolve
from megatron_residuals.kernels.common.libraries import outside_graphs
from megatron_residuals.kernels.streams import liger
from megatron_residuals.kernels.streams.autograd import ReadStreams, UpdateAndRead, WriteStreams

LIBRARIES = ("liger",)


def read_streams(streams: Tensor, h_pre: Tensor, *, backend: str = "auto") -> Tensor:
    """``functional.read_streams``; keeps references to both inputs.

    Raises:
        ValueError: unknown backend, or one that does not take the dtype.
        RuntimeError: the backend was asked for and cannot run.
    """
    if backend == "liger":
        return outside_graphs(liger.read_streams)(streams, h_pre)
    chosen = resolve(backend, streams, what="read_streams", libraries=LIBRARIES)
    x: Tensor = ReadStreams.apply(chosen, streams, h_pre)
    return x


def write_streams(update: StreamUpdate, *, backend: str = "auto") -> Tensor:
    """``functional.write_streams``; keeps references to its inputs. Raises as ``read_streams``."""
    if backend == "liger":
        return outside_graphs(liger.write_streams)(update)
    chosen = resolve(backend, update.streams, what="write_streams", libraries=LIBRARIES)
    written: Tensor = WriteStreams.apply(chosen, *update)
    return written


def update_and_read(
    before: StreamUpdate | Tensor,
    weights: MhcWeights,
    options: MhcOptions,
    reads: Tensor | None = None,
    *,
    backend: str = "auto",
) -> StreamRead:
    """``functional.update_and_read``; without ``reads``, h_pre is for looking at, with no gradient.

    Everything mHC does between two sublayers is one step of autograd: the streams between them are
    written and read back once, and their gradient is never stored. Kept are references to the
    inputs, the streams and h_pre, and K + 1 numbers per token. With the backend ``liger`` it
    is three steps instead of one, and keeps more.

    Raises:
        ValueError: unknown convention or backend, or one that does not take the dtype or shape.
        RuntimeError: the backend was asked for and cannot run.
    """
    if backend == "liger":
        return outside_graphs(liger.update_and_read)(before, weights, options)
    inputs = before if isinstance(before, StreamUpdate) else (before, None, None, None)
    chosen = resolve(
        backend,
        inputs[0],
        what="boundary of mHC sublayers",
        supported=wide_dtype(inputs[0], weights.mapping) == torch.float32,
        libraries=LIBRARIES,
    )
    if chosen == "torch" and torch.compiler.is_compiling():
        # a compiler fuses the plain formulas better than the chunks made for a cache
        return reference.update_and_read(before, weights, options, reads)
    found = UpdateAndRead.apply(chosen, options.checked(), reads, *inputs, *weights)
    return StreamRead(*found)


def mhc_coefficients(
    streams: Tensor, weights: MhcWeights, options: MhcOptions
) -> StreamCoefficients:
    """``functional.mhc_coefficients``; keeps a reference to the streams, and the logits.

    The Sinkhorn iterates are worked out again in backward and differentiated exactly.
    """

    def logits(streams: Tensor, *weights: Tensor) -> Tensor:
        return reference.mhc_logits(streams, MhcWeights(*weights), options)

    activate = functools.partial(
        reference.mhc_activations, num_streams=streams.shape[-2], options=options
    )
    return StreamCoefficients(*recomputed(activate, recomputed(logits, streams, *weights)))


def mhc_head_weights(
    streams: Tensor,
    mapping: Tensor,
    bias: Tensor,
    scale: Tensor,
    *,
    eps: float,
    gate_eps: float | None = None,
) -> Tensor:
    """``functional.mhc_head_weights``; keeps a reference to the streams."""
    head = functools.partial(reference.mhc_head_weights, eps=eps, gate_eps=gate_eps)
    weights: Tensor = recomputed(head, streams, mapping, bias, scale)
    return weights


def hc_coefficients(
    streams: Tensor,
    static: StreamCoefficients,
    mapping: Tensor | None,
    scale: Tensor | None,
    *,
    norm: str,
    eps: float,
) -> StreamCoefficients:
    """``functional.hc_coefficients``; keeps a reference to the streams."""
    if mapping is None or scale is None:
        return reference.hc_coefficients(streams, static, mapping, scale, norm=norm, eps=eps)

    def compute(streams: Tensor, mapping: Tensor, scale: Tensor, *static: Tensor) -> Any:
        return tuple(
            reference.hc_coefficients(
                streams, StreamCoefficients(*static), mapping, scale, norm=norm, eps=eps
            )
        )

    assert static.h_res is not None, "HC mixes streams"
    given = (static.h_pre, static.h_post, static.h_res)
    return StreamCoefficients(*recomputed(compute, streams, mapping, scale, *given))
