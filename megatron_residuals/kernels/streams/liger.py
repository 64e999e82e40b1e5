# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""mHC by Liger (``liger_kernel``), where its mathematics is ours: in DeepSeek-V4's convention.

Three steps that autograd joins: the write, the coefficients, the read. Liger normalises the matrix
as it is projected, [old, new], and mixes with [new, old], so that one transposition lies between.
Its backward keeps every Sinkhorn iterate and adds with atomics, so that its sums depend on order.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_residuals.functional import streams as reference
from megatron_residuals.functional.streams import (
    MhcOptions,
    MhcWeights,
    StreamCoefficients,
    StreamRead,
    StreamUpdate,
)
from megatron_residuals.kernels.common import libraries

STREAMS = (1, 2, 4, 8, 16)


class Functions(NamedTuple):
    """``liger_mhc_coeffs``, ``liger_mhc_pre``, ``liger_mhc_post_res``."""

    coefficients: Callable[..., tuple[Tensor, Tensor, Tensor]]
    read: Callable[[Tensor, Tensor], Tensor]
    write: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def fault(num_streams: int, convention: str) -> str | None:
    """Why Liger has not this mHC; None if it has."""
    if convention != "dsv4":
        return f"Liger's mHC is the convention dsv4, not {convention}; use dsv4, or kernels='auto'"
    if num_streams not in STREAMS:
        allowed = ", ".join(map(str, STREAMS))
        return f"Liger's mHC takes {allowed} streams, not {num_streams}; or use kernels='auto'"
    return None


def update_and_read(
    before: StreamUpdate | Tensor, weights: MhcWeights, options: MhcOptions
) -> StreamRead:
    """``functional.update_and_read``.

    Raises:
        RuntimeError: Liger is not installed, or does not compute what the reference computes here.
        ValueError: it has not this convention, number of streams, dtype or size.
    """
    streams = write_streams(before) if isinstance(before, StreamUpdate) else before
    coefficients = mhc_coefficients(streams, weights, options)
    return StreamRead(streams, read_streams(streams, coefficients.h_pre), *coefficients)


def mhc_coefficients(
    streams: Tensor, weights: MhcWeights, options: MhcOptions
) -> StreamCoefficients:
    """``functional.mhc_coefficients``. Raises as ``update_and_read``."""
    _check_sizes(streams, *weights, options=options.checked())
    functions = _functions()
    _check_coefficients(functions, options, *streams.shape[-2:], streams.dtype, streams.device)
    return _coefficients(functions, options, streams, *weights)


def read_streams(streams: Tensor, h_pre: Tensor) -> Tensor:
    """``functional.read_streams``. Raises as ``update_and_read``."""
    _check_sizes(streams, h_pre)
    functions = _functions()
    _check_mixing(functions, *streams.shape[-2:], streams.dtype, streams.device)
    return _read(functions, streams, h_pre)


def write_streams(update: StreamUpdate) -> Tensor:
    """``functional.write_streams``. Raises as ``update_and_read``."""
    streams, output, h_post, h_res = update
    assert h_res is not None, "in Liger's convention streams are mixed"
    _check_sizes(streams, output, h_post, h_res)
    functions = _functions()
    _check_mixing(functions, *streams.shape[-2:], streams.dtype, streams.device)
    return _write(functions, update)


def _functions() -> Functions:
    def load() -> Functions:
        module = importlib.import_module("liger_kernel.transformers.functional")
        return Functions(module.liger_mhc_coeffs, module.liger_mhc_pre, module.liger_mhc_post_res)

    functions: Functions = libraries.imported(
        "liger", "liger_mhc of liger_kernel.transformers.functional", "mHC", load
    )
    return functions


