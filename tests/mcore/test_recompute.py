# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Every recompute policy computes what no recomputation computes, through the host's schedules."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mcore.spec import replace_residual
from megatron_residuals.testing import assert_close, run_ranks
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    ToyResult,
    build_chunks,
    merge,
    micro_batches,
    setup_parallel,
    train_step,
)
from megatron_residuals.testing.toy_weights import full_grads

SMALL = dict(hidden_size=16, num_heads=2, seq_length=6, num_microbatches=2, dtype=torch.float64)

# By policy: what the residual and what the host is told.
Policy = tuple[str, dict[str, Any]]
NONE: Policy = ("none", {})
STREAM_POLICIES: dict[str, Policy] = {
    "mix": ("mix", {}),
    "group:3": ("group:3", {}),
    "group:auto": ("group", {}),
}
SOURCE_POLICIES: dict[str, Policy] = {
    "mix": ("mix", {}),
    "block": ("block", {}),
    "block+layer": ("block+layer", {}),
}


def full(method: str, layers: int) -> Policy:
    return "none", dict(
        recompute_granularity="full", recompute_method=method, recompute_num_layers=layers
    )


HOST_POLICIES: dict[str, Policy] = {
    "full-uniform-1": full("uniform", 1),
    "full-uniform-3": full("uniform", 3),
    "full-block-1": full("block", 1),
}


def selective(*modules: str) -> dict[str, Any]:
    return dict(recompute_granularity="selective", recompute_modules=list(modules))


MECHANISMS = {
    "hc": "hc(streams=2{})",
    "mhc": "mhc(streams=3, mhc_sinkhorn_iterations=3{})",
    "full-attnres": "attnres(attnres_eps=1e-06{})",
    "block-attnres": "block_attnres(block_sublayers=5{})",  # cut by layers and by stages
}


def policies(mechanism: str) -> dict[str, Policy]:
    """All that this mechanism can be combined with."""
    own = STREAM_POLICIES if "hc" in mechanism else SOURCE_POLICIES
    return {**own, **HOST_POLICIES}


def order_is_the_same(mechanism: str, policy: str) -> bool:
    """Whether all sums run in the order they have without recomputation.

    The gradient of a source that several sublayers of a replayed part read is summed there first.
    """
    return "hc" in mechanism or "block" not in policy and "full" not in policy


def spec_of(mechanism: str, policy: str) -> Any:
    return spec_for(MECHANISMS[mechanism].format(f", recompute={policy!r}"))


def all_policies(
    toy: ToyGPT, mechanism: str, chosen: Mapping[str, Policy], trained: str
) -> dict[str, ToyResult]:
    """On one rank: a step behind a shorter one, under each policy with the same random state."""
    setup_parallel(toy)
    results = {}
    for name, (ours, host) in {"none": NONE, **chosen}.items():
        overrides = {**toy.config_overrides, **host}
        variant = dataclasses.replace(toy, config_overrides=overrides)
        chunks = build_chunks(variant, spec_of(mechanism, ours))
        for chunk in chunks:
            for parameter_name, parameter in chunk.named_parameters():
                parameter.requires_grad_(trained in parameter_name)
        train_step(chunks, dataclasses.replace(variant, num_microbatches=toy.pp))
        model_parallel_cuda_manual_seed(toy.seed + 1)
        losses = train_step(chunks, variant)
        results[name] = ToyResult(losses, full_grads(chunks))
    return results


def run_all(
    toy: ToyGPT,
    mechanism: str,
    chosen: Mapping[str, Policy] | None = None,
    *,
    trained: str = "",
) -> dict[str, ToyResult]:
    """Results by policy, over all ranks; "none" is among them."""
    chosen = policies(mechanism) if chosen is None else chosen
    ranks = run_ranks(toy.world_size, all_policies, toy, mechanism, chosen, trained, timeout_s=100)
    return {name: merge([rank[name] for rank in ranks]) for name in ranks[0]}


def assert_policies_agree(results: dict[str, ToyResult], mechanism: str) -> None:
    expected = results["none"]
    assert len(results) > 1
    for policy, actual in results.items():
        assert actual.losses == expected.losses, policy
        assert actual.grads.keys() == expected.grads.keys()
        kind = "exact" if order_is_the_same(mechanism, policy) else "same_math"
        for name, gradient in expected.grads.items():
            assert_close(
                actual.grads[name],
                gradient,
                dtype=torch.float64,
                kind=kind,
                name=f"{policy}: {name}",
            )


LAYOUTS = {"one-process": {}, "pp2-vpp2": dict(pp=2, vpp=2, num_layers=8)}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_policy_equals_none_in_the_forward_bit_for_bit_and_in_every_gradient(
    mechanism: str, layout: dict[str, int]
) -> None:
    assert_policies_agree(run_all(ToyGPT(**SMALL, **layout), mechanism), mechanism)


