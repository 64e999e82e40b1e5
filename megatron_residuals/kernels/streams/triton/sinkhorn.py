# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Sinkhorn iterations of one token in one thread, and their exact gradient.

A block of numbers is one vector over tokens, a matrix a tuple of N^2 such vectors, row-major
[new, old] in both conventions, so that no iteration needs another thread. The first normalisation
of columns and rows is done on logarithms; after it every sum lies within [1/N, N], whatever the
logits, and the others divide.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def over_new(b_matrix, N: tl.constexpr):
    """Sums over the new streams, one for each old one."""
    b_sums = ()
    for i in tl.static_range(N):
        b_sum = b_matrix[i]
        for j in tl.static_range(1, N):
            b_sum = b_sum + b_matrix[j * N + i]
        b_sums = b_sums + (b_sum,)
    return b_sums


@triton.jit
def over_old(b_matrix, N: tl.constexpr):
    """Sums over the old streams, one for each new one."""
    b_sums = ()
    for j in tl.static_range(N):
        b_sum = b_matrix[j * N]
        for i in tl.static_range(1, N):
            b_sum = b_sum + b_matrix[j * N + i]
        b_sums = b_sums + (b_sum,)
    return b_sums


@triton.jit
def oriented(b_logits, N: tl.constexpr, DSV4: tl.constexpr):
    """As [new, old]; DeepSeek-V4 projects [old, new]."""
    b_matrix = ()
    for j in tl.static_range(N):
        for i in tl.static_range(N):
            b_matrix = b_matrix + (b_logits[i * N + j if DSV4 else j * N + i],)
    return b_matrix


@triton.jit
def columns_softmax(b_logits, N: tl.constexpr):
    """softmax over the new streams: its logarithm, and itself."""
    b_mosts = ()
    b_totals = ()
    for i in tl.static_range(N):
        b_most = b_logits[i]
        for j in tl.static_range(1, N):
            b_most = tl.maximum(b_most, b_logits[j * N + i])
        b_total = tl.exp(b_logits[i] - b_most)
        for j in tl.static_range(1, N):
            b_total += tl.exp(b_logits[j * N + i] - b_most)
        b_mosts = b_mosts + (b_most,)
        b_totals = b_totals + (tl.log(b_total),)
    b_logs = ()
    b_values = ()
    for j in tl.static_range(N):
        for i in tl.static_range(N):
            b_log = (b_logits[j * N + i] - b_mosts[i]) - b_totals[i]
            b_logs = b_logs + (b_log,)
            b_values = b_values + (tl.exp(b_log),)
    return b_logs, b_values


@triton.jit
def rows_softmax(b_logits, N: tl.constexpr):
    """softmax over the old streams."""
    b_values = ()
    for j in tl.static_range(N):
        b_most = b_logits[j * N]
        for i in tl.static_range(1, N):
            b_most = tl.maximum(b_most, b_logits[j * N + i])
        b_total = tl.exp(b_logits[j * N] - b_most)
        for i in tl.static_range(1, N):
            b_total += tl.exp(b_logits[j * N + i] - b_most)
        for i in tl.static_range(N):
            b_values = b_values + (tl.exp(b_logits[j * N + i] - b_most) / b_total,)
    return b_values


@triton.jit
def first_iteration(b_logits, N: tl.constexpr, DSV4: tl.constexpr, EPS: tl.constexpr):
    """The matrix after one iteration, and the softmax over columns that it began with."""
    b_logs, b_columns = columns_softmax(b_logits, N)
    if DSV4:
        b_raised = ()
        for k in tl.static_range(N * N):
            b_raised = b_raised + (b_columns[k] + EPS,)
        b_matrix = divided_rows(b_raised, over_old(b_raised, N), N, EPS)
    else:
        b_matrix = rows_softmax(b_logs, N)
    return b_matrix, b_columns


@triton.jit
def divided_rows(b_matrix, b_sums, N: tl.constexpr, EPS: tl.constexpr):
    """Every row by its sum + EPS."""
    b_new = ()
    for j in tl.static_range(N):
        b_factor = 1.0 / (b_sums[j] + EPS)
        for i in tl.static_range(N):
            b_new = b_new + (b_matrix[j * N + i] * b_factor,)
    return b_new


@triton.jit
def divided_columns(b_matrix, b_sums, N: tl.constexpr, EPS: tl.constexpr):
    """Every column by its sum + EPS."""
    b_factors = ()
    for i in tl.static_range(N):
        b_factors = b_factors + (1.0 / (b_sums[i] + EPS),)
    b_new = ()
    for j in tl.static_range(N):
        for i in tl.static_range(N):
            b_new = b_new + (b_matrix[j * N + i] * b_factors[i],)
    return b_new


@triton.jit
def products_of(b_left, b_right, N: tl.constexpr):
    """Element by element."""
    b_products = ()
    for k in tl.static_range(N * N):
        b_products = b_products + (b_left[k] * b_right[k],)
    return b_products


