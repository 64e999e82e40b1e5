# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Phase 1: all readers of a block attend to its finished sources, forward and backward.

Sources, their sums of gradients, values and gradients of values [T, D] stand in tables of
addresses. What belongs to a token is kept with the tokens last: dots [S, m, T], rstd [m, T], lse
[S, T].
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_residuals.kernels.common.triton import dot_bfloat16, dot_transposed, halves, rounded
from megatron_residuals.kernels.depth_attention.triton.table import is_there, tensor_at


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
    p_rstd,
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
        b_rstd = tl.rsqrt(tl.sum(b_squares, 1) / D + eps)
        tl.store(p_rstd + i_j * count + o_row, b_rstd, mask=m_t)


@triton.jit(do_not_specialize=["size", "num_sources", "tokens"])
def mix_kernel(
    p_sources,
    p_values,
    p_like,
    p_dots,
    p_rstd,
    p_lses,
    size,
    num_sources,
    tokens,
    D: tl.constexpr,
    BS: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """values_s = sum_j softmax_j(rstd_j dots_sj) V_j.

    ``p_like`` gives the dtype of sources and values. Program: BS readers, BT tokens, BC channels.
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
        b_rstd = tl.load(p_rstd + j * count + o_row, mask=m_t, other=0.0)
        b_logit = b_dot * b_rstd
        b_higher = tl.maximum(b_top, b_logit)
        b_total = b_total * tl.exp(b_top - b_higher) + tl.exp(b_logit - b_higher)
        b_top = b_higher
    b_lse = b_top + tl.log(b_total)
    if i_c == 0:
        tl.store(p_lses + o_s.to(tl.int64) * count + o_row, b_lse, mask=m_st)
    b_sum = tl.zeros((BS, BT, BC), tl.float32)
    o_v = o_row * D + o_c  # [1, BT, BC]
    for j in range(num_sources):
        b_dot = tl.load(p_dots + o_score + j * count, mask=m_st, other=0.0)
        b_rstd = tl.load(p_rstd + j * count + o_row, mask=m_t, other=0.0)
        b_weight = tl.exp(b_dot * b_rstd - b_lse)
        p_v = tensor_at(p_sources, j, p_like.dtype, ALIGNED)
        b_v = tl.load(p_v + o_v, mask=m_t & m_c, other=0.0).to(tl.float32)
        b_sum += b_weight * b_v
    m_s = o_s < size
    p_v = tl.load(p_values + o_s, mask=m_s, other=0).to(p_like.dtype)
    if ALIGNED:
        p_v = tl.multiple_of(p_v, [16, 16, 16])
    tl.store(p_v + o_v, rounded(b_sum, p_like.dtype.element_ty), mask=m_st & m_c)


@triton.jit(do_not_specialize=["size", "num_sources", "tokens"])
def source_products_kernel(
    p_sources,
    p_gradients,
    p_like,
    p_dots,
    p_rstd,
    p_d_lses,
    p_weights,
    p_d_dots,
    p_shrinks,
    size,
    num_sources,
    tokens,
    D: tl.constexpr,
    BS: tl.constexpr,
    BT: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Weight, gradient of the dot, and factor of the source itself, by reader, source and token.

    A reader whose values have no gradient has no address in ``p_gradients``. Program: BS readers,
    BT tokens.
    """
    o_s = tl.program_id(1) * BS + tl.arange(0, BS)[:, None, None]
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)[None, :, None]
    o_m = tl.arange(0, BM)[None, None, :]
    count = tokens.to(tl.int64)
    o_row = o_t.to(tl.int64)
    m_t = o_t < tokens
    m_s = o_s < size
    b_address = tl.load(p_gradients + o_s, mask=m_s, other=0)
    m_given = b_address != 0
    p_g = b_address.to(p_like.dtype)
    if ALIGNED:
        p_g = tl.multiple_of(p_g, [16, 16, 16])
    b_u = tl.zeros((BS, BT, BM), tl.float32)
    for start in range(0, D, BC):
        o_c = start + tl.arange(0, BC)[None, None, :]
        m_c = m_t & (o_c < D)
        o_v = o_row * D + o_c
        b_g = tl.load(p_g + o_v, mask=m_given & m_c, other=0.0).to(tl.float32)  # [BS, BT, BC]
        for j in range(num_sources):
            p_v = tensor_at(p_sources, j, p_like.dtype, ALIGNED)
            b_v = tl.load(p_v + o_v, mask=m_c, other=0.0).to(tl.float32)  # [1, BT, BC]
            b_product = tl.sum(b_g * b_v, 2)[:, :, None]
            b_u += tl.where(o_m == j, b_product, 0.0)
    m_m = o_m < num_sources
    m = m_s & m_t & m_m
    o_source = o_m * count + o_row
    o_score = o_s.to(tl.int64) * num_sources * count + o_source
    b_dot = tl.load(p_dots + o_score, mask=m, other=0.0)
    b_rstd = tl.load(p_rstd + o_source, mask=m_t & m_m, other=0.0)
    b_logit = tl.where(m_m, b_dot * b_rstd, float("-inf"))
    b_weight = tl.exp(b_logit - tl.max(b_logit, 2)[:, :, None])
    b_weight = b_weight / tl.sum(b_weight, 2)[:, :, None]
    o_token = o_s.to(tl.int64) * count + o_row
    b_h = tl.load(p_d_lses + o_token, mask=m_s & m_t, other=0.0)
    b_mean = tl.sum(b_weight * b_u, 2)[:, :, None]
    b_d_dot = b_weight * (b_u - b_mean + b_h) * b_rstd
    tl.store(p_weights + o_score, b_weight, mask=m)
    tl.store(p_d_dots + o_score, b_d_dot, mask=m)
    tl.store(p_shrinks + o_score, b_d_dot * b_dot * b_rstd * b_rstd / D, mask=m)


