# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The host's static engine generates, from its cache, what recomputing every token gives."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.engines.static_engine import StaticInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)

from megatron_residuals.testing.ranks import run_ranks
from megatron_residuals.testing.residual_toy import toy_spec
from megatron_residuals.testing.toy_gpt import ToyGPT, build_chunks, setup_parallel

pytestmark = pytest.mark.host

MECHANISMS = (
    "residual()",
    "hc(recompute='group:2')",
    "mhc(recompute='mix')",
    "mhc(streams=3, mhc_convention='dsv4')",
    "attnres(recompute='block')",
    "block_attnres(block_layers=2)",
    "block_attnres(block_sublayers=3, two_phase='on')",
)
LAYOUTS = {"tp2": dict(tp=2), "pp2": dict(pp=2), "pp4": dict(pp=4), "tp2-pp2": dict(tp=2, pp=2)}
PROMPTS = ("1 2 3 4 5", "7 8 9", "11 12 13 14 15 16 17 18", "20 21 22")
NEW = 8


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


def decoded(model: torch.nn.Module) -> list[list[int]]:
    """Greedy tokens behind every prompt, by the host's engine."""
    context = StaticInferenceContext(max_batch_size=len(PROMPTS), max_sequence_length=40)
    controller = TextGenerationController(wrapped(model, context), Numbers())
    engine = StaticInferenceEngine(controller, max_batch_size=len(PROMPTS), legacy=True)
    greedy = SamplingParams(top_k=1, num_tokens_to_generate=NEW)
    requests = engine.generate(prompts=list(PROMPTS), sampling_params=greedy)
    return [request.generated_tokens.tolist() for request in requests]


@torch.no_grad()
def recomputed(model: torch.nn.Module) -> list[list[int]]:
    """The same without a cache: every prompt alone, and whole for each of its tokens."""
    generated = []
    for prompt in map(Numbers().tokenize, PROMPTS):
        tokens = torch.tensor([prompt])
        for _ in range(NEW):
            logits = model.eval()(tokens, torch.arange(tokens.shape[1]).unsqueeze(0), None)
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], 1)
        generated.append(tokens[0, len(prompt) :].tolist())
    return generated


def generate(toy: ToyGPT, mechanisms: tuple[str, ...]) -> list[Any]:
    """By mechanism: the tokens of the engine and, where one rank has the model, recomputed ones."""
    setup_parallel(toy)
    models = [build_chunks(toy, toy_spec(toy, mechanism))[0] for mechanism in mechanisms]
    without_cache = [recomputed(model) if toy.world_size == 1 else None for model in models]
    return list(zip(map(decoded, models), without_cache, strict=True))


@functools.cache
def on_one_rank() -> dict[str, Any]:
    (results,) = run_ranks(1, generate, ToyGPT(), MECHANISMS)
    return dict(zip(MECHANISMS, results, strict=True))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_tokens_from_the_cache_are_those_of_recomputation(mechanism: str) -> None:
    from_cache, without_cache = on_one_rank()[mechanism]
    assert from_cache == without_cache
    assert len({tuple(tokens) for tokens in from_cache}) == len(PROMPTS)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_generates_the_tokens_of_one_rank(layout: dict[str, int]) -> None:
    toy = ToyGPT(**layout)
    for results in run_ranks(toy.world_size, generate, toy, MECHANISMS):
        for mechanism, (from_cache, _) in zip(MECHANISMS, results, strict=True):
            assert from_cache == on_one_rank()[mechanism][1], mechanism
