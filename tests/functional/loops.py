# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The papers' equations in plain Python floats, one entry at a time: what the tests compare with.

Nothing here calls the package or torch's linear algebra. Matrices are lists of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Vector = list[float]
Matrix = list[Vector]


def random_tensors(seed: int) -> Callable[..., Tensor]:
    """``draw(2, 3)`` gives normal float64 numbers of that shape, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return draw


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def transposed(matrix: Matrix) -> Matrix:
    return [list(column) for column in zip(*matrix, strict=True)]


def divided_rows(matrix: Matrix, eps: float = 0.0) -> Matrix:
    return [[entry / (sum(row) + eps) for entry in row] for row in matrix]


def divided_columns(matrix: Matrix, eps: float = 0.0) -> Matrix:
    return transposed(divided_rows(transposed(matrix), eps))


def sinkhorn_paper(logits: Matrix, iterations: int) -> Matrix:
    """M = exp(logits), then columns, then rows, again and again (mHC, eq. 9)."""
    matrix = [[math.exp(entry) for entry in row] for row in logits]
    for _ in range(iterations):
        matrix = divided_rows(divided_columns(matrix))
    return matrix


def sinkhorn_dsv4(logits: Matrix, iterations: int, eps: float) -> Matrix:
    """comb [old][new]: softmax over rows, columns, then rows and columns again and again."""
    shifted = [[math.exp(entry - max(row)) for entry in row] for row in logits]
    comb = [[entry + eps for entry in row] for row in divided_rows(shifted)]
    comb = divided_columns(comb, eps)
    for _ in range(iterations - 1):
        comb = divided_columns(divided_rows(comb, eps), eps)
    return comb


def divided_rows_backward(matrix: Matrix, cotangent: Matrix, eps: float = 0.0) -> Matrix:
    """For M' = M / s, s = row sum + eps: dM = (dM' - sum_row(dM' M')) / s."""
    gradient = []
    for row, upstream in zip(matrix, cotangent, strict=True):
        total = sum(row) + eps
        mean = dot(upstream, [entry / total for entry in row])
        gradient.append([(entry - mean) / total for entry in upstream])
    return gradient


def divided_columns_backward(matrix: Matrix, cotangent: Matrix, eps: float = 0.0) -> Matrix:
    return transposed(divided_rows_backward(transposed(matrix), transposed(cotangent), eps))


def sinkhorn_paper_backward(logits: Matrix, iterations: int, cotangent: Matrix) -> Matrix:
    """dlogits: all iterates are kept and walked through backwards; exp last."""
    start = [[math.exp(entry) for entry in row] for row in logits]
    pairs, matrix = [], start
    for _ in range(iterations):
        by_columns = divided_columns(matrix)
        pairs.append((matrix, by_columns))
        matrix = divided_rows(by_columns)
    gradient = cotangent
    for before, by_columns in reversed(pairs):
        gradient = divided_columns_backward(before, divided_rows_backward(by_columns, gradient))
    return [
        [entry * upstream for entry, upstream in zip(*rows, strict=True)]
        for rows in zip(start, gradient, strict=True)
    ]


def sinkhorn_dsv4_backward(
    logits: Matrix, iterations: int, eps: float, cotangent: Matrix
) -> Matrix:
    shifted = [[math.exp(entry - max(row)) for entry in row] for row in logits]
    softmax = divided_rows(shifted)
    steps: list[tuple[Callable[..., Matrix], Matrix]] = []
    comb = [[entry + eps for entry in row] for row in softmax]
    for step in range(2 * iterations - 1):
        by_columns = step % 2 == 0
        steps.append((divided_columns_backward if by_columns else divided_rows_backward, comb))
        comb = (divided_columns if by_columns else divided_rows)(comb, eps)
    gradient = cotangent
    for backward, before in reversed(steps):
        gradient = backward(before, gradient, eps)
    return [
        [
            weight * (entry - dot(weights, upstream))
            for weight, entry in zip(weights, upstream, strict=True)
        ]
        for weights, upstream in zip(softmax, gradient, strict=True)
    ]


def mhc_coefficients(
    streams: Matrix,
    mapping: Matrix,
    bias: Vector,
    alpha: Vector,
    *,
    convention: str,
    iterations: int,
    eps: float,
) -> tuple[Vector, Vector, Matrix]:
    """h_pre, h_post and h_res [new][old] of one token (mHC, eq. 7-9; DeepSeek-V4's released code).

    Rows of mapping and entries of bias: n for pre, n for post, n * n for res, row by row.
    """
    n = len(streams)
    flat = [entry for stream in streams for entry in stream]
    rms = math.sqrt(sum(entry * entry for entry in flat) / len(flat) + eps)
    logits = []
    for k, row in enumerate(mapping):
        gate = alpha[0] if k < n else alpha[1] if k < 2 * n else alpha[2]
        logits.append(gate * dot(row, flat) / rms + bias[k])
    h_pre = [sigmoid(logit) for logit in logits[:n]]
    h_post = [2 * sigmoid(logit) for logit in logits[n : 2 * n]]
    res = [logits[2 * n + n * i : 2 * n + n * (i + 1)] for i in range(n)]
    if convention == "paper":
        return h_pre, h_post, sinkhorn_paper(res, iterations)
    comb = sinkhorn_dsv4(res, iterations, eps)
    return [weight + eps for weight in h_pre], h_post, transposed(comb)


def head_weights(
    streams: Matrix, mapping: Matrix, bias: Vector, scale: float, eps: float
) -> Vector:
    """w = sigmoid(scale * mix + bias) + eps of one token (DeepSeek-V4's learned contraction)."""
    flat = [entry for stream in streams for entry in stream]
    rms = math.sqrt(sum(entry * entry for entry in flat) / len(flat) + eps)
    return [sigmoid(scale * dot(row, flat) / rms + bias[k]) + eps for k, row in enumerate(mapping)]


def normalised(vector: Vector, norm: str, eps: float) -> Vector:
    mean = sum(vector) / len(vector) if norm == "layernorm" else 0.0
    centred = [entry - mean for entry in vector]
    scale = math.sqrt(sum(entry * entry for entry in centred) / len(centred) + eps)
    return [entry / scale for entry in centred]


def hyper_connection(
    streams: Matrix,
    sublayer: Callable[[Vector], Vector],
    *,
    a_m: Vector,
    b: Vector,
    a_r: Matrix,
    dynamic: tuple[Vector, Vector, Matrix, float, float] | None,
    norm: str,
    eps: float,
) -> tuple[Vector, Matrix]:
    """(h_0, new streams) of one token by the formula of the HC paper: h_0 = A_m^T H,
    H' = A_r^T H, new H = B^T T(h_0)^T + H'.

    a_r [old][new]; dynamic is (W_m [d], W_b [d], W_r [d][n], s_alpha, s_beta).
    """
    n, width = len(streams), len(streams[0])
    read, write, mix = list(a_m), list(b), [list(row) for row in a_r]
    if dynamic is not None:
        w_m, w_b, w_r, s_alpha, s_beta = dynamic
        for i in range(n):
            bar = normalised(streams[i], norm, eps)
            read[i] += s_alpha * math.tanh(dot(bar, w_m))
            write[i] += s_beta * math.tanh(dot(bar, w_b))
            for j in range(n):
                mix[i][j] += s_alpha * math.tanh(sum(bar[c] * w_r[c][j] for c in range(width)))
    h_0 = [sum(read[i] * streams[i][c] for i in range(n)) for c in range(width)]
    output = sublayer(h_0)
    mixed = [
        [sum(mix[i][j] * streams[i][c] for i in range(n)) for c in range(width)] for j in range(n)
    ]
    return h_0, [[mixed[j][c] + write[j] * output[c] for c in range(width)] for j in range(n)]


def depth_weights(sources: Matrix, query: Vector, key_gain: Vector, eps: float) -> Vector:
    """softmax_j(query . RMSNorm(source_j) * gain) of one token (Attention Residuals, section 3)."""
    logits = []
    for source in sources:
        rms = math.sqrt(sum(entry * entry for entry in source) / len(source) + eps)
        key = [gain * entry / rms for gain, entry in zip(key_gain, source, strict=True)]
        logits.append(dot(query, key))
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


def depth_read_backward(
    sources: Matrix, query: Vector, key_gain: Vector, eps: float, cotangent: Vector
) -> tuple[Matrix, Vector, Vector]:
    """Gradients of the weighted sum of one token for sources, query and gain, derived by hand.

    With u_j = <g, V_j>: dlogit_j = a_j (u_j - sum_k a_k u_k), then through the dot product and
    through the mean square of the RMS norm.
    """
    weights = depth_weights(sources, query, key_gain, eps)
    direction = [q * gain for q, gain in zip(query, key_gain, strict=True)]
    projections = [dot(cotangent, source) for source in sources]
    average = dot(weights, projections)
    d_sources, d_direction = [], [0.0] * len(query)
    for weight, projection, source in zip(weights, projections, sources, strict=True):
        rstd = 1 / math.sqrt(dot(source, source) / len(source) + eps)
        d_logit = weight * (projection - average)
        d_dot = d_logit * rstd
        d_mean_square = d_logit * dot(source, direction) * -0.5 * rstd**3
        d_sources.append(
            [
                weight * cotangent[c]
                + d_dot * direction[c]
                + 2 / len(source) * d_mean_square * source[c]
                for c in range(len(source))
            ]
        )
        d_direction = [
            total + d_dot * entry for total, entry in zip(d_direction, source, strict=True)
        ]
    d_query = [gain * entry for gain, entry in zip(key_gain, d_direction, strict=True)]
    d_gain = [q * entry for q, entry in zip(query, d_direction, strict=True)]
    return d_sources, d_query, d_gain
