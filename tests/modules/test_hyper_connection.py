# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""HC and mHC modules: initial numbers, which parameter is which, and the breaking of symmetry."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mechanisms.streams.module import (
    HyperConnection,
    ManifoldHyperConnection,
    StreamHead,
    StreamResidual,
)
from megatron_residuals.modules import StreamState, build_head, build_sublayer_residual
from megatron_residuals.testing import assert_close
from tests.functional import loops
from tests.modules.tiny_model import TinyModel, tokens

D = 5

close = functools.partial(assert_close, dtype=torch.float64, kind="same_math")


def vector(entries: Sequence[object]) -> Tensor:
    return torch.tensor(entries, dtype=torch.float64)


def randomised(module: nn.Module, seed: int = 1) -> nn.Module:
    """In float64, every parameter at its initial value plus noise."""
    draw = loops.random_tensors(seed)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5 * draw(*parameter.shape)
    return module


def mhc(n: int, sublayer: int = 0, **options: object) -> ManifoldHyperConnection:
    config = ResidualConfig("mhc", streams=n, **options)  # type: ignore[arg-type]
    module = build_sublayer_residual(config, None, hidden_size=D, sublayer=sublayer)
    assert isinstance(module, ManifoldHyperConnection)
    return module


@pytest.mark.parametrize("convention", ["paper", "dsv4"])
@pytest.mark.parametrize("sublayer", [0, 1, 3, 4, 7])
def test_initial_mhc_coefficients_are_those_of_appendix_a6(sublayer: int, convention: str) -> None:
    """One home stream, taken in turn; nearly the identity; whatever the streams hold."""
    module = mhc(4, sublayer, mhc_convention=convention, mhc_eps=1e-20).double()
    h_pre, h_post, h_res = module.coefficients(loops.random_tensors(2)(3, 4, D))
    expected_pre = torch.full((3, 4), 0.047426, dtype=torch.float64)
    expected_pre[:, sublayer % 4] = 0.952574
    expected_res = torch.full((4, 4), 0.00246, dtype=torch.float64).fill_diagonal_(0.992619)
    assert (h_pre - expected_pre).abs().max() <= 5e-7
    assert torch.equal(h_post, torch.ones_like(h_post))
    assert (h_res - expected_res).abs().max() <= 5e-6
    assert (h_res.diagonal(dim1=-2, dim2=-1) - 0.992619).abs().max() <= 5e-7


def test_symmetric_initial_mhc_coefficients_treat_all_streams_alike() -> None:
    h_pre, h_post, h_res = mhc(4, 1, mhc_init="symmetric").coefficients(torch.randn(4, D))
    assert torch.equal(h_pre, torch.full((4,), 0.5))
    assert torch.equal(h_post, torch.ones(4))
    assert (h_res - 0.25).abs().max() <= 1e-6


def test_alpha_starts_at_its_option() -> None:
    module = mhc(2, mhc_alpha_init=0.125)
    for alpha in (module.alpha_pre, module.alpha_post, module.alpha_res):
        assert torch.equal(alpha, torch.tensor([0.125]))


@pytest.mark.parametrize("sublayer", [0, 2, 4])
def test_initial_hc_reads_one_stream_writes_to_all_and_mixes_nothing(sublayer: int) -> None:
    config = ResidualConfig("hc", streams=3)
    module = build_sublayer_residual(config, None, hidden_size=D, sublayer=sublayer)
    assert isinstance(module, HyperConnection)
    h_pre, h_post, h_res = module.coefficients(torch.randn(2, 3, D))
    assert torch.equal(h_pre, torch.eye(3)[sublayer % 3].expand(2, 3))
    assert torch.equal(h_post, torch.ones(2, 3))
    assert torch.equal(h_res, torch.eye(3).expand(2, 3, 3))
    assert torch.equal(module.scale, torch.tensor([0.01, 0.01]))


