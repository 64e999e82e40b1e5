# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Reads of depth sources by flash-linear-attention (``fla``), where its result is ours.

Only on explicit wish, and only single reads: its kernel returns no log_sum, which two phases need.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_residuals.functional import depth_attention as reference

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
CHECK_SIZES = (3, 8, 256)  # sources, tokens, hidden size


def read_sources(
    sources: Sequence[Tensor], query: Tensor, key_gain: Tensor, *, eps: float
) -> Tensor:
    """``functional.read_sources`` by ``fla.ops.attnres.fused_attnres``.

    Raises:
        RuntimeError: it is not installed, or does not compute what the reference computes here.
        ValueError: it has no kernel for the dtype.
    """
    dtype, device = sources[0].dtype, sources[0].device
    if dtype not in BOUNDS:
        raise ValueError(
            f"kernels='fla' takes float32, bfloat16 and float16 tensors, not {dtype}; use "
            "kernels='auto'"
        )
    _check(dtype, device)
    return _read(sources, query, key_gain, eps)


def _fused() -> Callable[..., Tensor]:
    try:
        module = importlib.import_module("fla.ops.attnres")
        fused: Callable[..., Tensor] = module.fused_attnres
    except Exception as error:  # an installation that does not fit the machine raises anything
        raise RuntimeError(
            "kernels='fla' was requested for reads of depth sources, but fla.ops.attnres cannot be "
            f"used ({type(error).__name__}: {error}); install a flash-linear-attention that has "
            "fused_attnres, or use kernels='auto'"
        ) from error
    return fused


def _read(sources: Sequence[Tensor], query: Tensor, key_gain: Tensor, eps: float) -> Tensor:
    shape = sources[0].shape
    values = [source.reshape(1, -1, shape[-1]) for source in sources]
    return _fused()(query, values, key_gain, rms_eps=eps).view(shape)


@functools.cache
def _check(dtype: torch.dtype, device: torch.device) -> None:
    """Compare values and all gradients with the reference in float64, once."""
    m, tokens, d = CHECK_SIZES
    generator = torch.Generator().manual_seed(17)
    draws = [torch.randn(tokens, d, generator=generator) for _ in range(m + 1)]
    *sources, cotangent = [draw.to(device, dtype) for draw in draws]
    query = torch.randn(d, generator=generator).to(device)
    gain = 0.5 + torch.rand(d, generator=generator).to(device)
    with torch.enable_grad():
        found = []
        for read, kind in ((_read, None), (_reference, torch.float64)):
            given = [query, gain, *sources] if kind is None else _cast(kind, query, gain, *sources)
            leaves = [each.detach().requires_grad_() for each in given]
            value = read(leaves[2:], leaves[0], leaves[1], 1e-6)
            gradients = torch.autograd.grad(value, leaves, cotangent.to(value.dtype))
            found.append([value.detach(), *gradients])
    for mine, exact in zip(*found, strict=True):
        error = float((mine.double() - exact).norm() / exact.norm())
        if not error <= BOUNDS[dtype]:
            raise RuntimeError(
                f"kernels='fla' was requested, but the fused_attnres of this installation differs "
                f"from the reference by {error:.1e} ({dtype} on {device}, {BOUNDS[dtype]:.0e} is "
                "allowed); use kernels='auto'"
            )


def _reference(sources: Sequence[Tensor], query: Tensor, gain: Tensor, eps: float) -> Tensor:
    return reference.read_sources(sources, query, gain, eps=eps)


def _cast(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(dtype) for tensor in tensors]
