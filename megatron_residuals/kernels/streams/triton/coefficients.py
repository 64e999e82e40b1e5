# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Coefficients of mHC from the projected streams, and the way back: one token in one thread.

With the K projections m and the sum of squares of a token, rstd = 1 / rms and z = alpha rstd m +
bias, ordered pre, post, res: K = 2N + N^2, or 2N without RES, where streams are not mixed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_residuals.kernels.streams.triton.sinkhorn import (
    oriented,
    sinkhorn_backward,
    sinkhorn_forward,
)


@triton.jit
def gate_of(b_logit):
    """sigmoid, also where exp would overflow."""
    b_small = tl.exp(-tl.abs(b_logit))
    return tl.where(b_logit >= 0, 1.0, b_small) / (1.0 + b_small)


@triton.jit(do_not_specialize=["tokens"])
def coefficients_kernel(
    p_partial,
    p_bias,
    p_alpha,
    p_mixes,
    p_pre,
    p_post,
    p_res,
    tokens,
    N: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    DSV4: tl.constexpr,
    RES: tl.constexpr,
    NORM_EPS: tl.constexpr,
    EPS: tl.constexpr,
    POST_EPS: tl.constexpr,
    BT: tl.constexpr,
):
    """Partial mixes [SPLITS, T, K + 1] summed into mixes [T, K + 1]; gates and Sinkhorn from them.

    h_pre and h_post [T, N]; h_res [T, N, N].    Program: BT tokens.
    """
    K: tl.constexpr = 2 * N + RES * N * N
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    m_t = o_t < tokens
    o_row = o_t.to(tl.int64)
    count = tokens.to(tl.int64)
    b_mixes = ()
    for k in tl.static_range(K + 1):
        b_sum = tl.load(p_partial + o_row * (K + 1) + k, mask=m_t, other=0.0)
        for s in tl.static_range(1, SPLITS):
            p_row = p_partial + (s * count + o_row) * (K + 1)
            b_sum += tl.load(p_row + k, mask=m_t, other=0.0)
        tl.store(p_mixes + o_row * (K + 1) + k, b_sum, mask=m_t)
        b_mixes = b_mixes + (b_sum,)
    b_rstd = 1.0 / tl.sqrt(b_mixes[K] / (N * D) + NORM_EPS)
    alpha_pre = tl.load(p_alpha)
    alpha_post = tl.load(p_alpha + 1)
    for j in tl.static_range(N):
        b_pre = gate_of(b_mixes[j] * b_rstd * alpha_pre + tl.load(p_bias + j))
        tl.store(p_pre + o_row * N + j, b_pre + EPS, mask=m_t)
        b_post = gate_of(b_mixes[N + j] * b_rstd * alpha_post + tl.load(p_bias + N + j))
        tl.store(p_post + o_row * N + j, 2.0 * b_post + POST_EPS, mask=m_t)
    if RES:
        alpha_res = tl.load(p_alpha + 2)
        b_logits = ()
        for k in tl.static_range(N * N):
            b_bias = tl.load(p_bias + 2 * N + k)
            b_logits = b_logits + (b_mixes[2 * N + k] * b_rstd * alpha_res + b_bias,)
        b_matrix = sinkhorn_forward(oriented(b_logits, N, DSV4), N, ITERATIONS, DSV4, EPS)
        for k in tl.static_range(N * N):
            tl.store(p_res + o_row * (N * N) + k, b_matrix[k], mask=m_t)


