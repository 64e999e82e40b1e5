# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""The second pass of the backward of mHC: all gradients of planes, each plane read once."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_residuals.kernels.common.triton import dot_mapping, dot_transposed, rounded


@triton.jit(do_not_specialize=["tokens"])
def streams_backward_kernel(
    p_gradient,
    p_d_read,
    p_pre,
    p_carry,
    p_mapping,
    p_written,
    p_streams,
    p_output,
    p_post,
    p_res,
    p_d_streams,
    p_d_output,
    p_products,
    p_d_mapping,
    tokens,
    N: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    GRADIENT: tl.constexpr,
    READ: tl.constexpr,
    MIX: tl.constexpr,
    UPDATE: tl.constexpr,
    RES: tl.constexpr,
    STEPS: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    HALVES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All gradients from G[j] = g[j] + h_pre[j] du + sum_k dm[k] mapping[k, j] + 2 dss x'[j].

    dx[i] = sum_j h_res[j, i] G[j]        dh_res[j, i] = <G[j], x[i]>
    dy    = sum_j h_post[j] G[j]          dh_post[j]   = <G[j], y>        dmapping = sum_t dm x'

    GRADIENT, READ and MIX say which terms G has; without UPDATE, G itself is what is wanted; so it
    is without RES, where h_res is the identity, beside dy and dh_post.
    dm and 2 dss come together as carry [T, K + 1]; the mapping as in ``write_and_mix_kernel``.
    A program owns BC channels for a group of tokens, STEPS times BT. It leaves its channels' share
    of the products, [slices, T, N + RES N^2], and its tokens' share of dmapping, [groups, K, N, D].
    """
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    m_c = o_c < D
    i_g = tl.program_id(1)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    o_phi = o_k[:, None] * (N * D) + o_c[None, :]
    m_phi = m_k[:, None] & m_c[None, :]
    if UPDATE:
        p_products += tl.program_id(0).to(tl.int64) * tokens * (N + RES * N * N)
    b_high = ()
    b_low = ()
    b_d_phi = ()
    if MIX:
        for j in tl.static_range(N):
            b_high = b_high + (tl.load(p_mapping + o_phi + j * D, mask=m_phi, other=0.0),)
            if HALVES == 2:
                p_low = p_mapping + BK * N * D + o_phi
                b_low = b_low + (tl.load(p_low + j * D, mask=m_phi, other=0.0),)
            else:
                b_low = b_low + (b_high[j],)
            b_d_phi = b_d_phi + (tl.zeros((BK, BC), tl.float32),)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        o_t = (i_g * STEPS + step) * BT + tl.arange(0, BT)
        m_t = o_t < tokens
        o_row = o_t.to(tl.int64)
        m = m_t[:, None] & m_c[None, :]
        o_x = o_row[:, None] * (N * D) + o_c[None, :]
        o_y = o_row[:, None] * D + o_c[None, :]
        if READ:
            b_du = tl.load(p_d_read + o_y, mask=m, other=0.0).to(tl.float32)
        if MIX:
            o_dm = o_row[:, None] * (K + 1) + o_k[None, :]
            b_dm = tl.load(p_carry + o_dm, mask=m_t[:, None] & m_k[None, :], other=0.0)
            b_dss = tl.load(p_carry + o_row * (K + 1) + K, mask=m_t, other=0.0)
        b_gs = ()
        b_d_phi_new = ()
        for j in tl.static_range(N):
            b_g = tl.zeros((BT, BC), tl.float32)
            if MIX:
                b_new = tl.load(p_written + o_x + j * D, mask=m, other=0.0)
                b_d_phi_new = b_d_phi_new + (dot_transposed(b_dm, b_new, b_d_phi[j]),)
                b_g = dot_mapping(b_dm, b_high[j], b_low[j], HALVES == 2)
                b_g = tl.fma(b_dss[:, None], b_new.to(tl.float32), b_g)
            if READ:
                b_pre = tl.load(p_pre + o_row * N + j, mask=m_t, other=0.0)
                b_g = tl.fma(b_pre[:, None], b_du, b_g)
            if GRADIENT:
                b_g += tl.load(p_gradient + o_x + j * D, mask=m, other=0.0).to(tl.float32)
            if UPDATE:
                b_gs = b_gs + (b_g,)
            if not UPDATE or not RES:
                b_out = rounded(b_g, p_d_streams.dtype.element_ty)
                tl.store(p_d_streams + o_x + j * D, b_out, mask=m)
        if MIX:
            b_d_phi = b_d_phi_new
        if UPDATE:
            p_share = p_products + o_row * (N + RES * N * N)
            b_y = tl.load(p_output + o_y, mask=m, other=0.0).to(tl.float32)
            b_sum = tl.zeros((BT, BC), tl.float32)
            for j in tl.static_range(N):
                b_post = tl.load(p_post + o_row * N + j, mask=m_t, other=0.0)
                b_sum = tl.fma(b_post[:, None], b_gs[j], b_sum)
                tl.store(p_share + j, tl.sum(b_gs[j] * b_y, 1), mask=m_t)
            tl.store(p_d_output + o_y, rounded(b_sum, p_d_output.dtype.element_ty), mask=m)
            for i in tl.static_range(N if RES else 0):
                b_x = tl.load(p_streams + o_x + i * D, mask=m, other=0.0).to(tl.float32)
                b_sum = tl.zeros((BT, BC), tl.float32)
                for j in tl.static_range(N):
                    o_pair = j * N + i
                    b_res = tl.load(p_res + o_row * (N * N) + o_pair, mask=m_t, other=0.0)
                    b_sum = tl.fma(b_res[:, None], b_gs[j], b_sum)
                    b_product = tl.sum(b_gs[j] * b_x, 1)
                    tl.store(p_share + N + o_pair, b_product, mask=m_t)
                b_out = rounded(b_sum, p_d_streams.dtype.element_ty)
                tl.store(p_d_streams + o_x + i * D, b_out, mask=m)
    if MIX:
        p_group = p_d_mapping + i_g.to(tl.int64) * K * N * D + o_phi
        for j in tl.static_range(N):
            tl.store(p_group + j * D, b_d_phi[j], mask=m_phi)
