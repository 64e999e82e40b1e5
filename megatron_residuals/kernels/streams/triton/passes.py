# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Streams written, projected, read and multiplied: the passes of mHC that touch whole planes.

Streams are [T, N, D], one row for each token [T, D]; h_pre and h_post [T, N], h_res [T, N, N] as
[new, old]: the numbers of a token lie together, so that one address leads to all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_residuals.kernels.common.triton import dot_activation, halves, rounded


@triton.jit(do_not_specialize=["tokens"])
def write_and_mix_kernel(
    p_streams,
    p_output,
    p_post,
    p_res,
    p_mapping,
    p_reads,
    p_written,
    p_partial,
    p_read,
    tokens,
    N: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    UPDATE: tl.constexpr,
    RES: tl.constexpr,
    MIX: tl.constexpr,
    READ: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    HALVES: tl.constexpr,
):
    """x'[j] = sum_i h_res[j, i] x[i] + h_post[j] y, and mapping vec(x') and |x'|^2 in part.

    The parts are those of a range of channels, partial [splits, T, K + 1]; x' is rounded to its
    dtype first. Without UPDATE, x' is x; without RES, h_res is the identity; without MIX, there
    are no parts. With READ, u = sum_j reads[j] x'[j], reads [T, N], in the same pass.
    The mapping comes as [K, N D] or, with two HALVES, as ``halves_kernel`` splits it.
    Program: BT tokens, SPLIT channels in steps of BC.
    """
    i_s = tl.program_id(1)
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    m_t = o_t < tokens
    o_row = o_t.to(tl.int64)
    o_m = tl.arange(0, BK * HALVES)
    m_m = o_m < (K if HALVES == 1 else BK * HALVES)
    b_mixes = tl.zeros((BT, BK * HALVES), tl.float32)
    b_squares = tl.zeros((BT, BC), tl.float32)
    for start in range(0, SPLIT, BC):
        o_c = i_s * SPLIT + start + tl.arange(0, BC)
        m_c = o_c < D
        m = m_t[:, None] & m_c[None, :]
        o_x = o_row[:, None] * (N * D) + o_c[None, :]
        if UPDATE:
            if RES:
                b_x = ()
                for i in tl.static_range(N):
                    b_x = b_x + (tl.load(p_streams + o_x + i * D, mask=m, other=0.0),)  # [BT, BC]
            o_y = o_row[:, None] * D + o_c[None, :]
            b_y = tl.load(p_output + o_y, mask=m, other=0.0)
        b_read = tl.zeros((BT, BC), tl.float32)
        for j in range(N):  # not unrolled: one new stream at a time fits the registers
            if UPDATE:
                b_post = tl.load(p_post + o_row * N + j, mask=m_t)
                b_sum = b_y.to(tl.float32) * b_post[:, None]
                if RES:
                    for i in tl.static_range(N):
                        b_res = tl.load(p_res + o_row * (N * N) + (j * N + i), mask=m_t)
                        b_sum = tl.fma(b_res[:, None], b_x[i].to(tl.float32), b_sum)
                else:
                    b_sum += tl.load(p_streams + o_x + j * D, mask=m, other=0.0).to(tl.float32)
                b_new = rounded(b_sum, p_written.dtype.element_ty)
                tl.store(p_written + o_x + j * D, b_new, mask=m)
            else:
                b_new = tl.load(p_streams + o_x + j * D, mask=m, other=0.0)
            if MIX:
                b_wide = b_new.to(tl.float32)
                b_squares += b_wide * b_wide
                o_phi = o_m[:, None] * (N * D) + j * D + o_c[None, :]
                m_phi = m_m[:, None] & m_c[None, :]
                b_phi = tl.load(p_mapping + o_phi, mask=m_phi, other=0.0)  # [HALVES BK, BC]
                b_mixes = dot_activation(b_new, tl.trans(b_phi), b_mixes)
            if READ:
                b_weight = tl.load(p_reads + o_row * N + j, mask=m_t, other=0.0)
                b_read = tl.fma(b_weight[:, None], b_new.to(tl.float32), b_read)
        if READ:
            o_u = o_row[:, None] * D + o_c[None, :]
            tl.store(p_read + o_u, rounded(b_read, p_read.dtype.element_ty), mask=m)
    if MIX:
        p_row = p_partial + (i_s * tokens.to(tl.int64) + o_row) * (K + 1)
        o_k = tl.arange(0, BK)
        b_mixes = tl.sum(tl.reshape(b_mixes, (BT, HALVES, BK)), 1)
        m_out = m_t[:, None] & (o_k < K)[None, :]
        tl.store(p_row[:, None] + o_k[None, :], b_mixes, mask=m_out)
        tl.store(p_row + K, tl.sum(b_squares, 1), mask=m_t)