@triton.jit(do_not_specialize=["size", "num_sources", "tokens", "per_program"])
def accumulate_kernel(
    p_sources,
    p_totals,
    p_gradients,
    p_like,
    p_directions,
    p_weights,
    p_d_dots,
    p_shrinks,
    p_parts,
    size,
    num_sources,
    tokens,
    per_program,
    D: tl.constexpr,
    BS: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Adds to the sum of every source its gradients from all readers, the last reader first.

    Reader by reader, so that the sum does not depend on who else reads. The gradient of the
    directions is summed over a group of tokens:  parts [groups, S, D].

    Program: BC channels, ``per_program`` tokens in steps of BT; a reader's gradient, loaded again
    for each source, is found in the L1 cache.
    """
    i_p = tl.program_id(1)
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    m_c = o_c < D
    o_s = tl.arange(0, BS)
    m_s = o_s < size
    count = tokens.to(tl.int64)
    b_dq = tl.zeros((BS, BC), tl.float32)
    first = i_p * per_program
    last = tl.minimum(first + per_program, tokens)
    for start in range(first, last, BT):
        o_t = start + tl.arange(0, BT)
        m_t = o_t < last
        o_row = o_t.to(tl.int64)
        o_v = o_row[:, None] * D + o_c[None, :]
        m = m_t[:, None] & m_c[None, :]
        for j in range(num_sources):
            p_v = tensor_at(p_sources, j, p_like.dtype, ALIGNED)
            b_v = tl.load(p_v + o_v, mask=m, other=0.0)  # [BT, BC]
            o_all = (o_s.to(tl.int64) * num_sources + j)[None, :] * count + o_row[:, None]
            b_dd = tl.load(p_d_dots + o_all, mask=m_t[:, None] & m_s[None, :], other=0.0)
            b_dq = dot_transposed(b_dd, b_v, b_dq)
            if is_there(p_totals, j):
                b_wide = b_v.to(tl.float32)
                p_total = tensor_at(p_totals, j, p_directions.dtype, ALIGNED)
                b_sum = tl.load(p_total + o_v, mask=m, other=0.0)
                for k in range(size):
                    s = size - 1 - k
                    p_g = tensor_at(p_gradients, s, p_like.dtype, ALIGNED)
                    m_g = m_t[:, None] & (o_c < tl.where(is_there(p_gradients, s), D, 0))[None, :]
                    b_g = tl.load(p_g + o_v, mask=m_g, other=0.0).to(tl.float32)
                    b_q = tl.load(p_directions + s * D + o_c, mask=m_c, other=0.0)
                    o_one = (s * num_sources + j) * count + o_row
                    b_weight = tl.load(p_weights + o_one, mask=m_t, other=0.0)[:, None]
                    b_d_dot = tl.load(p_d_dots + o_one, mask=m_t, other=0.0)[:, None]
                    b_shrink = tl.load(p_shrinks + o_one, mask=m_t, other=0.0)[:, None]
                    b_sum += b_weight * b_g
                    b_sum += b_d_dot * b_q[None, :]
                    b_sum -= b_shrink * b_wide
                tl.store(p_total + o_v, b_sum, mask=m)
    o_part = (i_p.to(tl.int64) * size + o_s)[:, None] * D + o_c[None, :]
    tl.store(p_parts + o_part, b_dq, mask=m_s[:, None] & m_c[None, :])
