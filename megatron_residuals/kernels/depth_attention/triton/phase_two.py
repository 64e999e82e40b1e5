# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Phase 2: an output added to the running sum, and that merged with a reader's values.

Planes [T, D], numbers per token [T]; whole rows on chip.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_residuals.kernels.common.triton import rounded


@triton.jit(do_not_specialize=["eps"])
def merge_kernel(
    p_values,
    p_lse,
    p_direction,
    p_partial,
    p_output,
    p_x,
    p_total,
    p_dots,
    p_rstd,
    p_weight,
    eps,
    D: tl.constexpr,
    BD: tl.constexpr,
    ADD: tl.constexpr,
):
    """total = partial + output, if there is one; x = values + weight (total - values).

    Program: one token.
    """
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_row = i_t * D + o_d
    b_p = tl.load(p_partial + o_row, mask=m_d, other=0.0)
    b_o = tl.load(p_values + o_row, mask=m_d, other=0.0).to(tl.float32)
    if ADD:
        b_y = tl.load(p_output + o_row, mask=m_d, other=0.0).to(tl.float32)
        b_p = rounded(b_p.to(tl.float32) + b_y, p_x.dtype.element_ty)
        tl.store(p_total + o_row, b_p, mask=m_d)
    b_p = b_p.to(tl.float32)
    b_q = tl.load(p_direction + o_d, mask=m_d, other=0.0)
    dot = tl.sum(b_p * b_q, 0)
    rstd = tl.rsqrt(tl.sum(b_p * b_p, 0) / D + eps)
    weight = tl.sigmoid(dot * rstd - tl.load(p_lse + i_t))
    b_x = b_o + weight * (b_p - b_o)
    tl.store(p_x + o_row, rounded(b_x, p_x.dtype.element_ty), mask=m_d)
    tl.store(p_dots + i_t, dot)
    tl.store(p_rstd + i_t, rstd)
    tl.store(p_weight + i_t, weight)


@triton.jit(do_not_specialize=["tokens", "per_program"])
def merge_backward_kernel(
    p_gradient,
    p_d_partial,
    p_x,
    p_partial,
    p_direction,
    p_dots,
    p_rstd,
    p_weight,
    p_d_values,
    p_d_lse,
    p_d_total,
    p_parts,
    tokens,
    per_program,
    D: tl.constexpr,
    BD: tl.constexpr,
    ADD: tl.constexpr,
):
    """Gradients of values, lse, the running sum; of the direction over a group of tokens.

    ADD adds the gradient that the running sum has from what came later. Program: ``per_program``
    tokens, one after the other.
    """
    i_p = tl.program_id(0)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_q = tl.load(p_direction + o_d, mask=m_d, other=0.0)
    b_dq = tl.zeros((BD,), tl.float32)
    first = i_p * per_program
    for i in range(first, tl.minimum(first + per_program, tokens)):
        i_t = (i + tl.zeros((1,), tl.int64)).to(tl.int64)
        o_row = i_t * D + o_d
        b_g = tl.load(p_gradient + o_row, mask=m_d, other=0.0).to(tl.float32)
        b_p = tl.load(p_partial + o_row, mask=m_d, other=0.0).to(tl.float32)
        b_x = tl.load(p_x + o_row, mask=m_d, other=0.0).to(tl.float32)
        weight = tl.load(p_weight + i_t)
        dot = tl.load(p_dots + i_t)
        rstd = tl.load(p_rstd + i_t)
        d_logit = weight * tl.sum(b_g * (b_p - b_x), 0)
        tl.store(p_d_lse + i_t, -d_logit)
        ddot = d_logit * rstd
        shrink = ddot * dot * rstd * rstd / D
        b_dv = b_g * (1.0 - weight)
        tl.store(p_d_values + o_row, rounded(b_dv, p_x.dtype.element_ty), mask=m_d)
        b_sum = b_g * weight + ddot * b_q - shrink * b_p
        if ADD:
            b_sum += tl.load(p_d_partial + o_row, mask=m_d, other=0.0).to(tl.float32)
        tl.store(p_d_total + o_row, rounded(b_sum, p_x.dtype.element_ty), mask=m_d)
        b_dq += ddot * b_p
    tl.store(p_parts + i_p.to(tl.int64) * D + o_d, b_dq, mask=m_d)