def _check_sizes(streams: Tensor, *others: Tensor, options: MhcOptions | None = None) -> None:
    libraries.check_dtypes("liger", streams, *others)
    n, d = streams.shape[-2:]
    if why := fault(n, "dsv4" if options is None else options.convention):
        raise ValueError(f"kernels='liger' was requested, but {why}")
    per_token = max(n * d, n * n * (0 if options is None else options.iterations))
    if streams.numel() // (n * d) * per_token >= libraries.MAX_OFFSET:
        raise ValueError(
            f"kernels='liger' takes at most 2^31 - 1 numbers at once, and streams "
            f"{tuple(streams.shape)} are more; use kernels='auto'"
        )


def _rows(streams: Tensor) -> Tensor:
    return streams.reshape(-1, *streams.shape[-2:])


def _coefficients(
    functions: Functions,
    options: MhcOptions,
    streams: Tensor,
    mapping: Tensor,
    bias: Tensor,
    alpha: Tensor,
) -> StreamCoefficients:
    h_pre, h_post, comb = functions.coefficients(
        _rows(streams),
        mapping.float().t(),
        bias.float(),
        *alpha.float().unbind(),
        allow_fp32=True,
        tmax=options.iterations,
        rms_eps=options.eps,
        pre_eps=options.eps,
        sinkhorn_eps=options.eps,
        post_mult=2.0,
    )
    lead, n = streams.shape[:-2], streams.shape[-2]
    h_res = comb.transpose(-1, -2).reshape(*lead, n, n)
    return StreamCoefficients(h_pre.view(*lead, n), h_post.view(*lead, n), h_res)


def _read(functions: Functions, streams: Tensor, h_pre: Tensor) -> Tensor:
    n, d = streams.shape[-2:]
    x = functions.read(_rows(streams), h_pre.reshape(-1, n))
    return x.to(streams.dtype).view(*streams.shape[:-2], d)


def _write(functions: Functions, update: StreamUpdate) -> Tensor:
    streams, output, h_post, h_res = update
    assert h_res is not None, "in Liger's convention streams are mixed"
    n, d = streams.shape[-2:]
    rows = output.reshape(-1, d), h_post.reshape(-1, n), h_res.reshape(-1, n, n)
    written = functions.write(_rows(streams), *rows)
    return written.to(streams.dtype).view(streams.shape)


@functools.cache
def _check_coefficients(
    functions: Functions,
    options: MhcOptions,
    n: int,
    d: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    draw, columns = libraries.Draw(device), 2 * n + n * n
    streams = (draw(libraries.TOKENS, n, d) * _sizes(n, device)).to(dtype)
    mapping = draw(columns, n * d) / (n * d) ** 0.5
    inputs = [streams, mapping, draw(columns), 0.5 + 0.2 * draw(3)]

    def expected(streams: Tensor, *weights: Tensor) -> Any:
        return reference.mhc_coefficients(streams, MhcWeights(*weights), options)

    def theirs(*tensors: Tensor) -> Any:
        return _coefficients(functions, options, *tensors)

    libraries.compare("liger", "liger_mhc_coeffs", theirs, expected, inputs)


@functools.cache
def _check_mixing(
    functions: Functions, n: int, d: int, dtype: torch.dtype, device: torch.device
) -> None:
    draw, tokens = libraries.Draw(device), libraries.TOKENS
    streams = (draw(tokens, n, d) * _sizes(n, device)).to(dtype)
    output = draw(tokens, d).to(dtype)
    h_pre, *others = draw(tokens, n), draw(tokens, n), draw(tokens, n, n)

    def theirs(*tensors: Tensor) -> list[Tensor]:
        update, h_pre = StreamUpdate(*tensors[:4]), tensors[4]
        return [_read(functions, update.streams, h_pre), _write(functions, update)]

    def expected(*tensors: Tensor) -> list[Tensor]:
        update, h_pre = StreamUpdate(*tensors[:4]), tensors[4]
        return [reference.read_streams(update.streams, h_pre), reference.write_streams(update)]

    inputs = [streams, output, *others, h_pre]
    libraries.compare("liger", "liger_mhc_pre with liger_mhc_post_res", theirs, expected, inputs)


def _sizes(n: int, device: torch.device) -> Tensor:
    # unequal streams show which is which
    return torch.arange(1.0, n + 1, device=device).unsqueeze(-1)
