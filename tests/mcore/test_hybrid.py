# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hybrid models with every mechanism: the GPT of the same sublayers, one process, the stock model.

Several models are built and trained in each process: starting one costs more than they do.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import zlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_residuals.mcore.compat import host_version
from megatron_residuals.mcore.hybrid import hybrid_model
from megatron_residuals.testing import assert_close, run_ranks
from megatron_residuals.testing.residual_toy import (
    keep_residual_init,
    spec_for,
    stack_for,
    toy_spec,
)
from megatron_residuals.testing.tolerances import Kind
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    ToyResult,
    build_chunks,
    merge,
    setup_parallel,
    train_step,
)
from megatron_residuals.testing.toy_training import train_toy
from megatron_residuals.testing.toy_weights import Initialise, default_initialise, full_grads
from tests.mcore.parallel.cases import assert_same_step

HAS_STAGES = host_version().release >= (0, 17)
pytestmark = [
    pytest.mark.host,
    pytest.mark.skipif(not HAS_STAGES, reason="hybrid models of 0.16 have no stages"),
]

MECHANISMS = {
    "plain": "residual()",
    "hc": "hc()",
    "mhc": "mhc()",
    "mhc-dsv4": "mhc(streams=3, mhc_convention='dsv4')",
    "attnres": "attnres(transport='full')",
    "blocks": "block_attnres(block_sublayers=3, transport='full')",
}
SMALL: dict[str, Any] = dict(hidden_size=16, num_heads=2, seq_length=6, num_microbatches=4)
EXPERTS = dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24)
MIXERS = dict(
    mamba_state_dim=8,
    mamba_head_dim=8,
    mamba_num_groups=2,
    linear_key_head_dim=8,
    linear_value_head_dim=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    activation_func=torch.nn.functional.silu,
)
EVERY = "M*-E*G"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def hybrid(pattern: str, **options: Any) -> ToyGPT:
    symbols = re.sub(r"/.*|\|", "", pattern)
    for kinds, overrides in (("E", EXPERTS), ("MG", MIXERS)):
        if set(kinds) & set(symbols):
            options["bias"] = False  # which the host's experts and mixers have not
            options["config_overrides"] = {**overrides, **options.get("config_overrides", {})}
    return ToyGPT(num_layers=len(symbols), pattern=pattern, **{**SMALL, **options})


def _train(toy: ToyGPT, texts: Mapping[str, str | None], initialise: Initialise) -> Any:
    setup_parallel(toy)
    results = {}
    for name, text in texts.items():
        spec = None if text is None else toy_spec(toy, text)
        chunks = build_chunks(toy, spec, initialise=initialise)
        results[name] = ToyResult(train_step(chunks, toy), full_grads(chunks))
    return results


def train(
    toy: ToyGPT,
    texts: Mapping[str, str | None] = MECHANISMS,
    initialise: Initialise = default_initialise,
) -> dict[str, ToyResult]:
    """A step of each model, all in the same processes."""
    ranks = run_ranks(toy.world_size, _train, toy, texts, initialise)
    return {name: merge([results[name] for results in ranks]) for name in texts}


@functools.cache
def one_process(pattern: str) -> dict[str, ToyResult]:
    return train(hybrid(pattern))


def assert_same(
    actual: Mapping[str, ToyResult],
    expected: Mapping[str, ToyResult],
    kind: Kind = "exact",
    dtype: torch.dtype = torch.float32,
) -> None:
    assert actual.keys() == expected.keys()
    for name, result in expected.items():
        losses = [torch.tensor(each[name].losses, dtype=dtype) for each in (actual, expected)]
        assert_close(*losses, dtype=dtype, kind=kind, name=f"{name}: losses")
        assert actual[name].grads.keys() == result.grads.keys()
        for key, gradient in result.grads.items():
            assert_close(
                actual[name].grads[key], gradient, dtype=dtype, kind=kind, name=f"{name}: {key}"
            )


def as_gpt(name: str) -> str:
    """The name that the GPT of the same sublayers has for a parameter of a model of ``*-``."""
    name = _LAYER.sub(lambda found: f"decoder.layers.{int(found[1]) // 2}.", name)
    return name.replace("decoder.final_norm.", "decoder.final_layernorm.")