# without dropout, and with biases, in all tests above and below
@pytest.mark.host
@pytest.mark.parametrize(
    ("mechanism", "dropout", "bias"),
    [
        ("mhc", 0.1, True),
        pytest.param("mhc", 0.0, False, marks=pytest.mark.newest),
        ("block-attnres", 0.1, True),
        pytest.param("block-attnres", 0.1, False, marks=pytest.mark.newest),
        ("block-attnres", 0.0, False),
    ],
)
def test_dropout_is_replayed_with_its_random_state(
    mechanism: str, dropout: float, bias: bool
) -> None:
    """With and without bias: what a layer returns is a new tensor, or the host's own."""
    toy = ToyGPT(**SMALL, dropout=dropout, bias=bias, num_layers=3)
    results = run_all(toy, mechanism)
    assert_policies_agree(results, mechanism)
    if dropout:
        (calm,) = run_ranks(1, all_policies, ToyGPT(**SMALL, num_layers=3), mechanism, {}, "")
        assert results["none"].losses != calm["none"].losses


@pytest.mark.host
@pytest.mark.parametrize(
    ("mechanism", "dropout"),
    [
        ("mhc", 0.1),
        ("block-attnres", 0.1),
        pytest.param("block-attnres", 0.0, marks=pytest.mark.newest),
    ],
)
def test_policies_under_tensor_and_sequence_parallelism(mechanism: str, dropout: float) -> None:
    """Dropout there draws from the tensor-parallel generator, which a replay must restore too."""
    toy = ToyGPT(**SMALL, tp=2, sequence_parallel=True, dropout=dropout, num_layers=3)
    chosen = {name: policies(mechanism)[name] for name in list(policies(mechanism))[:4]}
    assert_policies_agree(run_all(toy, mechanism, chosen), mechanism)


@pytest.mark.parametrize("mechanism", ["mhc", "block-attnres"])
def test_policies_when_sent_outputs_are_freed(mechanism: str) -> None:
    overrides = dict(deallocate_pipeline_outputs=True)
    toy = ToyGPT(**SMALL, pp=2, config_overrides=overrides)
    assert_policies_agree(run_all(toy, mechanism), mechanism)


@pytest.mark.parametrize("layout", [dict(pp=2), dict(pp=2, vpp=2, num_layers=8)], ids=str)
def test_policies_under_full_transport(
    layout: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "block_attnres(block_sublayers=5, transport='full'{})"
    monkeypatch.setitem(MECHANISMS, "full-transport", text)
    results = run_all(ToyGPT(**SMALL, **layout), "full-transport")
    assert_policies_agree(results, "full-transport")


@pytest.mark.parametrize("layout", [{}, dict(pp=2)], ids=str)
def test_policies_with_micro_batches_of_varying_length(layout: dict[str, int]) -> None:
    toy = ToyGPT(**{**SMALL, "num_microbatches": 4}, seq_lengths=(6, 2, 5, 8), **layout)
    results = run_all(toy, "block-attnres", SOURCE_POLICIES)
    assert_policies_agree(results, "block-attnres")


@pytest.mark.host
@pytest.mark.parametrize("mechanism", ["mhc", "block-attnres"])
def test_our_policies_combine_with_the_host_s_selective_recomputation(mechanism: str) -> None:
    own = STREAM_POLICIES if "hc" in mechanism else SOURCE_POLICIES
    chosen: dict[str, Policy] = {"core_attn": ("none", selective("core_attn"))}
    for name, (ours, _) in own.items():
        chosen[f"core_attn+{name}"] = (ours, selective("core_attn"))
        chosen[f"everything+{name}"] = (ours, selective("core_attn", "layernorm", "mlp"))
    # with biases the host's recomputation of an MLP, which returns one, calls itself without end
    toy = ToyGPT(**SMALL, num_layers=3, dropout=0.1, bias=False)
    assert_policies_agree(run_all(toy, mechanism, chosen), mechanism)


MOE = dict(
    num_moe_experts=4,
    moe_router_topk=2,
    moe_token_dispatcher_type="alltoall",
    moe_router_load_balancing_type="none",
    add_bias_linear=False,
)


def moe_policies(toy: ToyGPT, mechanism: str) -> dict[str, ToyResult]:
    setup_parallel(toy)
    results = {}
    for policy in ("none", *(STREAM_POLICIES if "hc" in mechanism else SOURCE_POLICIES)):
        config = ResidualConfig.parse(MECHANISMS[mechanism].format(f", recompute={policy!r}"))
        spec_for(config)  # installs the adapter
        spec = replace_residual(
            get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False), config
        )
        chunks = build_chunks(toy, spec)
        results[policy] = ToyResult(train_step(chunks, toy), full_grads(chunks))
    return results


