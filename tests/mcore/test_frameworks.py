# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The shapes in which frameworks above Megatron use it (docs/frameworks.md), each once.

None of them is installed: what they do with a spec, a model and the schedules is done here.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
)

from megatron_residuals import ResidualConfig, specs
from megatron_residuals.mcore.compose import build_block
from megatron_residuals.mcore.spec import residual_of
from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    ToyResult,
    build_chunks,
    merge,
    run_toy,
    setup_parallel,
    train_step,
)
from megatron_residuals.testing.toy_weights import full_grads, named_globally

pytestmark = pytest.mark.host

RESIDUAL = "block_attnres(block_sublayers=3, transport='full')"
PIPELINE = ToyGPT(pp=2, vpp=2)


@functools.cache
def one_process() -> ToyResult:
    return run_toy(ToyGPT(), spec_for(RESIDUAL))


def assert_same(actual: ToyResult, expected: ToyResult) -> None:
    assert actual.losses == expected.losses
    for name, gradient in expected.grads.items():
        assert torch.equal(actual.grads[name], gradient), name


def layer_spec_of_a_provider(config: Any, vp_stage: int | None = None) -> Any:
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)


def provided(toy: ToyGPT) -> ToyResult:
    """Megatron-Bridge, verl: a provider calls a function for the spec of each virtual stage."""
    setup_parallel(toy)
    spec = specs.residual_spec(layer_spec_of_a_provider, ResidualConfig.parse(RESIDUAL))
    chunks = build_chunks(toy, lambda config, vp_stage: spec(config, vp_stage=vp_stage))
    return ToyResult(train_step(chunks, toy), full_grads(chunks))


def in_a_block_of_their_own(toy: ToyGPT) -> ToyResult:
    """ms-swift: mcore-bridge puts its own block class under the name while it builds a model."""
    setup_parallel(toy)
    ours = gpt_model.TransformerBlock
    gpt_model.TransformerBlock = build_block
    try:
        chunks = build_chunks(toy, spec_for(RESIDUAL))
    finally:
        gpt_model.TransformerBlock = ours
    return ToyResult(train_step(chunks, toy), full_grads(chunks))


@pytest.mark.parametrize("use", [provided, in_a_block_of_their_own])
def test_models_that_others_build_equal_ours(use: Any) -> None:
    assert_same(merge(run_ranks(2, use, PIPELINE)), one_process())


# slime calls what --spec names with (args, config, vp_stage). A ModuleSpec can be called, and built
# a layer of nothing.
@pytest.mark.parametrize("name", ["mhc", "block_attnres"])
def test_a_spec_that_is_called_is_itself(name: str) -> None:
    spec = getattr(specs, name)
    assert spec(object(), object(), None) is spec
    assert residual_of(spec)


def actor_and_reference(toy: ToyGPT) -> tuple[list[list[float]], ToyResult, dict[str, Any]]:
    """A step of an actor between log-probability passes of both; the actor's weights after it."""
    setup_parallel(toy)
    actor = build_chunks(toy, spec_for(RESIDUAL))
    reference = build_chunks(toy, spec_for("mhc(streams=2)"))
    passes = [train_step(model, toy, forward_only=True) for model in (reference, actor)]
    result = ToyResult(train_step(actor, toy), full_grads(actor))
    with torch.no_grad():
        for chunk in actor:
            for parameter in chunk.parameters():
                parameter.sub_(0.1 * parameter.grad)
    passes += [train_step(model, toy, forward_only=True) for model in (reference, actor)]
    weights = {
        name: parameter.detach().clone()
        for chunk in actor
        for name, parameter in named_globally(chunk)
    }
    return passes, result, weights


def losses_of_an_engine(toy: ToyGPT, weights: dict[str, torch.Tensor]) -> list[float]:
    """Of a copy on one rank, which takes the weights by name."""
    setup_parallel(toy)
    (chunk,) = build_chunks(toy, spec_for(RESIDUAL))
    chunk.load_state_dict(weights, strict=False)
    assert {name for name, _ in chunk.named_parameters()} == weights.keys()
    return train_step([chunk], toy, forward_only=True)


def test_a_step_between_passes_of_two_models_and_its_weights_by_name() -> None:
    ranks = run_ranks(2, actor_and_reference, PIPELINE)
    assert_same(merge([result for _, result, _ in ranks]), one_process())
    (before, of_actor, again, after), *_ = [passes for passes, *_ in ranks if passes[0]]
    assert of_actor == one_process().losses
    assert again == before != of_actor
    assert after != of_actor
    weights = {name: value for *_, named in ranks for name, value in named.items()}
    one = dataclasses.replace(PIPELINE, pp=1, vpp=None)
    assert run_ranks(1, losses_of_an_engine, one, weights) == [after]
