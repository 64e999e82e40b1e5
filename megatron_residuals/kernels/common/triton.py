# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""What all Triton backends share: exact float32 products, how a kernel is cut, operators.

In every kernel ``p_`` is a pointer, ``o_`` offsets, ``m_`` a mask, ``b_`` a block of values and
``i_`` the index of a program. Token counts are run-time numbers that cause no recompilation,
addresses have 64 bits, sums are float32 in an order that depends on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.library import CustomOpDef  # type: ignore[attr-defined]

from megatron_residuals.kernels.common.dispatch import interpreting

# The interpreter cuts bfloat16 off instead of rounding, and multiplies its bit patterns.
INTERPRETED: tl.constexpr = tl.constexpr(interpreting())
OPAQUE: tl.constexpr = tl.constexpr(not interpreting() and torch.version.hip is None)


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """float32 numbers in another dtype, to the nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        values = bits.to(tl.float32, bitcast=True)
    return values.to(dtype)


@triton.jit
def dot_bfloat16(left, right, total):
    """total + left @ right of bfloat16 numbers, summed in float32."""
    if INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total)


@triton.jit
def halves(values):
    """float32 numbers as a sum of two of bfloat16: 16 bits of the mantissa."""
    high = rounded(values, tl.bfloat16)
    return high, rounded(values - high.to(tl.float32), tl.bfloat16)


@triton.jit
def settled(values):
    """The same 16-bit numbers, computed here and once.

    Triton would rather compute the operand of a dot again, in the layout of the dot and from the
    first loads on, than move it there; with many loads that costs all registers.
    """
    if OPAQUE:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=2
        )
    else:
        return values


@triton.jit
def dot_activation(left, right, total):
    """total + left @ right of activations [M, K] and a mapping [K, N] as ``mapping_operand``."""
    if left.dtype == tl.bfloat16:
        return dot_bfloat16(settled(left), right, total)
    else:
        return tl.dot(left.to(tl.float32), right, total, input_precision="tf32x3")


@triton.jit
def dot_transposed(left, right, total):
    """total + left^T @ right of float32 numbers [K, M] and activations [K, N].

    bfloat16 goes to the tensor cores as it is, against both halves of a float32 number.
    """
    if right.dtype == tl.bfloat16:
        high, low = halves(left)
        total = dot_bfloat16(tl.trans(low), right, total)
        return dot_bfloat16(tl.trans(high), right, total)
    else:
        return tl.dot(tl.trans(left), right.to(tl.float32), total, input_precision="tf32x3")


@triton.jit
def dot_mapping(left, high, low, BRIEF: tl.constexpr):
    """left @ (high + low) of float32 numbers [M, K] and two halves [K, N] of a matrix.

    Not BRIEF, ``high`` is the whole matrix in float32.
    """
    if BRIEF:
        left_high, left_low = halves(left)
        total = dot_bfloat16(left_low, high, tl.zeros((left.shape[0], high.shape[1]), tl.float32))
        return dot_bfloat16(left_high, high, dot_bfloat16(left_high, low, total))
    else:
        return tl.dot(left, high, input_precision="tf32x3")


def custom_operator(
    signature: str, *, changes: tuple[str, ...] = ()
) -> Callable[[Callable[..., object]], CustomOpDef]:
    """A decorator that makes a function a custom operator, opaque to compilers and graph capture.

    Args:
        signature: name and schema; written out, as torch 2.6 does not infer those with lists.
        changes: the arguments that it changes in place.
    """
    name, schema = signature.split("(", 1)
    return torch.library.custom_op(
        f"megatron_residuals::{name}", mutates_args=changes, schema=f"({schema}"
    )


class Tile(NamedTuple):
    """How a kernel is cut.

    Attributes:
        tokens, channels: of one step.
        num_warps: of a program.
        num_stages: of its loads; None leaves them to Triton.
        readers: of one step, where there are several.
    """

    tokens: int
    channels: int
    num_warps: int
    num_stages: int | None = 1
    readers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """By the names of a launch."""
        named = dict(BT=self.tokens, BC=self.channels, BS=self.readers)
        named |= dict(num_warps=self.num_warps, num_stages=self.num_stages)
        return {name: value for name, value in named.items() if value is not None}

    def within(self, hidden_size: int) -> Tile:
        """No wider than the hidden size, and no narrower than a tensor core takes."""
        return self._replace(channels=min(self.channels, power_of_two(hidden_size, 16)))


def ceil_div(number: int, by: int) -> int:
    """The least integer not below number / by."""
    return -(-number // by)


def power_of_two(number: int, least: int = 1) -> int:
    """The least power of two not below a number, and at least ``least``."""
    return max(least, 1 << max(number - 1, 0).bit_length())
