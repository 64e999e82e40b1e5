# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The first phase: all readers of a block attend to its finished sources, forward.

Sources and values [T, D] stand in tables of addresses; scores are kept with the tokens last: dots
[S, m, T], reciprocal rms [m, T], log_sums [S, T].
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_residuals.kernels.triton.attnres_table import tensor_at
from megatron_residuals.kernels.triton.common import dot_bfloat16, halves, rounded


@triton.jit
def dot_directions(b_v, b_q, b_dots):
    """dots [BT, BS] + sources [BT, BC] @ directions [BS, BC]^T, in float32 or nearly so.

    bfloat16 goes to the tensor cores as it is, against both halves of a direction: 16 bits of it.
    """
    if b_v.dtype == tl.bfloat16:
        b_high, b_low = halves(b_q)
        b_dots = dot_bfloat16(b_v, tl.trans(b_low), b_dots)
        return dot_bfloat16(b_v, tl.trans(b_high), b_dots)
    else:
        return tl.dot(b_v.to(tl.float32), tl.trans(b_q), b_dots, input_precision="tf32x3")


@triton.jit(do_not_specialize=["size", "num_sources", "tokens", "eps"])
def scores_kernel(
    p_sources,
    p_like,
    p_directions,
    p_dots,
    p_inverse_rms,
    size,
    num_sources,
    tokens,
    eps,
    D: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    BC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """dots[s, j] = <source_j, direction_s>, and 1 / rms of the sources.

    ``p_like`` gives the dtype of the sources. Program: BT tokens of one source, BS readers.
    """
    i_j = tl.program_id(1)
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    m_t = o_t < tokens
    o_row = o_t.to(tl.int64)
    count = tokens.to(tl.int64)
    o_s = tl.program_id(2) * BS + tl.arange(0, BS)
    m_s = o_s < size
    p_v = tensor_at(p_sources, i_j, p_like.dtype, ALIGNED)
    b_dots = tl.zeros((BT, BS), tl.float32)
    b_squares = tl.zeros((BT, BC), tl.float32)
    for start in range(0, D, BC):
        o_c = start + tl.arange(0, BC)
        m_c = o_c < D
        o_v = o_row[:, None] * D + o_c[None, :]
        b_v = tl.load(p_v + o_v, mask=m_t[:, None] & m_c[None, :], other=0.0)  # [BT, BC]
        o_q = o_s[:, None] * D + o_c[None, :]
        b_q = tl.load(p_directions + o_q, mask=m_s[:, None] & m_c[None, :], other=0.0)
        b_dots = dot_directions(b_v, b_q, b_dots)
        b_wide = b_v.to(tl.float32)
        b_squares += b_wide * b_wide
    o_score = (o_s.to(tl.int64) * num_sources + i_j)[None, :] * count + o_row[:, None]
    tl.store(p_dots + o_score, b_dots, mask=m_t[:, None] & m_s[None, :])
    if tl.program_id(2) == 0:
        b_r = tl.rsqrt(tl.sum(b_squares, 1) / D + eps)
        tl.store(p_inverse_rms + i_j * count + o_row, b_r, mask=m_t)


@triton.jit(do_not_specialize=["size", "num_sources", "tokens"])
def mix_kernel(
    p_sources,
    p_values,
    p_like,
    p_dots,
    p_inverse_rms,
    p_log_sums,
    size,
    num_sources,
    tokens,
    D: tl.constexpr,
    BS: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """values_s = sum_j softmax_j(r_j dots_sj) V_j.    Program: BS readers, BT tokens, BC channels.

    ``p_like`` gives the dtype of sources and values.
    """
    i_c = tl.program_id(1)
    o_s = tl.program_id(2) * BS + tl.arange(0, BS)[:, None, None]
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)[None, :, None]
    o_c = i_c * BC + tl.arange(0, BC)[None, None, :]
    count = tokens.to(tl.int64)
    o_row = o_t.to(tl.int64)
    m_t = o_t < tokens
    m_c = o_c < D
    m_st = (o_s < size) & m_t
    o_score = o_s.to(tl.int64) * num_sources * count + o_row  # [BS, BT, 1]
    b_top = tl.full((BS, BT, 1), float("-inf"), tl.float32)
    b_total = tl.zeros((BS, BT, 1), tl.float32)
    for j in range(num_sources):
        b_dot = tl.load(p_dots + o_score + j * count, mask=m_st, other=0.0)
        b_r = tl.load(p_inverse_rms + j * count + o_row, mask=m_t, other=0.0)
        b_logit = b_dot * b_r
        b_higher = tl.maximum(b_top, b_logit)
        b_total = b_total * tl.exp(b_top - b_higher) + tl.exp(b_logit - b_higher)
        b_top = b_higher
    b_log_sum = b_top + tl.log(b_total)
    if i_c == 0:
        tl.store(p_log_sums + o_s.to(tl.int64) * count + o_row, b_log_sum, mask=m_st)
    b_sum = tl.zeros((BS, BT, BC), tl.float32)
    o_v = o_row * D + o_c  # [1, BT, BC]
    for j in range(num_sources):
        b_dot = tl.load(p_dots + o_score + j * count, mask=m_st, other=0.0)
        b_r = tl.load(p_inverse_rms + j * count + o_row, mask=m_t, other=0.0)
        b_weight = tl.exp(b_dot * b_r - b_log_sum)
        p_v = tensor_at(p_sources, j, p_like.dtype, ALIGNED)
        b_v = tl.load(p_v + o_v, mask=m_t & m_c, other=0.0).to(tl.float32)
        b_sum += b_weight * b_v
    m_s = o_s < size
    p_v = tl.load(p_values + o_s, mask=m_s, other=0).to(p_like.dtype)
    if ALIGNED:
        p_v = tl.multiple_of(p_v, [16, 16, 16])
    tl.store(p_v + o_v, rounded(b_sum, p_like.dtype.element_ty), mask=m_st & m_c)
