# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Every mechanism under the host's real schedules equals one process, and the stock model."""

from __future__ import annotations

import functools

import pytest
import torch

from megatron_residuals.config import ResidualConfig
from megatron_residuals.testing import assert_close
from megatron_residuals.testing.conformance import check_pipeline
from megatron_residuals.testing.residual_toy import keep_residual_init, spec_for
from megatron_residuals.testing.toy_gpt import ToyGPT, ToyResult, run_toy

pytestmark = pytest.mark.host

MECHANISMS = {
    "plain": "residual()",
    "hc": "hc()",
    "hc-static": "hc(streams=2, hc_dynamic=False)",
    "mhc": "mhc()",
    "mhc-dsv4": "mhc(streams=3, mhc_convention='dsv4')",
    "full-attnres": "attnres(transport='full')",
    "block-attnres": "block_attnres(block_sublayers=3, transport='full')",
}
# Of one kind with one above: what is not shared with it is in the arithmetic of a sublayer.
OTHERS = {
    "mhc-permutations": "mhc(mhc_mixing='permutations')",
    "ihc": "ihc(streams=2)",
    "single-pass-mhc": "single_pass_mhc(streams=3)",
    "heads-additive": "attnres(attnres_heads=4, attnres_additive=True)",
}
PIPELINES = {
    "pp2": dict(pp=2),
    "pp2-vpp2": dict(pp=2, vpp=2),
    "pp4": dict(pp=4),
}
TENSOR_PARALLEL = {
    "tp2": dict(tp=2),
    "tp2-sp-pp2": dict(tp=2, sequence_parallel=True, pp=2),
}


@functools.cache
def one_process(mechanism: str) -> ToyResult:
    return run_toy(ToyGPT(), spec_for(mechanism))


def assert_equal(actual: ToyResult, expected: ToyResult, kind: str) -> None:
    losses = [torch.tensor(result.losses) for result in (actual, expected)]
    assert_close(*losses, dtype=torch.float32, kind=kind, name="losses")
    assert actual.grads.keys() == expected.grads.keys()
    for name, gradient in expected.grads.items():
        assert_close(actual.grads[name], gradient, dtype=torch.float32, kind=kind, name=name)


@pytest.mark.parametrize("layout", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS)
def test_a_pipeline_equals_one_process_bit_for_bit(mechanism: str, layout: dict[str, int]) -> None:
    actual = run_toy(ToyGPT(**layout), spec_for(mechanism))
    assert_equal(actual, one_process(mechanism), "exact")


@pytest.mark.parametrize("mechanism", OTHERS.values(), ids=OTHERS)
def test_under_every_policy_two_ranks_with_two_stages_each_equal_one_process(
    mechanism: str,
) -> None:
    outcome = check_pipeline(ResidualConfig.parse(mechanism))
    assert outcome.verdict == "ok" and "every policy" in outcome.seen


@pytest.mark.parametrize("mechanism", OTHERS.values(), ids=OTHERS)
def test_others_under_sequence_parallelism_equal_one_process(mechanism: str) -> None:
    actual = run_toy(ToyGPT(tp=2, sequence_parallel=True), spec_for(mechanism))
    assert_equal(actual, one_process(mechanism), "same_math")


@pytest.mark.parametrize("layout", TENSOR_PARALLEL.values(), ids=TENSOR_PARALLEL)
@pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS)
def test_tensor_parallelism_equals_one_process(mechanism: str, layout: dict[str, int]) -> None:
    actual = run_toy(ToyGPT(**layout), spec_for(mechanism))
    assert_equal(actual, one_process(mechanism), "same_math")


@pytest.mark.parametrize(
    "layout", [{}, dict(pp=2, vpp=2), dict(tp=2, sequence_parallel=True)], ids=str
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_plain_residual_is_the_stock_model_bit_for_bit(
    layout: dict[str, int], dropout: float
) -> None:
    toy = ToyGPT(dropout=dropout, **layout)
    assert_equal(run_toy(toy, spec_for("residual()")), run_toy(toy), "exact")


# Blocks of every length in sublayers for a model of three layers, one longer than the model.
AT_INIT = [f"block_attnres(block_sublayers={s}, attnres_eps=1e-30)" for s in (1, 2, 3, 4, 5, 6, 7)]
AT_INIT += ["attnres(attnres_eps=1e-30)", "hc()", "hc(streams=1)", "mhc()", "mhc(streams=1)"]
AT_INIT += ["mhc(streams=3, contraction='sum')", "mhc(mhc_init='symmetric')"]
AT_INIT += ["mhc(mhc_convention='dsv4', mhc_eps=1e-30)"]
AT_INIT += ["attnres(attnres_eps=1e-30, attnres_heads=4, attnres_additive=True)"]
AT_INIT += ["mhc(mhc_mixing='permutations')", "mhc(mhc_mixing='kronecker')"]
AT_INIT += ["single_pass_mhc()"]
AT_INIT += ["ihc(mhc_eps=1e-30, ihc_gate_eps=1e-30)"]


@functools.cache
def stock_float64() -> ToyResult:
    return run_toy(float64_toy())


def float64_toy() -> ToyGPT:
    # without an eps the norms are scale-invariant, which is what makes the models equal
    overrides = dict(layernorm_epsilon=1e-30)
    return ToyGPT(num_layers=3, dtype=torch.float64, config_overrides=overrides)


@pytest.mark.parametrize("mechanism", AT_INIT)
def test_at_initialisation_a_mechanism_is_the_stock_model(mechanism: str) -> None:
    actual = run_toy(float64_toy(), spec_for(mechanism), initialise=keep_residual_init)
    expected = stock_float64()
    losses = [torch.tensor(result.losses, dtype=torch.float64) for result in (actual, expected)]
    assert_close(*losses, dtype=torch.float64, kind="reordered", name="losses")
    assert actual.grads.keys() > expected.grads.keys()
    for name, gradient in expected.grads.items():
        assert_close(actual.grads[name], gradient, dtype=torch.float64, kind="reordered", name=name)


def test_different_mechanisms_are_different_models() -> None:
    # guards the comparisons above against all being the plain model
    every = MECHANISMS | OTHERS
    losses = {name: tuple(one_process(text).losses) for name, text in every.items()}
    assert len(set(losses.values())) == len(losses)


@pytest.mark.parametrize("mechanism", ["mhc()", "block_attnres(block_layers=2, transport='full')"])
def test_tied_embeddings_learned_positions_and_rmsnorm(mechanism: str) -> None:
    options = dict(
        tied_embeddings=True, positions="learned_absolute", normalization="RMSNorm", bias=False
    )
    expected = run_toy(ToyGPT(**options), spec_for(mechanism))
    actual = run_toy(ToyGPT(pp=2, vpp=2, **options), spec_for(mechanism))
    # the tied weight's two gradients meet in another order
    assert_equal(actual, expected, "same_math")