@triton.jit
def through_norm(
    b_gradient,
    p_mixes,
    p_carry,
    p_partial,
    b_rstd,
    alpha,
    m_t,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Gradients of SIZE logits from FIRST on: of their mixes, of rstd, of bias and of alpha.

    Stores dm and the sums for the bias; returns the parts for rstd and for alpha.
    """
    b_d_alpha = tl.zeros_like(b_rstd)
    for k in tl.static_range(SIZE):
        b_dz = tl.where(m_t, b_gradient[k], 0.0)
        b_mix = tl.load(p_mixes + FIRST + k, mask=m_t, other=0.0)
        tl.store(p_carry + FIRST + k, b_dz * b_rstd * alpha, mask=m_t)
        tl.store(p_partial + FIRST + k, tl.sum(b_dz, 0))
        b_d_alpha += b_dz * b_mix
    return b_d_alpha * alpha, b_d_alpha * b_rstd


@triton.jit(do_not_specialize=["tokens"])
def coefficients_backward_kernel(
    p_mixes,
    p_bias,
    p_alpha,
    p_d_pre,
    p_d_post,
    p_d_res,
    p_carry,
    p_partial,
    p_sums,
    tokens,
    N: tl.constexpr,
    D: tl.constexpr,
    ITERATIONS: tl.constexpr,
    DSV4: tl.constexpr,
    RES: tl.constexpr,
    NORM_EPS: tl.constexpr,
    EPS: tl.constexpr,
    POST_EPS: tl.constexpr,
    BT: tl.constexpr,
):
    """From the gradients of h_pre, h_post [T, N] and h_res [T, N, N] to what the planes need.

    That is carry [T, K + 1], dm and twice the gradient of the sum of squares. This program's sums
    for bias and alpha are partial [programs, K + 2 + RES].    Program: BT tokens.
    """
    K: tl.constexpr = 2 * N + RES * N * N
    i_t = tl.program_id(0)
    o_t = i_t * BT + tl.arange(0, BT)
    m_t = o_t < tokens
    o_row = o_t.to(tl.int64)
    count = tokens.to(tl.int64)
    p_partial += i_t.to(tl.int64) * (K + 2 + RES)
    p_mixes += o_row * (K + 1)
    p_carry += o_row * (K + 1)
    b_squares = tl.load(p_mixes + K, mask=m_t, other=1.0)
    b_rstd = 1.0 / tl.sqrt(b_squares / (N * D) + NORM_EPS)
    alpha_pre = tl.load(p_alpha)
    alpha_post = tl.load(p_alpha + 1)
    b_d_pre = ()
    b_d_post = ()
    for j in tl.static_range(N):
        b_mix = tl.load(p_mixes + j, mask=m_t, other=0.0)
        b_gate = gate_of(b_mix * b_rstd * alpha_pre + tl.load(p_bias + j))
        b_gradient = tl.load(p_d_pre + o_row * N + j, mask=m_t, other=0.0)
        b_d_pre = b_d_pre + (b_gradient * b_gate * (1.0 - b_gate),)
        b_mix = tl.load(p_mixes + N + j, mask=m_t, other=0.0)
        b_gate = gate_of(b_mix * b_rstd * alpha_post + tl.load(p_bias + N + j))
        b_gradient = tl.load(p_d_post + o_row * N + j, mask=m_t, other=0.0)
        b_d_post = b_d_post + (2.0 * b_gradient * b_gate * (1.0 - b_gate),)
    b_d_rstd, b_d_alpha = through_norm(
        b_d_pre, p_mixes, p_carry, p_partial, b_rstd, alpha_pre, m_t, 0, N
    )
    tl.store(p_partial + K, tl.sum(b_d_alpha, 0))
    b_more, b_d_alpha = through_norm(
        b_d_post, p_mixes, p_carry, p_partial, b_rstd, alpha_post, m_t, N, N
    )
    tl.store(p_partial + K + 1, tl.sum(b_d_alpha, 0))
    b_d_rstd += b_more
    if RES:
        alpha_res = tl.load(p_alpha + 2)
        b_logits = ()
        b_d_res = ()
        for k in tl.static_range(N * N):
            b_mix = tl.load(p_mixes + 2 * N + k, mask=m_t, other=0.0)
            b_logits = b_logits + (b_mix * b_rstd * alpha_res + tl.load(p_bias + 2 * N + k),)
            b_d_res = b_d_res + (tl.load(p_d_res + o_row * (N * N) + k, mask=m_t, other=0.0),)
        b_logits = oriented(b_logits, N, DSV4)
        b_d_res = sinkhorn_backward(
            b_logits, b_d_res, p_sums, o_row, m_t, count, N, ITERATIONS, DSV4, EPS
        )
        b_d_res = oriented(b_d_res, N, DSV4)
        b_more, b_d_alpha = through_norm(
            b_d_res, p_mixes, p_carry, p_partial, b_rstd, alpha_res, m_t, 2 * N, N * N
        )
        tl.store(p_partial + K + 2, tl.sum(b_d_alpha, 0))
        b_d_rstd += b_more
    b_squares_gradient = -b_d_rstd * b_rstd * b_rstd * b_rstd / (N * D)
    tl.store(p_carry + K, b_squares_gradient, mask=m_t)
