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
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_residuals.functional import streams as reference
from megatron_residuals.functional.streams import Boundary, StreamCoefficients, StreamUpdate
from megatron_residuals.kernels import external
from megatron_residuals.kernels.liger_reads import MAX_OFFSET
from megatron_residuals.kernels.sinkhorn import MhcOptions

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
    streams: Tensor,
    update: StreamUpdate | None,
    mapping: Tensor,
    bias: Tensor,
    alpha: Tensor,
    *,
    convention: str,
    iterations: int,
    eps: float,
) -> Boundary:
    """``functional.update_and_read``.

    Raises:
        RuntimeError: Liger is not installed, or does not compute what the reference computes here.
        ValueError: it has not this convention, number of streams, dtype or size.
    """
    if update is not None:
        streams = write_streams(streams, update.h_post, update.h_res, update.output)
    coefficients = mhc_coefficients(
        streams, mapping, bias, alpha, convention=convention, iterations=iterations, eps=eps
    )
    return Boundary(streams, read_streams(streams, coefficients.h_pre), *coefficients)


def mhc_coefficients(
    streams: Tensor,
    mapping: Tensor,
    bias: Tensor,
    alpha: Tensor,
    *,
    convention: str,
    iterations: int,
    eps: float,
) -> StreamCoefficients:
    """``functional.mhc_coefficients``. Raises as ``update_and_read``."""
    options = MhcOptions(convention, iterations, eps).checked()
    _check_sizes(streams, mapping, bias, alpha, options=options)
    functions = _functions()
    _check_coefficients(functions, options, *streams.shape[-2:], streams.dtype, streams.device)
    return _coefficients(functions, options, streams, mapping, bias, alpha)


def read_streams(streams: Tensor, h_pre: Tensor) -> Tensor:
    """``functional.read_streams``. Raises as ``update_and_read``."""
    _check_sizes(streams, h_pre)
    functions = _functions()
    _check_mixing(functions, *streams.shape[-2:], streams.dtype, streams.device)
    return _read(functions, streams, h_pre)


def write_streams(streams: Tensor, h_post: Tensor, h_res: Tensor, output: Tensor) -> Tensor:
    """``functional.write_streams``. Raises as ``update_and_read``."""
    _check_sizes(streams, output, h_post, h_res)
    functions = _functions()
    _check_mixing(functions, *streams.shape[-2:], streams.dtype, streams.device)
    return _write(functions, streams, h_post, h_res, output)


def _functions() -> Functions:
    def load() -> Functions:
        module = importlib.import_module("liger_kernel.transformers.functional")
        return Functions(module.liger_mhc_coeffs, module.liger_mhc_pre, module.liger_mhc_post_res)

    functions: Functions = external.imported(
        "liger", "liger_mhc of liger_kernel.transformers.functional", "mHC", load
    )
    return functions


def _check_sizes(streams: Tensor, *others: Tensor, options: MhcOptions | None = None) -> None:
    external.check_dtypes("liger", streams, *others)
    n, d = streams.shape[-2:]
    if why := fault(n, "dsv4" if options is None else options.convention):
        raise ValueError(f"kernels='liger' was requested, but {why}")
    per_token = max(n * d, n * n * (0 if options is None else options.iterations))
    if streams.numel() // (n * d) * per_token >= MAX_OFFSET:
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


def _write(
    functions: Functions, streams: Tensor, h_post: Tensor, h_res: Tensor, output: Tensor
) -> Tensor:
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
    draw, columns = external.Draw(device), 2 * n + n * n
    streams = (draw(external.TOKENS, n, d) * _sizes(n, device)).to(dtype)
    mapping = draw(columns, n * d) / (n * d) ** 0.5
    inputs = [streams, mapping, draw(columns), 0.5 + 0.2 * draw(3)]

    def expected(*tensors: Tensor) -> StreamCoefficients:
        return reference.mhc_coefficients(*tensors, **options._asdict())

    theirs = functools.partial(_coefficients, functions, options)
    external.compare("liger", "liger_mhc_coeffs", theirs, expected, inputs)


@functools.cache
def _check_mixing(
    functions: Functions, n: int, d: int, dtype: torch.dtype, device: torch.device
) -> None:
    draw, tokens = external.Draw(device), external.TOKENS
    streams = (draw(tokens, n, d) * _sizes(n, device)).to(dtype)
    output = draw(tokens, d).to(dtype)
    inputs = [streams, draw(tokens, n), draw(tokens, n), draw(tokens, n, n), output]

    def theirs(x: Tensor, pre: Tensor, post: Tensor, res: Tensor, y: Tensor) -> list[Tensor]:
        return [_read(functions, x, pre), _write(functions, x, post, res, y)]

    def expected(x: Tensor, pre: Tensor, post: Tensor, res: Tensor, y: Tensor) -> list[Tensor]:
        return [reference.read_streams(x, pre), reference.write_streams(x, post, res, y)]

    external.compare("liger", "liger_mhc_pre with liger_mhc_post_res", theirs, expected, inputs)


def _sizes(n: int, device: torch.device) -> Tensor:
    # unequal streams show which is which
    return torch.arange(1.0, n + 1, device=device).unsqueeze(-1)