def initialise_as_gpt(
    name: str, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor | None:
    generator = torch.Generator().manual_seed(zlib.crc32(as_gpt(name).encode()) + ToyGPT.seed)
    return default_initialise(as_gpt(name), shape, generator)


def test_attention_and_mlp_in_turns_are_the_gpt_bit_for_bit() -> None:
    texts = {**MECHANISMS, "stock": None}
    results = train(hybrid("*-*-*-"), texts, initialise_as_gpt)
    renamed = {
        name: result._replace(grads={as_gpt(key): grad for key, grad in result.grads.items()})
        for name, result in results.items()
    }
    assert_same(renamed, train(ToyGPT(num_layers=3, **SMALL), texts))
    assert len({tuple(result.losses) for result in results.values()}) == len(MECHANISMS)


@pytest.mark.parametrize(
    ("pattern", "layout"),
    [
        (EVERY, dict(pp=2)),  # the host cuts it itself
        ("M*-|E*G", dict(pp=2)),
        ("M|*-E*|G|", dict(pp=2, vpp=2)),  # uneven, and nothing in the last stage
        ("|M*|-E|*G", dict(pp=4)),  # nothing behind the embedding
    ],
    ids=str,
)
def test_a_pipeline_cut_anywhere_equals_one_process_bit_for_bit(
    pattern: str, layout: dict[str, int]
) -> None:
    assert_same(train(hybrid(pattern, **layout)), one_process(EVERY))


def test_tensor_and_sequence_parallelism_equal_one_process() -> None:
    actual = train(hybrid("*--|E*-", tp=2, sequence_parallel=True, pp=2))
    assert_same(actual, one_process("*--E*-"), "same_math")


POLICIES = {
    "hc(streams=2, recompute='{}')": ("none", "mix", "group:2", "group"),
    "mhc(recompute='{}')": ("none", "mix", "group:3"),
    "block_attnres(block_sublayers=3, recompute='{}')": ("none", "mix", "block", "block+layer"),
}


def test_every_recompute_policy_computes_what_none_computes() -> None:
    texts = [text.format(p) for text, policies in POLICIES.items() for p in policies]
    results = train(hybrid("M-|G*|E*|M-", pp=2, vpp=2), {text: text for text in texts})
    for text, policies in POLICIES.items():
        expected = results[text.format("none")]
        for policy in policies[1:]:
            assert_same({policy: results[text.format(policy)]}, {policy: expected}, "same_math")


@pytest.mark.parametrize(("method", "layers"), [("uniform", 2), ("block", 1)])
def test_the_full_recompute_of_the_host_computes_what_none_computes(
    method: str, layers: int
) -> None:
    overrides = dict(
        recompute_granularity="full", recompute_method=method, recompute_num_layers=layers
    )
    actual = train(hybrid("M*-|E*G", pp=2, config_overrides=overrides))
    assert_same(actual, one_process(EVERY), "same_math")


AT_INIT = {
    "hc": "hc()",
    "mhc": "mhc(mhc_init='symmetric')",
    "dsv4": "mhc(mhc_convention='dsv4', mhc_eps=1e-30)",
    "attnres": "attnres(attnres_eps=1e-30)",
    "blocks": "block_attnres(block_sublayers=2, attnres_eps=1e-30)",
    "stock": None,
}


@pytest.mark.skipif(
    host_version().release < (0, 19), reason="mhc is 1e-5 off with 0.17, for an unknown reason"
)
def test_at_initialisation_a_mechanism_is_the_stock_hybrid_model() -> None:
    # without an eps the norms are scale-invariant, which is what makes the models equal
    overrides = dict(layernorm_epsilon=1e-30)
    toy = hybrid("M-E*-G*", dtype=torch.float64, config_overrides=overrides)
    results = train(toy, AT_INIT, keep_residual_init)
    stock = results.pop("stock")
    for name, result in results.items():
        assert result.grads.keys() > stock.grads.keys()
        host = {key: grad for key, grad in result.grads.items() if key in stock.grads}
        actual = {name: result._replace(grads=host)}
        assert_same(actual, {name: stock}, "reordered", torch.float64)


@pytest.mark.parametrize("seed", range(4))
def test_any_pattern_and_any_cut_equal_one_process(seed: int) -> None:
    rng = random.Random(seed)
    symbols = [rng.choice("M*-EG") for _ in range(rng.randint(5, 8))]
    stages = rng.choice([2, 4])
    cuts = sorted(rng.randint(0, len(symbols)) for _ in range(stages - 1))
    ends = [0, *cuts, len(symbols)]
    parts = ["".join(symbols[i:j]) for i, j in zip(ends, ends[1:], strict=False)]
    texts = {
        f"blocks of {size}, {transport}": f"block_attnres(block_sublayers={size}, "
        f"transport='{transport}', recompute='{rng.choice(['none', 'block'])}')"
        for size in (2, 3, 5)
        for transport in ("delta", "full")
    } | {"mhc": "mhc(streams=2)"}
    toy = hybrid("".join(symbols))
    cut = dataclasses.replace(toy, pattern="|".join(parts), pp=2, vpp=2 if stages == 4 else None)
    assert_same(train(cut, texts), train(toy, texts), "same_math")


DEPTHS = dict(mtp_num_layers=2, mtp_loss_scaling_factor=0.3)


def test_multi_token_prediction_stands_behind_the_closed_state_of_the_last_stage() -> None:
    # float32 at best: the host's loss, which alone knows the further tokens, computes in it
    texts = {name: MECHANISMS[name] for name in ("mhc", "blocks")}
    one = train(hybrid("*-*-/*-/*-", config_overrides=DEPTHS), texts)
    two = train(hybrid("*|-*|-|/*-/*-", pp=2, vpp=2, config_overrides=DEPTHS), texts)
    assert_same(two, one, "same_math")
    predicting = [name for name in one["mhc"].grads if name.startswith("mtp.")]
    assert predicting and not any("residual" in name for name in predicting)


def test_experts_on_other_ranks_equal_one_process() -> None:
    spec, toy = stack_for(MECHANISMS["blocks"]), dict(seq_length=8, dtype=torch.float64)
    actual = train_toy(hybrid("*E-|*E", pp=2, dp=2, ep=2, **toy), spec)
    assert_same_step(actual, train_toy(hybrid("*E-*E", **toy), spec))


def without_delta_nets(config: Any, vp_stage: int | None) -> ModuleSpec:
    spec = stack_for("mhc()")(config, vp_stage)
    spec.submodules = dataclasses.replace(spec.submodules, gdn_layer=IdentityOp)
    return spec


def test_what_a_stack_cannot_be_built_of_is_refused() -> None:
    cases = [
        (dict(pattern="*-", config_overrides=dict(cuda_graph_impl="local")), stack_for("mhc()")),
        (dict(pattern="G-"), without_delta_nets),
        (dict(pattern="*-"), spec_for("mhc()")),  # of a GPT's layer
    ]

    def refusals(toy: ToyGPT) -> list[str]:
        setup_parallel(toy)
        found = []
        for options, spec in cases:
            with pytest.raises((ValueError, TypeError)) as refusal:
                build_chunks(dataclasses.replace(toy, **options), spec)
            found.append(str(refusal.value))
        return found

    (messages,) = run_ranks(1, refusals, hybrid("*-"))
    assert "CUDA graphs are not supported" in messages[0]
    assert "the pattern has layers of which the stack's spec has no gdn_layer" in messages[1]
    assert "a hybrid model needs the spec of a HybridStack, not of" in messages[2]


def test_a_hybrid_model_without_stages_or_without_a_pattern_is_refused() -> None:
    # as in 0.16, where layers are given by their shares and no stage knows the others
    spec = stack_for("mhc()")(SimpleNamespace(transformer_impl="local"), None)

    def old(self: Any, config: Any, mamba_stack_spec: Any, hybrid_override_pattern: Any) -> None:
        raise AssertionError

    def new(self: Any, config: Any, stack_spec: Any, vp_stage: Any = None) -> None:
        raise AssertionError

    with pytest.raises(ValueError, match="use megatron-core 0.17 or newer"):
        hybrid_model(old, print)(None, None, spec, "M*")
    with pytest.raises(ValueError, match="needs its layers one by one: give --hybrid-layer-pat"):
        hybrid_model(new, print)(None, None, spec)