@triton.jit
def halves_kernel(
    p_mapping,
    p_halves,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
):
    """A float32 matrix [ROWS, COLUMNS] as two of bfloat16 whose sum has 16 bits of its mantissa.

    They are [2 BK, COLUMNS], the rows from ROWS to BK zero.    Program: BC columns of one row.
    """
    i_k = tl.program_id(0)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < COLUMNS
    m_row = o_c < tl.where(i_k < ROWS, COLUMNS, 0)
    b_row = tl.load(p_mapping + i_k * COLUMNS + o_c, mask=m_row, other=0.0)
    high, low = halves(b_row)
    tl.store(p_halves + i_k * COLUMNS + o_c, high, mask=m_c)
    tl.store(p_halves + (BK + i_k) * COLUMNS + o_c, low, mask=m_c)


@triton.jit(do_not_specialize=["tokens"])
def read_streams_kernel(
    p_streams,
    p_pre,
    p_read,
    tokens,
    N: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """u = sum_i h_pre[i] x[i], h_pre [T, N].    Program: BT tokens, BC channels."""
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_t = o_t < tokens
    m = m_t[:, None] & (o_c < D)[None, :]
    o_row = o_t.to(tl.int64)
    o_x = o_row[:, None] * (N * D) + o_c[None, :]
    b_sum = tl.zeros((BT, BC), tl.float32)
    for i in tl.static_range(N):
        b_x = tl.load(p_streams + o_x + i * D, mask=m, other=0.0).to(tl.float32)
        b_sum = tl.fma(tl.load(p_pre + o_row * N + i, mask=m_t)[:, None], b_x, b_sum)
    o_u = o_row[:, None] * D + o_c[None, :]
    tl.store(p_read + o_u, rounded(b_sum, p_read.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["tokens"])
def stream_products_kernel(
    p_gradient,
    p_streams,
    p_products,
    tokens,
    N: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """<g, x[i]> for every stream: products [T, N] of g [T, D].    Program: BT whole tokens."""
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    m_t = o_t < tokens
    o_row = o_t.to(tl.int64)
    b_sums = ()
    for _ in tl.static_range(N):
        b_sums = b_sums + (tl.zeros((BT, BC), tl.float32),)
    for start in range(0, D, BC):
        o_c = start + tl.arange(0, BC)
        m = m_t[:, None] & (o_c < D)[None, :]
        o_g = o_row[:, None] * D + o_c[None, :]
        o_x = o_row[:, None] * (N * D) + o_c[None, :]
        b_g = tl.load(p_gradient + o_g, mask=m, other=0.0).to(tl.float32)
        b_new = ()
        for i in tl.static_range(N):
            b_x = tl.load(p_streams + o_x + i * D, mask=m, other=0.0).to(tl.float32)
            b_new = b_new + (tl.fma(b_g, b_x, b_sums[i]),)
        b_sums = b_new
    for i in tl.static_range(N):
        tl.store(p_products + o_row * N + i, tl.sum(b_sums[i], 1), mask=m_t)
