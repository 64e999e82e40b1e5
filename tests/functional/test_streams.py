# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Streams: which index is new and which is old, mHC and HC coefficients, contractions."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from megatron_residuals.functional import (
    MhcOptions,
    MhcWeights,
    StreamCoefficients,
    StreamUpdate,
    contract_streams,
    expand_streams,
    hc_coefficients,
    mhc_coefficients,
    mhc_head_weights,
    read_streams,
    write_streams,
)
from megatron_residuals.testing import assert_close
from tests.functional import loops

D = 5
CONVENTIONS = ("paper", "dsv4")
NORMS = ("layernorm", "rmsnorm")

close = functools.partial(assert_close, dtype=torch.float64, kind="same_math")


def cycle(n: int) -> Tensor:
    """h_res [new, old] of the permutation that moves old stream i to new stream i + 1."""
    h_res = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        h_res[(i + 1) % n, i] = 1.0
    return h_res


def mhc_parameters(n: int, seed: int = 1) -> MhcWeights:
    """All random; alpha large enough for the input to matter."""
    draw = loops.random_tensors(seed)
    columns, alpha = 2 * n + n * n, torch.tensor([0.3, 0.2, 0.4], dtype=torch.float64)
    return MhcWeights(draw(columns, n * D), draw(columns), alpha)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_reading_is_a_weighted_sum_of_the_streams(n: int) -> None:
    draw = loops.random_tensors(n)
    streams, h_pre = draw(2, 3, n, D), draw(2, 3, n)
    x = read_streams(streams, h_pre)
    assert x.shape == (2, 3, D)
    for s in range(2):
        for b in range(3):
            token, weights = streams[s, b].tolist(), h_pre[s, b].tolist()
            expected = [sum(weights[i] * token[i][c] for i in range(n)) for c in range(D)]
            close(x[s, b], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_writing_mixes_old_streams_into_new_ones_and_adds_the_output(n: int) -> None:
    draw = loops.random_tensors(n)
    streams, h_post, h_res, output = draw(6, n, D), draw(6, n), draw(6, n, n), draw(6, D)
    written = write_streams(StreamUpdate(streams, output, h_post, h_res))
    assert written.shape == streams.shape
    for t in range(6):
        for new in range(n):
            for c in range(D):
                mixed = sum(float(h_res[t, new, old] * streams[t, old, c]) for old in range(n))
                expected = mixed + float(h_post[t, new] * output[t, c])
                assert float(written[t, new, c]) == pytest.approx(expected, rel=1e-12, abs=1e-13)


def test_a_permutation_moves_each_stream_where_its_column_says() -> None:
    streams, output = loops.random_tensors(0)(4, D), torch.zeros(D, dtype=torch.float64)
    h_post = torch.ones(4, dtype=torch.float64)
    moved = write_streams(StreamUpdate(streams, output, h_post, cycle(4)))
    for i in range(4):
        assert torch.equal(moved[(i + 1) % 4], streams[i])


def test_the_gradient_of_a_sublayer_is_the_one_derived_by_hand() -> None:
    """g = dL/dx': do = sum_j post_j g_j, dpost_j = <g_j, o>, dH_ji = <g_j, x_i>, then back through
    o = F(y) (here a diagonal F) and y = sum_i pre_i x_i."""
    draw = loops.random_tensors(2)
    n, diagonal = 3, draw(D)
    leaves = [t.requires_grad_() for t in (draw(n, D), draw(n), draw(n), draw(n, n))]
    streams, h_pre, h_post, h_res = leaves
    output = diagonal * read_streams(streams, h_pre)
    cotangent = draw(n, D)
    written = write_streams(StreamUpdate(streams, output, h_post, h_res))
    grads = torch.autograd.grad(written, leaves, cotangent)
    x, g, pre, post = streams.tolist(), cotangent.tolist(), h_pre.tolist(), h_post.tolist()
    res, out = h_res.tolist(), output.tolist()
    d_out = [sum(post[j] * g[j][c] for j in range(n)) for c in range(D)]
    d_y = [float(diagonal[c]) * d_out[c] for c in range(D)]
    d_x = [
        [sum(res[j][i] * g[j][c] for j in range(n)) + pre[i] * d_y[c] for c in range(D)]
        for i in range(n)
    ]
    d_pre = [loops.dot(d_y, x[i]) for i in range(n)]
    d_post = [loops.dot(g[j], out) for j in range(n)]
    d_res = [[loops.dot(g[j], x[i]) for i in range(n)] for j in range(n)]
    for actual, expected in zip(grads, (d_x, d_pre, d_post, d_res), strict=True):
        close(actual, torch.tensor(expected, dtype=torch.float64))


def test_the_sum_of_the_streams_is_kept_when_columns_sum_to_one() -> None:
    """sum_j x'_j = sum_i x_i + (sum_j post_j) o; rows need not sum to one for it."""
    draw = loops.random_tensors(3)
    streams, h_post, output = draw(7, 4, D), draw(7, 4), draw(7, D)
    h_res = draw(7, 4, 4).exp()
    h_res = h_res / h_res.sum(-2, keepdim=True)
    written = write_streams(StreamUpdate(streams, output, h_post, h_res))
    close(written.sum(-2), streams.sum(-2) + h_post.sum(-1, keepdim=True) * output)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_mhc_keeps_the_sum_of_the_streams_once_sinkhorn_has_converged(convention: str) -> None:
    draw = loops.random_tensors(4)
    streams, output = draw(7, 4, D), draw(7, D)
    weights = mhc_parameters(4)
    weights = weights._replace(alpha=0.3 * weights.alpha)
    _, h_post, h_res = mhc_coefficients(streams, weights, MhcOptions(convention, 400, 1e-25))
    assert (h_res - h_res.transpose(-1, -2)).abs().max() > 0.1
    written = write_streams(StreamUpdate(streams, output, h_post, h_res))
    close(written.sum(-2), streams.sum(-2) + h_post.sum(-1, keepdim=True) * output)


@pytest.mark.parametrize("eps", [1e-20, 1e-6, 1e-2])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_mhc_coefficients_follow_the_equations_token_by_token(
    convention: str, n: int, eps: float
) -> None:
    """With eps 1e-2 a misplaced eps (outside the root, missing in a division) is far off."""
    streams = 0.3 * loops.random_tensors(5)(2, 3, n, D)
    weights, options = mhc_parameters(n), MhcOptions(convention, 3, eps)
    actual = mhc_coefficients(streams, weights, options)
    assert [tuple(t.shape) for t in actual] == [(2, 3, n), (2, 3, n), (2, 3, n, n)]
    for s in range(2):
        for b in range(3):
            expected = loops.mhc_coefficients(
                streams[s, b].tolist(),
                *[weight.tolist() for weight in weights],
                convention=convention,
                iterations=3,
                eps=eps,
            )
            for mine, theirs in zip(actual, expected, strict=True):
                close(mine[s, b], torch.tensor(theirs, dtype=torch.float64))


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_the_bias_of_a_permutation_moves_streams_in_the_direction_of_its_convention(
    convention: str,
) -> None:
    """paper: bias entry [new, old]; dsv4: entry [old, new]."""
    n, streams = 4, loops.random_tensors(6)(4, D)
    mapping = torch.zeros(2 * n + n * n, n * D, dtype=torch.float64)
    res = 40 * (cycle(n) if convention == "paper" else cycle(n).T)
    bias = torch.cat((torch.zeros(2 * n, dtype=torch.float64), res.flatten()))
    weights = MhcWeights(mapping, bias, torch.ones(3, dtype=torch.float64))
    _, h_post, h_res = mhc_coefficients(streams, weights, MhcOptions(convention, 20, 1e-20))
    nothing = torch.zeros(D, dtype=torch.float64)
    moved = write_streams(StreamUpdate(streams, nothing, h_post, h_res))
    for i in range(n):
        assert (moved[(i + 1) % n] - streams[i]).abs().max() <= 1e-12


def test_without_mixing_mhc_is_its_gates_and_a_matrix_that_is_the_identity() -> None:
    """iHC is mHC with H_res fixed to I; only then is eps added to both gates."""
    n, streams, output = 3, loops.random_tensors(6)(5, 3, D), loops.random_tensors(7)(5, D)
    weights = mhc_parameters(n)
    gates = MhcWeights(weights.mapping[: 2 * n], weights.bias[: 2 * n], weights.alpha[:2])
    mixed = mhc_coefficients(streams, weights, MhcOptions("paper", 3, 1e-3))
    alone = mhc_coefficients(streams, gates, MhcOptions("identity", 0, 1e-3, 1e-2))
    close(alone.h_pre, mixed.h_pre + 1e-2)
    close(alone.h_post, mixed.h_post + 1e-2)
    assert alone.h_res is None
    identity = torch.eye(n, dtype=torch.float64).expand(5, n, n)
    written = write_streams(StreamUpdate(streams, output, alone.h_post, identity))
    close(write_streams(StreamUpdate(streams, output, alone.h_post)), written)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_gradcheck_of_mhc_coefficients(convention: str, n: int) -> None:
    inputs = [loops.random_tensors(7)(2, n, D), *mhc_parameters(n)]

    def function(streams: Tensor, *weights: Tensor) -> StreamCoefficients:
        return mhc_coefficients(streams, MhcWeights(*weights), MhcOptions(convention, 3, 1e-3))

    leaves = [t.requires_grad_() for t in inputs]
    # Entry by entry where that is quick, along a random direction where it is not.
    assert torch.autograd.gradcheck(function, leaves, fast_mode=n > 2)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_learned_head_is_a_sigmoid_of_one_projection_plus_eps(n: int) -> None:
    draw = loops.random_tensors(8)
    streams, mapping, bias = draw(3, n, D), draw(n, n * D), draw(n)
    scale = torch.tensor([0.4], dtype=torch.float64)
    weights = mhc_head_weights(streams, mapping, bias, scale, eps=1e-2)
    for t in range(3):
        expected = loops.head_weights(
            streams[t].tolist(), mapping.tolist(), bias.tolist(), 0.4, 1e-2
        )
        close(weights[t], torch.tensor(expected, dtype=torch.float64))
    head = functools.partial(mhc_head_weights, eps=1e-2)
    leaves = [t.requires_grad_() for t in (streams, mapping, bias, scale)]
    assert torch.autograd.gradcheck(head, leaves)


def nonlinear(x: loops.Vector) -> loops.Vector:
    return [0.5 * entry * entry - entry for entry in x]


def hc_inputs(n: int, seed: int = 9) -> tuple[StreamCoefficients, Tensor, Tensor]:
    """Static matrices in this package's order, mapping and scale, all random."""
    draw = loops.random_tensors(seed)
    static = StreamCoefficients(draw(n), draw(n), draw(n, n))
    return static, draw(n + 2, D), torch.tensor([0.7, 0.4], dtype=torch.float64)


@pytest.mark.parametrize("eps", [1e-5, 1e-1])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_hc_is_the_formula_of_its_paper_in_which_a_r_acts_transposed(
    n: int, dynamic: bool, norm: str, eps: float
) -> None:
    streams = loops.random_tensors(10)(6, n, D)
    static, mapping, scale = hc_inputs(n)
    coefficients = hc_coefficients(
        streams,
        static,
        mapping if dynamic else None,
        scale if dynamic else None,
        norm=norm,
        eps=eps,
    )
    x = read_streams(streams, coefficients.h_pre)
    written = write_streams(StreamUpdate(streams, 0.5 * x * x - x, *coefficients[1:]))
    w_m, w_b, *w_r_columns = mapping.tolist()
    w_r = loops.transposed(w_r_columns)
    for t in range(6):
        h_0, new_streams = loops.hyper_connection(
            streams[t].tolist(),
            nonlinear,
            a_m=static.h_pre.tolist(),
            b=static.h_post.tolist(),
            a_r=static.h_res.T.tolist(),
            dynamic=(w_m, w_b, w_r, *scale.tolist()) if dynamic else None,
            norm=norm,
            eps=eps,
        )
        close(x[t], torch.tensor(h_0, dtype=torch.float64))
        close(written[t], torch.tensor(new_streams, dtype=torch.float64))


@pytest.mark.parametrize("norm", NORMS)
def test_gradcheck_of_hc_coefficients(norm: str) -> None:
    static, mapping, scale = hc_inputs(3)

    def flat(streams: Tensor, mapping: Tensor, scale: Tensor, *static: Tensor) -> object:
        packed = StreamCoefficients(*static)
        return hc_coefficients(streams, packed, mapping, scale, norm=norm, eps=1e-2)

    inputs = [loops.random_tensors(11)(2, 3, D), mapping, scale, *static]
    assert torch.autograd.gradcheck(flat, [t.requires_grad_() for t in inputs])


def test_expanded_streams_are_copies_that_own_their_memory() -> None:
    embedding = loops.random_tensors(12)(2, 3, D)
    streams = expand_streams(embedding, 4)
    assert streams.shape == (2, 3, 4, D) and streams.is_contiguous()
    assert all(torch.equal(streams[:, :, i], embedding) for i in range(4))
    streams[:, :, 1] += 1
    assert torch.equal(streams[:, :, 0], embedding)


def test_contractions_are_the_mean_the_sum_or_the_weighted_sum() -> None:
    draw = loops.random_tensors(13)
    streams, weights = draw(3, 4, D), draw(3, 4)
    total = streams[:, 0] + streams[:, 1] + streams[:, 2] + streams[:, 3]
    close(contract_streams(streams, "sum"), total)
    close(contract_streams(streams, "mean"), total / 4)
    weighted = sum(weights[:, i, None] * streams[:, i] for i in range(4))
    close(contract_streams(streams, "learned", weights), weighted)


@pytest.mark.parametrize("how", ["median", "learned"])
def test_a_contraction_that_is_unknown_or_lacks_its_weights_is_refused(how: str) -> None:
    with pytest.raises(ValueError, match=f"'{how}'; allowed: mean, sum, learned"):
        contract_streams(torch.zeros(4, D), how)


def test_a_misspelt_convention_or_norm_is_refused_instead_of_read_as_another() -> None:
    streams, weights = loops.random_tensors(14)(4, D), mhc_parameters(4)
    with pytest.raises(ValueError, match="deepseek"):
        mhc_coefficients(streams, weights, MhcOptions("deepseek", 2, 1e-6))
    static, hc_mapping, scale = hc_inputs(4)
    with pytest.raises(ValueError, match="layer_norm"):
        hc_coefficients(streams, static, hc_mapping, scale, norm="layer_norm", eps=1e-6)


def test_float64_streams_work_with_float32_parameters() -> None:
    """Functions compute in at least float32, so the wider of the two wins."""
    streams, output = loops.random_tensors(15)(3, 4, D), loops.random_tensors(16)(3, D)
    narrow = MhcWeights(*[parameter.float() for parameter in mhc_parameters(4)])
    options = MhcOptions("paper", 3, 1e-6)
    found = mhc_coefficients(streams, narrow, options)
    wide = mhc_coefficients(streams, MhcWeights(*[t.double() for t in narrow]), options)
    for mine, theirs in zip(found, wide, strict=True):
        close(mine, theirs)
    static, mapping, scale = hc_inputs(4)
    single = StreamCoefficients(*(t.float() for t in static))
    for arguments in ((None, None), (mapping.float(), scale.float())):
        pre, post, res = hc_coefficients(streams, single, *arguments, norm="rmsnorm", eps=1e-6)
        assert read_streams(streams, pre).dtype == torch.float64
        assert write_streams(StreamUpdate(streams, output, post, res)).dtype == torch.float64