@pytest.mark.parametrize("convention", ["paper", "dsv4"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_an_mhc_sublayer_is_the_equation_of_the_paper_token_by_token(
    n: int, convention: str
) -> None:
    """x' = H_res x + H_post^T F(H_pre x), every parameter random and told from the others."""
    module = randomised(mhc(n, mhc_convention=convention, mhc_sinkhorn_iterations=3))
    assert isinstance(module, ManifoldHyperConnection)
    streams = loops.random_tensors(3)(4, n, D)
    x, pending = module(StreamState(streams))
    written = module.write(pending, x.sin()).settled().streams
    alpha = torch.cat((module.alpha_pre, module.alpha_post, module.alpha_res))
    for t in range(4):
        token = streams[t].tolist()
        pre, post, res = loops.mhc_coefficients(
            token,
            module.mapping_weight.tolist(),
            module.bias.tolist(),
            alpha.tolist(),
            convention=convention,
            iterations=3,
            eps=1e-20 if convention == "paper" else 1e-6,
        )
        y = [sum(pre[i] * token[i][c] for i in range(n)) for c in range(D)]
        output = vector(y).sin().tolist()
        new = [
            [sum(res[j][i] * token[i][c] for i in range(n)) + post[j] * output[c] for c in range(D)]
            for j in range(n)
        ]
        close(x[t], vector(y))
        close(written[t], vector(new))


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_an_hc_sublayer_is_the_formula_of_its_paper_token_by_token(
    dynamic: bool, norm: str
) -> None:
    n = 3
    config = ResidualConfig("hc", streams=n, hc_dynamic=dynamic, hc_norm=norm)
    module = randomised(build_sublayer_residual(config, None, hidden_size=D, sublayer=1))
    assert isinstance(module, HyperConnection)
    streams = loops.random_tensors(4)(4, n, D)
    x, pending = module(StreamState(streams))
    written = module.write(pending, x.sin()).settled().streams
    projections = None
    if dynamic:
        w_m, w_b, *w_r = module.mapping_weight.tolist()
        projections = (w_m, w_b, loops.transposed(w_r), *module.scale.tolist())
    for t in range(4):
        h_0, new = loops.hyper_connection(
            streams[t].tolist(),
            lambda y: vector(y).sin().tolist(),
            a_m=module.static_pre.tolist(),
            b=module.static_post.tolist(),
            a_r=module.static_res.view(n, n).T.tolist(),
            dynamic=projections,
            norm=norm,
            eps=1e-5,
        )
        close(x[t], vector(h_0))
        close(written[t], vector(new))


@pytest.mark.parametrize("n", [2, 4])
def test_dsv4_weights_become_paper_weights_by_transposing_their_mixing_part(n: int) -> None:
    """mapping and bias rows of res, seen as [n, n, ...], with the first two axes exchanged."""
    tiny = {"mhc_eps": 1e-25}
    paper = mhc(n, mhc_convention="paper", **tiny)
    dsv4 = randomised(mhc(n, mhc_convention="dsv4", **tiny))
    paper.double().load_state_dict(dsv4.state_dict())
    streams = StreamState(loops.random_tensors(5)(6, n, D))

    def sublayer(module: nn.Module) -> Tensor:
        assert isinstance(module, StreamResidual)
        x, pending = module(streams)
        return module.write(pending, x.sin()).settled().streams

    assert (sublayer(paper) - sublayer(dsv4)).abs().max() > 1e-3
    with torch.no_grad():
        for parameter in (paper.mapping_weight, paper.bias):
            res = parameter[2 * n :].unflatten(0, (n, n))
            res.copy_(res.transpose(0, 1).clone())
    close(sublayer(paper), sublayer(dsv4))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_learned_head_starts_as_the_mean_and_follows_its_formula(n: int) -> None:
    config = ResidualConfig("mhc", streams=n, mhc_convention="dsv4")
    head = build_head(config, hidden_size=D).double()
    assert isinstance(head, StreamHead)
    streams = loops.random_tensors(6)(3, n, D)
    expected = streams.mean(-2) if n > 1 else 0.5 * streams[:, 0]
    assert (head(StreamState(streams)) - expected).abs().max() <= 1e-5
    randomised(head)
    hidden = head(StreamState(streams))
    for t in range(3):
        weights = loops.head_weights(
            streams[t].tolist(),
            head.head_weight.tolist(),
            head.head_bias.tolist(),
            head.head_scale.item(),
            1e-6,
        )
        mixed = [sum(weights[i] * float(streams[t, i, c]) for i in range(n)) for c in range(D)]
        close(hidden[t], vector(mixed))


def test_the_default_contraction_is_the_sum_for_hc_and_the_mean_for_mhc() -> None:
    streams = loops.random_tensors(7)(3, 4, D)
    for mechanism, expected in (("hc", streams.sum(-2)), ("mhc", streams.mean(-2))):
        head = build_head(ResidualConfig(mechanism), hidden_size=D)
        assert not list(head.parameters())
        close(head(StreamState(streams)), expected)


def largest_difference_of_streams(model: TinyModel) -> float:
    streams = model.states(tokens())[-1].settled().streams  # type: ignore[union-attr]
    return (streams - streams[..., :1, :]).detach().abs().max().item()


def step_of_sgd(model: TinyModel) -> None:
    logits = model(tokens())
    cotangent = loops.random_tensors(8)(*logits.shape)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(logits, parameters, cotangent)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= 1e-2 * gradient


@pytest.mark.parametrize(
    "config",
    [
        ResidualConfig("mhc", streams=4),
        ResidualConfig("mhc", streams=2, mhc_convention="dsv4", mhc_eps=1e-25),
        ResidualConfig("hc", streams=4),
        ResidualConfig("hc", streams=2, hc_dynamic=False),
    ],
    ids=str,
)
def test_home_streams_break_the_tie_in_one_step(config: ResidualConfig) -> None:
    model = TinyModel(config)
    assert largest_difference_of_streams(model) <= 1e-13
    step_of_sgd(model)
    assert largest_difference_of_streams(model) > 1e-3


@pytest.mark.parametrize("contraction", ["mean", "learned"])
def test_streams_of_the_symmetric_start_never_separate(contraction: str) -> None:
    """Why a6 is the default: streams that start equal and are treated alike get equal gradients,
    so that n streams stay one, however long one trains."""
    model = TinyModel(
        ResidualConfig("mhc", streams=4, mhc_init="symmetric", contraction=contraction)
    )
    before = model(tokens())
    for _ in range(3):
        step_of_sgd(model)
    assert (model(tokens()) - before).abs().max() > 1e-2
    assert largest_difference_of_streams(model) <= 1e-12


@pytest.mark.parametrize("module", [mhc, functools.partial(mhc, mhc_convention="dsv4")])
def test_gradcheck_of_a_whole_mhc_sublayer(
    module: Callable[..., ManifoldHyperConnection],
) -> None:
    """Read, a nonlinear sublayer, write: streams and all parameters at once."""
    residual = randomised(module(2, mhc_sinkhorn_iterations=2, mhc_eps=1e-3))
    names = [name for name, _ in residual.named_parameters()]

    def sublayer(streams: Tensor, *parameters: Tensor) -> Tensor:
        values = dict(zip(names, parameters, strict=True))
        x, pending = torch.func.functional_call(residual, values, (StreamState(streams),))
        return residual.write(pending, x.sin()).settled().streams  # type: ignore[operator,union-attr]

    leaves = [t.detach().requires_grad_() for t in residual.parameters()]
    streams = loops.random_tensors(9)(2, 2, D).requires_grad_()
    assert torch.autograd.gradcheck(sublayer, (streams, *leaves))
