# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine specs keep every module, norms fused into linear layers included.

Without a GPU: the host's own functions write the specs, stand-ins take the places of the layers.
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.identity_op import IdentityOp

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mcore.install import install
from megatron_residuals.mcore.layer import ResidualTransformerLayer
from megatron_residuals.mcore.spec import replace_residual
from megatron_residuals.mcore.support import check_model
from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    ToyResult,
    build_chunks,
    run_toy,
    setup_parallel,
    transformer_config,
)
from megatron_residuals.testing.toy_weights import default_initialise
from tests.mcore.parallel.cases import BLOCKS, FLOAT64, MHC, assert_same, block_spec_for
from tests.mcore.parallel.fused_layers import (
    FusedNormLinear,
    InputKeepingLinear,
    install_fused_layers,
    local_name,
)

pytestmark = [pytest.mark.host, pytest.mark.timeout(120)]

SIZES = dict(FLOAT64, num_layers=4, num_microbatches=4)
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "qk norm": dict(qk_layernorm=True),
    "experts": dict(num_experts=4, moe_grouped_gemm=False),
    "latent attention": dict(multi_latent_attention=True, qk_layernorm=True),
}


@pytest.fixture(autouse=True)
def fused_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fused_layers(monkeypatch)


def fused_spec(residual: str, **kind: Any) -> Any:
    install()
    base = get_gpt_layer_with_transformer_engine_spec(**kind)
    return replace_residual(base, ResidualConfig.parse(residual))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_submodule_is_kept_and_the_model_is_accepted(kind: dict[str, Any]) -> None:
    base = get_gpt_layer_with_transformer_engine_spec(**kind)
    spec = replace_residual(base, ResidualConfig("mhc"))
    assert spec.module is ResidualTransformerLayer
    assert spec.submodules is base.submodules
    if not kind.get("multi_latent_attention"):
        assert spec.submodules.input_layernorm is IdentityOp
        assert spec.submodules.self_attention.submodules.linear_qkv is FusedNormLinear
    check_model(transformer_config(ToyGPT()), [spec], ResidualConfig("mhc"))


def by_local_name(
    name: str, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor | None:
    name = local_name(name)
    return default_initialise(name, shape, generator.manual_seed(zlib.crc32(name.encode())))


@pytest.mark.parametrize(
    ("residual", "recompute"),
    [(MHC, "none"), (MHC, "mix"), (MHC, "group:3"), (BLOCKS, "mix"), (BLOCKS, "block")],
)
def test_fused_norms_give_what_norms_of_their_own_give(residual: str, recompute: str) -> None:
    expected = run_toy(ToyGPT(**SIZES), block_spec_for(residual), initialise=by_local_name)
    text = residual.replace(")", f", recompute='{recompute}')")
    toy = ToyGPT(**SIZES, pp=2, vpp=2)
    actual = run_toy(toy, fused_spec(text), initialise=by_local_name)
    grads = {local_name(name): grad for name, grad in actual.grads.items()}
    assert grads.keys() != actual.grads.keys(), "no norm is fused"
    assert_same(ToyResult(actual.losses, grads).grads, expected.grads)


def hints(toy: ToyGPT, kind: dict[str, Any], quantized: str | None) -> dict[str, Any]:
    """What a layer is told about norms whose output is to be forgotten."""
    setup_parallel(toy)
    (chunk,) = build_chunks(toy, fused_spec("mhc()", **kind))
    layer = chunk.decoder.layers[0]
    # by hand: the host takes no fp8 configuration without Transformer Engine
    layer.config.fp8, layer.config.fp8_recipe = quantized, "tensorwise"
    layer.discard_norms()
    found: dict[str, Any] = {
        "forgets": (layer.recompute_input_layernorm, layer.recompute_pre_mlp_layernorm)
    }
    for name, module in layer.named_modules():
        if isinstance(module, InputKeepingLinear) and module.save_original_input:
            found[name] = type(module)
    return found


DENSE = ToyGPT(num_layers=1)
EXPERTS = ToyGPT(
    num_layers=1,
    bias=False,
    config_overrides=dict(
        num_moe_experts=4,
        moe_router_load_balancing_type="none",
        moe_ffn_hidden_size=16,
        moe_shared_expert_intermediate_size=8,
    ),
)


def test_a_fused_norm_is_not_forgotten_apart_from_its_linear_layer() -> None:
    for quantized in (None, "hybrid"):
        (found,) = run_ranks(1, hints, DENSE, {}, quantized)
        assert found == {"forgets": (False, False)}


def test_the_norm_in_front_of_experts_is_forgotten_and_quantized_nothing_keeps_a_copy() -> None:
    (plain,) = run_ranks(1, hints, EXPERTS, KINDS["experts"], None)
    assert plain == {"forgets": (False, True)}
    (quantized,) = run_ranks(1, hints, EXPERTS, KINDS["experts"], "hybrid")
    name = "mlp.shared_experts.linear_fc1"
    assert quantized == {"forgets": (False, True), name: InputKeepingLinear}


def unfused_hints(toy: ToyGPT) -> list[tuple[str, bool]]:
    setup_parallel(toy)
    (chunk,) = build_chunks(toy, block_spec_for("mhc()"))
    layer = chunk.decoder.layers[0]
    linears = {n: m for n, m in layer.named_modules() if n.split(".")[-1].startswith("linear_")}
    for linear in linears.values():
        linear.save_original_input = False  # what Transformer Engine's have
    layer.config.fp8, layer.config.fp8_recipe = "hybrid", "tensorwise"
    layer.discard_norms()
    return [(name, linear.save_original_input) for name, linear in linears.items()]


def test_quantized_layers_behind_norms_of_their_own_keep_the_input_itself() -> None:
    (found,) = run_ranks(1, unfused_hints, DENSE)
    behind_norms = {"self_attention.linear_qkv", "mlp.linear_fc1"}
    assert {name for name, told in found if told} == behind_norms
    assert len(found) == 4


@pytest.mark.parametrize("recompute", ["mix", "group:2"])
def test_delayed_scaling_with_a_norm_to_forget_is_refused(recompute: str) -> None:
    config = transformer_config(ToyGPT())
    config.fp8, config.fp8_recipe = "hybrid", "delayed"
    residual = ResidualConfig("mhc", recompute=recompute)
    dense, experts = (fused_spec("mhc()", **KINDS[kind]) for kind in ("dense", "experts"))
    check_model(config, [dense], residual)
    with pytest.raises(ValueError, match="cannot be recomputed under delayed scaling"):
        check_model(config, [experts], residual)
    check_model(config, [experts], ResidualConfig("mhc"))
    config.fp8_recipe = "tensorwise"
    check_model(config, [experts], residual)
