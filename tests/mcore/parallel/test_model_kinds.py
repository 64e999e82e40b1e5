# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Kinds of attention, embedding and MLP that the residual knows nothing of, in parallel layouts.

What is inside a sublayer is the host's, so every kind must equal one process in a layout that uses
everything at once, and the stock model bit for bit with the plain residual.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megatron_residuals.testing.toy_gpt import ToyGPT, ToyResult, run_toy
from megatron_residuals.testing.toy_training import Training, train_toy
from tests.mcore.parallel.cases import (
    BLOCKS,
    FLOAT64,
    MHC,
    PLAIN,
    assert_mechanism_trains,
    assert_same_step,
    block_spec_for,
)
from tests.mcore.parallel.context_attention import use_gathered_attention

pytestmark = pytest.mark.timeout(120)

SIZES = dict(FLOAT64, num_layers=4, num_microbatches=4)
EVERYTHING = dict(tp=2, sequence_parallel=True, pp=2, vpp=2)
# The host's latent attention without Transformer Engine does not sum the gradient of the rotary key
# over TP ranks, in the stock model either.
WITHOUT_TP = dict(dp=2, pp=2, vpp=2)
GATED = dict(gated_linear_unit=True, activation_func=torch.nn.functional.silu)
LATENT = dict(
    multi_latent_attention=True,
    q_lora_rank=6,
    kv_lora_rank=6,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=8,
    rope_type="rope",
)
MOE = dict(
    num_moe_experts=4,
    moe_layer_freq=[0, 1, 1, 0],
    moe_router_topk=2,
    moe_ffn_hidden_size=12,
    moe_shared_expert_intermediate_size=8,
    moe_router_load_balancing_type="none",
    moe_grouped_gemm=False,
    add_bias_linear=False,
)

KINDS: dict[str, dict[str, Any]] = {
    "grouped queries, qk norm, rope, untied, gated": dict(
        normalization="RMSNorm",
        bias=False,
        config_overrides=dict(num_query_groups=2, qk_layernorm=True, **GATED),
    ),
    "learned positions, tied": dict(positions="learned_absolute", tied_embeddings=True),
    "latent attention, qk norm": dict(
        normalization="RMSNorm", bias=False, config_overrides=dict(qk_layernorm=True, **LATENT)
    ),
}


def toy(kind: dict[str, Any], **layout: Any) -> ToyGPT:
    return ToyGPT(**{**SIZES, **kind, **layout})


def spec_for(residual: str | None, kind: dict[str, Any]) -> Any:
    # heads whose keys and values differ in width are for Transformer Engine's attention in the host
    return block_spec_for(residual, use_gathered_attention if is_latent(kind) else None)


def is_latent(kind: dict[str, Any]) -> bool:
    return "multi_latent_attention" in kind.get("config_overrides", {})


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("residual", [MHC, BLOCKS])
def test_a_kind_of_model_equals_one_process(residual: str, kind: dict[str, Any]) -> None:
    layout = WITHOUT_TP if is_latent(kind) else EVERYTHING
    actual = train_toy(toy(kind, **layout), spec_for(residual, kind))
    assert_same_step(actual, run_toy(toy(kind), spec_for(residual, kind)))
    assert_mechanism_trains(actual.grads)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_with_the_plain_residual_a_kind_of_model_is_the_stock_one(kind: dict[str, Any]) -> None:
    ours, stock = (run_toy(toy(kind, pp=2), spec_for(text, kind)) for text in (PLAIN, None))
    assert ours.losses == stock.losses
    assert ours.grads.keys() == stock.grads.keys()
    assert all(torch.equal(ours.grads[name], grad) for name, grad in stock.grads.items())


EXPERT_LAYOUTS = {
    "dp2-ep2": dict(dp=2, ep=2),
    "dp2-ep2-pp2-vpp2": dict(dp=2, ep=2, pp=2, vpp=2),
    "dp2-ep2-tp2-sp": dict(dp=2, ep=2, tp=2, sequence_parallel=True),
}
EXPERT_CASES = [
    ("alltoall", "dp2-ep2"),
    ("allgather", "dp2-ep2"),
    ("alltoall", "dp2-ep2-pp2-vpp2"),
    # with TP the other dispatcher gathers unequal sizes, which gloo cannot
    ("allgather", "dp2-ep2-tp2-sp"),
]


def mixed_model(dispatcher: str, **layout: Any) -> ToyGPT:
    """Dense, MoE, MoE, dense, with shared experts."""
    overrides = dict(MOE, moe_token_dispatcher_type=dispatcher, **GATED)
    return ToyGPT(**SIZES, config_overrides=overrides, **layout)


@functools.cache
def experts_in_one_process(residual: str | None) -> ToyResult:
    return run_toy(mixed_model("alltoall"), block_spec_for(residual))


@pytest.mark.parametrize(("dispatcher", "layout"), EXPERT_CASES)
@pytest.mark.parametrize("residual", [MHC, BLOCKS])
def test_expert_parallel_layers_among_dense_ones_equal_one_process(
    residual: str, dispatcher: str, layout: str
) -> None:
    training = Training(ddp=dict(overlap_grad_reduce=True, bucket_size=1000))
    actual = train_toy(
        mixed_model(dispatcher, **EXPERT_LAYOUTS[layout]), block_spec_for(residual), training
    )
    assert_same_step(actual, experts_in_one_process(residual))
    assert_mechanism_trains(actual.grads)
    experts = {name for name in actual.grads if ".experts." in name}
    # two MoE layers of four gated experts with two matrices, whole
    assert len(experts) == 2 * 4 * 2


def test_the_same_model_with_the_plain_residual_is_the_stock_one() -> None:
    ours, stock = experts_in_one_process(PLAIN), experts_in_one_process(None)
    assert ours.losses == stock.losses
    assert all(torch.equal(ours.grads[name], grad) for name, grad in stock.grads.items())