@pytest.mark.parametrize("mechanism", ["mhc", "block-attnres"])
def test_policies_of_a_mixture_of_experts(mechanism: str) -> None:
    toy = ToyGPT(**SMALL, num_layers=3, config_overrides=MOE)
    (results,) = run_ranks(1, moe_policies, toy, mechanism)
    assert any("experts" in name for name in results["none"].grads)
    assert_policies_agree(results, mechanism)


FROZEN_LAYOUTS = {"one-process": {}, "pp2-vpp2": dict(pp=2, vpp=2, num_layers=8)}


@functools.cache
def adapters_only(mechanism: str, layout: str, trained: str) -> dict[str, ToyResult]:
    toy = ToyGPT(**SMALL, **FROZEN_LAYOUTS[layout], bias=False)
    chosen = {**policies(mechanism), "layernorm": ("none", selective("layernorm"))}
    return run_all(toy, mechanism, chosen, trained=trained)


# The second matrices of MLPs, as with adapters; norms, which the host itself recomputes. Of the
# three every two meet.
@pytest.mark.parametrize(
    ("mechanism", "layout", "trained"),
    [
        ("mhc", "one-process", "linear_fc2"),
        ("mhc", "pp2-vpp2", "layernorm"),
        ("block-attnres", "one-process", "layernorm"),
        ("block-attnres", "pp2-vpp2", "linear_fc2"),
    ],
)
def test_layers_behind_a_frozen_embedding_train_under_every_policy(
    mechanism: str, layout: str, trained: str
) -> None:
    """Nothing that enters the first stage needs a gradient; what trains behind it does."""
    results = adapters_only(mechanism, layout, trained)
    assert_policies_agree(results, mechanism)
    for policy, result in results.items():
        for name, gradient in result.grads.items():
            assert trained in name
            assert gradient.abs().max() > 0, f"{policy}: {name}"
    num_layers = FROZEN_LAYOUTS[layout].get("num_layers", 4)
    for layer in range(num_layers):
        assert any(f"layers.{layer}." in name for name in results["none"].grads)


def test_adapters_behind_a_frozen_embedding_get_the_gradients_of_one_process() -> None:
    toy = ToyGPT(**SMALL, num_layers=8, bias=False)
    (alone,) = run_ranks(1, all_policies, toy, "block-attnres", {}, "linear_fc2")
    expected = alone["none"]
    for policy, actual in adapters_only("block-attnres", "pp2-vpp2", "linear_fc2").items():
        assert actual.losses == expected.losses
        for name, gradient in expected.grads.items():
            mine = actual.grads[name]
            what = f"{policy}: {name}"
            assert_close(mine, gradient, dtype=torch.float64, kind="same_math", name=what)


def sixteen_bit(toy: ToyGPT, mechanism: str) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    setup_parallel(toy)
    results = {}
    for policy in ("none", *(STREAM_POLICIES if "hc" in mechanism else SOURCE_POLICIES)):
        (chunk,) = build_chunks(toy, spec_of(mechanism, policy))
        model = Float16Module(chunk.config, chunk)
        batch = next(micro_batches(toy))
        logits = model(batch["tokens"], batch["positions"], batch["mask"])
        loss = logits.float().square().mean()
        loss.backward()
        grads = {name: p.grad for name, p in chunk.named_parameters() if p.grad is not None}
        assert len(grads) == len(list(chunk.parameters()))
        results[policy] = (loss.item(), grads)
    return results


@pytest.mark.host
@pytest.mark.parametrize("mechanism", ["mhc", "block-attnres"])
def test_policies_in_16_bit_give_float32_gradients_to_the_mechanism(mechanism: str) -> None:
    toy = ToyGPT(
        **{**SMALL, "dtype": torch.bfloat16}, num_layers=3, config_overrides=dict(bf16=True)
    )
    (results,) = run_ranks(1, sixteen_bit, toy, mechanism)
    loss, expected = results["none"]
    for policy, (actual_loss, grads) in results.items():
        assert actual_loss == loss
        for name, gradient in grads.items():
            ours = "_residual." in name or "residual_head" in name
            assert gradient.dtype == (torch.float32 if ours else torch.bfloat16), name
            if order_is_the_same(mechanism, policy):
                assert torch.equal(gradient, expected[name]), f"{policy}: {name}"
                continue
            error = (gradient.double() - expected[name].double()).norm()
            assert error <= 0.02 * expected[name].double().norm(), f"{policy}: {name}"
