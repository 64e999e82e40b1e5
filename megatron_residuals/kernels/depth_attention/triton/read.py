# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""One reader of a list of depth sources: whole rows on chip, every source read once.

Sources [T, D] stand in a table of addresses; scores are kept with the tokens last, [m, T].
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_residuals.kernels.common.triton import rounded
from megatron_residuals.kernels.depth_attention.triton.table import is_there, tensor_at


@triton.jit(do_not_specialize=["num_sources", "tokens", "eps"])
def read_sources_kernel(
    p_sources,
    p_direction,
    p_x,
    p_dots,
    p_rstd,
    num_sources,
    tokens,
    eps,
    D: tl.constexpr,
    BD: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """x = sum_j softmax_j(rstd_j dot_j) V_j by an online softmax.    Program: one token.

    The next source is loaded while one is worked on.
    """
    i_t = tl.program_id(0).to(tl.int64)
    count = tokens.to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_row = i_t * D + o_d
    b_q = tl.load(p_direction + o_d, mask=m_d, other=0.0)
    b_x = tl.zeros((BD,), tl.float32)
    top = float("-inf")
    total = 0.0
    p_next = tensor_at(p_sources, 0, p_x.dtype, ALIGNED)
    b_next = tl.load(p_next + o_row, mask=m_d, other=0.0)
    for j in range(num_sources):
        b_v = b_next.to(tl.float32)  # [BD]
        more = num_sources > j + 1
        p_next = tensor_at(p_sources, tl.where(more, j + 1, j), p_x.dtype, ALIGNED)
        b_next = tl.load(p_next + o_row, mask=o_d < tl.where(more, D, 0), other=0.0)
        dot = tl.sum(b_v * b_q, 0)
        rstd = tl.rsqrt(tl.sum(b_v * b_v, 0) / D + eps)
        tl.store(p_dots + j * count + i_t, dot)
        tl.store(p_rstd + j * count + i_t, rstd)
        logit = dot * rstd
        higher = tl.maximum(top, logit)
        keep = tl.exp(top - higher)
        weight = tl.exp(logit - higher)
        b_x = b_x * keep + weight * b_v
        total = total * keep + weight
        top = higher
    tl.store(p_x + o_row, rounded(b_x / total, p_x.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["num_sources", "tokens", "per_program"])
def read_sources_backward_kernel(
    p_sources,
    p_totals,
    p_fresh,
    p_gradient,
    p_direction,
    p_dots,
    p_rstd,
    p_parts,
    num_sources,
    tokens,
    per_program,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Gradients of the sources, and of the direction summed over a group of tokens.

    The gradient of a source is added to its float32 sum in ``p_totals``, or written to its place in
    ``p_fresh``, or neither. Program: ``per_program`` tokens, one after the other; a second look at
    a token's sources finds them in the L2 cache.
    """
    i_p = tl.program_id(0)
    count = tokens.to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_m = tl.arange(0, BM)
    m_m = o_m < num_sources
    b_dq = tl.zeros((BD,), tl.float32)
    first = i_p * per_program
    for i in range(first, tl.minimum(first + per_program, tokens)):
        i_t = (i + tl.zeros((1,), tl.int64)).to(tl.int64)
        o_row = i_t * D + o_d
        b_g = tl.load(p_gradient + o_row, mask=m_d, other=0.0)
        b_u = tl.zeros((BM,), tl.float32)
        for j in range(num_sources):
            p_v = tensor_at(p_sources, j, p_gradient.dtype, ALIGNED)
            b_v = tl.load(p_v + o_row, mask=m_d, other=0.0).to(tl.float32)
            b_u = tl.where(o_m == j, tl.sum(b_v * b_g.to(tl.float32), 0), b_u)
        o_score = o_m * count + i_t
        b_dot = tl.load(p_dots + o_score, mask=m_m, other=0.0)
        b_rstd = tl.load(p_rstd + o_score, mask=m_m, other=0.0)
        b_logit = tl.where(m_m, b_dot * b_rstd, float("-inf"))
        b_w = tl.exp(b_logit - tl.max(b_logit, 0))
        b_w = b_w / tl.sum(b_w, 0)
        b_ddot = b_w * (b_u - tl.sum(b_w * b_u, 0)) * b_rstd
        b_shrink = b_ddot * b_dot * b_rstd * b_rstd / D
        for j in range(num_sources):
            p_v = tensor_at(p_sources, j, p_gradient.dtype, ALIGNED)
            b_v = tl.load(p_v + o_row, mask=m_d, other=0.0).to(tl.float32)
            here = o_m == j
            weight = tl.sum(tl.where(here, b_w, 0.0), 0)
            ddot = tl.sum(tl.where(here, b_ddot, 0.0), 0)
            shrink = tl.sum(tl.where(here, b_shrink, 0.0), 0)
            b_dq += ddot * b_v
            # from the cache, as there are too few registers to hold it
            b_q = tl.load(p_direction + o_d, mask=m_d, other=0.0)
            b_dv = weight * b_g.to(tl.float32) + ddot * b_q - shrink * b_v
            if is_there(p_totals, j):
                p_total = tensor_at(p_totals, j, p_direction.dtype, ALIGNED)
                b_sum = tl.load(p_total + o_row, mask=m_d, other=0.0)
                tl.store(p_total + o_row, b_sum + b_dv, mask=m_d)
            if is_there(p_fresh, j):
                p_new = tensor_at(p_fresh, j, p_gradient.dtype, ALIGNED)
                tl.store(p_new + o_row, rounded(b_dv, p_gradient.dtype.element_ty), mask=m_d)
    tl.store(p_parts + i_p.to(tl.int64) * D + o_d, b_dq, mask=m_d)