@triton.jit
def sinkhorn_forward(
    b_logits, N: tl.constexpr, ITERATIONS: tl.constexpr, DSV4: tl.constexpr, EPS: tl.constexpr
):
    """H_res [new, old] from its logits in the same orientation."""
    b_matrix, _ = first_iteration(b_logits, N, DSV4, EPS)
    for _step in range(ITERATIONS - 1):
        b_matrix = divided_columns(b_matrix, over_new(b_matrix, N), N, EPS)
        b_matrix = divided_rows(b_matrix, over_old(b_matrix, N), N, EPS)
    return b_matrix


@triton.jit
def sinkhorn_backward(
    b_logits,
    b_gradient,
    p_sums,
    o_row,
    m_t,
    count,
    N: tl.constexpr,
    ITERATIONS: tl.constexpr,
    DSV4: tl.constexpr,
    EPS: tl.constexpr,
):
    """Gradient of the logits, exact: iterates from the last to the first, each from the next.

    The sums of every step wait in p_sums [2 (ITERATIONS - 1) N, T], written and read by the same
    thread; a matrix times its sums is the one before the division.
    """
    b_matrix, _ = first_iteration(b_logits, N, DSV4, EPS)
    for step in range(ITERATIONS - 1):
        p_step = p_sums + step * (2 * N) * count + o_row
        b_sums = over_new(b_matrix, N)
        for i in tl.static_range(N):
            tl.store(p_step + i * count, b_sums[i], mask=m_t)
        b_matrix = divided_columns(b_matrix, b_sums, N, EPS)
        b_sums = over_old(b_matrix, N)
        for j in tl.static_range(N):
            tl.store(p_step + (N + j) * count, b_sums[j], mask=m_t)
        b_matrix = divided_rows(b_matrix, b_sums, N, EPS)
    tl.debug_barrier()
    for back in range(ITERATIONS - 1):
        p_step = p_sums + (ITERATIONS - 2 - back) * (2 * N) * count + o_row
        b_dots = over_old(products_of(b_gradient, b_matrix, N), N)
        b_new = ()
        b_before = ()
        for j in tl.static_range(N):
            b_sum = tl.load(p_step + (N + j) * count, mask=m_t, other=1.0) + EPS
            b_factor = 1.0 / b_sum
            for i in tl.static_range(N):
                b_new = b_new + ((b_gradient[j * N + i] - b_dots[j]) * b_factor,)
                b_before = b_before + (b_matrix[j * N + i] * b_sum,)
        b_gradient, b_matrix = b_new, b_before
        b_dots = over_new(products_of(b_gradient, b_matrix, N), N)
        b_sums = ()
        b_factors = ()
        for i in tl.static_range(N):
            b_sum = tl.load(p_step + i * count, mask=m_t, other=1.0) + EPS
            b_sums = b_sums + (b_sum,)
            b_factors = b_factors + (1.0 / b_sum,)
        b_new = ()
        b_before = ()
        for j in tl.static_range(N):
            for i in tl.static_range(N):
                b_new = b_new + ((b_gradient[j * N + i] - b_dots[i]) * b_factors[i],)
                b_before = b_before + (b_matrix[j * N + i] * b_sums[i],)
        b_gradient, b_matrix = b_new, b_before
    return first_backward(b_logits, b_gradient, N, DSV4, EPS)


@triton.jit
def first_backward(b_logits, b_gradient, N: tl.constexpr, DSV4: tl.constexpr, EPS: tl.constexpr):
    """Through the first iteration."""
    b_matrix, b_columns = first_iteration(b_logits, N, DSV4, EPS)
    b_dots = over_old(products_of(b_gradient, b_matrix, N), N)
    b_result = ()
    if DSV4:
        b_new = ()
        for j in tl.static_range(N):
            b_sum = b_columns[j * N] + EPS
            for i in tl.static_range(1, N):
                b_sum = b_sum + (b_columns[j * N + i] + EPS)
            b_factor = 1.0 / (b_sum + EPS)
            for i in tl.static_range(N):
                b_new = b_new + ((b_gradient[j * N + i] - b_dots[j]) * b_factor,)
        b_dots = over_new(products_of(b_new, b_columns, N), N)
        for j in tl.static_range(N):
            for i in tl.static_range(N):
                b_result = b_result + (b_columns[j * N + i] * (b_new[j * N + i] - b_dots[i]),)
    else:
        b_logs = ()
        for j in tl.static_range(N):
            for i in tl.static_range(N):
                b_logs = b_logs + (b_matrix[j * N + i] * (b_gradient[j * N + i] - b_dots[j]),)
        b_dots = over_new(b_logs, N)
        for j in tl.static_range(N):
            for i in tl.static_range(N):
                b_result = b_result + (b_logs[j * N + i] - b_columns[j * N + i] * b_dots[i],)
    return b_result
