# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The host's static engine generates, from its cache, what recomputing every token gives."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from megatron.core.inference.contexts import BaseInferenceContext, StaticInferenceContext
from megatron.core.inference.engines.static_engine import StaticInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mechanisms import TABLE
from megatron_residuals.testing.ranks import RankFailure, run_ranks
from megatron_residuals.testing.residual_toy import toy_spec
from megatron_residuals.testing.toy_gpt import ToyGPT, build_chunks, setup_parallel
from megatron_residuals.testing.toy_weights import default_initialise
from tests.mcore.test_hybrid import hybrid

pytestmark = pytest.mark.host

MECHANISMS = (
    "residual()",
    "hc(recompute='group:2')",
    "mhc(recompute='mix')",
    "mhc(streams=3, mhc_convention='dsv4')",
    "ihc(streams=2)",
    "single_pass_mhc(streams=3)",
    "attnres(recompute='block', attnres_heads=2)",
    "block_attnres(block_layers=2)",
    "block_attnres(block_sublayers=3, two_phase='on', transport='delta')",
)
OVER_RANKS = (
    "mhc(recompute='mix')",
    "single_pass_mhc(streams=3)",
    "attnres(recompute='block', attnres_heads=2)",
    "block_attnres(block_sublayers=3, two_phase='on', transport='delta')",
)
LAYOUTS = {"pp2": dict(pp=2), "tp2": dict(tp=2), "pp4": dict(pp=4), "tp2-pp2": dict(tp=2, pp=2)}
PROMPTS = ("1 2 3 4 5", "7 8 9", "11 12 13 14 15 16 17 18", "20 21 22")
NEW = 5
Generated: TypeAlias = tuple[list[int], list[float]]
"""Tokens and their log-probabilities."""
TOLERANCE = 1e-5


class Numbers:
    """A tokenizer of which a text is its tokens."""

    vocab_size, eod, bos = 64, 9999, 9998

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def wrapped(model: torch.nn.Module, context: Any) -> GPTInferenceWrapper:
    if "inference_wrapper_config" not in inspect.getsource(GPTInferenceWrapper.__init__):
        return GPTInferenceWrapper(model, context)
    from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
        InferenceWrapperConfig,
    )

    config = model.config
    sizes = InferenceWrapperConfig(config.hidden_size, config.params_dtype, 1 << 30, 64)
    return GPTInferenceWrapper(model, sizes, context)


def lively(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Weights with which one token does not follow another whatever stands in front of them."""
    return default_initialise(name, shape, generator) * (1 if "norm" in name else 6)


def decoded(model: torch.nn.Module) -> list[Generated]:
    """Greedy tokens behind every prompt and their log-probabilities, by the host's engine."""
    context = StaticInferenceContext(max_batch_size=len(PROMPTS), max_sequence_length=40)
    controller = TextGenerationController(wrapped(model, context), Numbers())
    engine = StaticInferenceEngine(controller, max_batch_size=len(PROMPTS), legacy=True)
    greedy = SamplingParams(top_k=1, num_tokens_to_generate=NEW, return_log_probs=True)
    requests = engine.generate(prompts=list(PROMPTS), sampling_params=greedy)
    return [(each.generated_tokens.tolist(), each.generated_log_probs) for each in requests]


@torch.no_grad()
def recomputed(model: torch.nn.Module) -> list[Generated]:
    """The same without a cache: every prompt alone, and whole for each of its tokens."""
    generated = []
    for prompt in map(Numbers().tokenize, PROMPTS):
        tokens, log_probs = torch.tensor([prompt]), []
        for _ in range(NEW):
            logits = model.eval()(tokens, torch.arange(tokens.shape[1]).unsqueeze(0), None)
            most, token = logits[:, -1].log_softmax(-1).max(-1, keepdim=True)
            log_probs.append(most.item())
            tokens = torch.cat([tokens, token], 1)
        generated.append((tokens[0, len(prompt) :].tolist(), log_probs))
    return generated


def generate(toy: ToyGPT, mechanisms: tuple[str, ...]) -> list[Any]:
    """By mechanism: what the engine generates and, where one rank has the model, recomputation."""
    setup_parallel(toy)
    specs = [toy_spec(toy, mechanism) for mechanism in mechanisms]
    models = [build_chunks(toy, spec, initialise=lively)[0] for spec in specs]
    without_cache = [recomputed(model) if toy.world_size == 1 else None for model in models]
    return list(zip(map(decoded, models), without_cache, strict=True))


def assert_same(actual: list[Generated], expected: list[Generated]) -> None:
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]
    for (_, seen), (_, reference) in zip(actual, expected, strict=True):
        assert seen == pytest.approx(reference, abs=TOLERANCE)


@functools.cache
def on_one_rank() -> dict[str, Any]:
    (results,) = run_ranks(1, generate, ToyGPT(), MECHANISMS)
    return dict(zip(MECHANISMS, results, strict=True))


def test_no_mechanism_is_left_out() -> None:
    assert {ResidualConfig.parse(text).mechanism for text in MECHANISMS} == {
        entry.name for entry in TABLE
    }


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_tokens_from_the_cache_are_those_of_recomputation(mechanism: str) -> None:
    from_cache, without_cache = on_one_rank()[mechanism]
    assert_same(from_cache, without_cache)
    assert len({tuple(tokens) for tokens, _ in from_cache}) == len(PROMPTS)
    assert all(len(set(tokens)) > 1 for tokens, _ in from_cache)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(ranks, id=name, marks=[] if name == "pp2" else pytest.mark.newest)
        for name, ranks in LAYOUTS.items()
    ],
)
def test_every_layout_generates_the_tokens_of_one_rank(layout: dict[str, int]) -> None:
    toy = ToyGPT(**layout)
    for results in run_ranks(toy.world_size, generate, toy, OVER_RANKS):
        for mechanism, (from_cache, _) in zip(OVER_RANKS, results, strict=True):
            assert_same(from_cache, on_one_rank()[mechanism][1])


@pytest.mark.newest
def test_in_bfloat16_the_first_tokens_have_the_log_probabilities_of_recomputation() -> None:
    (results,) = run_ranks(1, generate, ToyGPT(dtype=torch.bfloat16), OVER_RANKS)
    for mechanism, pair in zip(OVER_RANKS, results, strict=True):
        for (_, seen), (_, reference) in zip(*pair, strict=True):
            # a few steps of bfloat16 at this size: products of one token and of all round otherwise
            assert seen[0] == pytest.approx(reference[0], abs=2**-5), mechanism


@pytest.mark.newest
def test_a_hybrid_model_of_attention_and_mlp_layers_generates() -> None:
    ((results,),) = run_ranks(1, generate, hybrid("*-" * 3), OVER_RANKS[:1])
    assert_same(*results)


class DynamicContext(BaseInferenceContext):
    """Stands in for the host's, which asks for a GPU."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(pg_collection=None)

    def is_static_batching(self) -> bool:
        return False


def contexts(toy: ToyGPT, context: type = StaticInferenceContext) -> None:
    """Wraps a model, of which the host asks nothing before."""
    setup_parallel(toy)
    model = build_chunks(toy, toy_spec(toy, "mhc(streams=2)"))[0]
    sizes = dict(max_batch_size=1, max_sequence_length=8)
    wrapped(model, context(**sizes if context is StaticInferenceContext else {}))


def test_another_context_than_the_static_one_is_refused_when_the_model_is_wrapped() -> None:
    with pytest.raises(RankFailure, match="DynamicContext: the dynamic engine, and speculative"):
        run_ranks(1, contexts, ToyGPT(), DynamicContext)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("toy", "words"),
    [
        (hybrid("M*-M"), "layers of kind mamba: they keep states of their own"),
        (ToyGPT(pp=2, vpp=2), "virtual_pipeline_model_parallel_size = 2: the host generates"),
        (ToyGPT(config_overrides={"mtp_num_layers": 1}), "mtp_num_layers = 1: multi-token"),
    ],
    ids=["mixers", "virtual stages", "multi-token prediction"],
)
def test_what_cannot_generate_is_refused_when_the_model_is_wrapped(toy: ToyGPT, words: str) -> None:
    with pytest.raises(RankFailure, match=words):
        run_ranks(toy.world_size, contexts, toy)
