# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The host's Transformer Engine specs with every mechanism, in Transformer Engine's own classes."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
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
from megatron_residuals.testing.toy_weights import (
    Initialise,
    default_initialise,
    named_globally,
    whole_over_tp,
)
from tests.mcore.parallel.cases import BLOCKS, FULL, HC, MHC, PLAIN, assert_same, block_spec_for

te = pytest.importorskip("transformer_engine.pytorch")
pytestmark = [pytest.mark.host, pytest.mark.timeout(120)]

SIZES: dict[str, Any] = dict(
    num_layers=4,
    hidden_size=16,
    seq_length=8,
    num_microbatches=4,
    bias=False,
    normalization="RMSNorm",
)
EXPERTS = dict(
    num_moe_experts=4,
    moe_grouped_gemm=True,
    moe_router_load_balancing_type="none",
    moe_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=8,
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2 vpp2": dict(pp=2, vpp=2),
    "tp2 sp": dict(tp=2, sequence_parallel=True),
}


def te_spec_for(residual: str) -> Any:
    """Transformer Engine's layers of whatever kind the configuration asks for, with a residual."""
    install()

    def spec(config: Any, vp_stage: int | None) -> Any:
        base = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        return replace_residual(base, ResidualConfig.parse(residual))

    return spec


def local_name(name: str) -> str:
    """The name of a fused model's parameter in the model whose norms are modules of their own."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    if ".experts.linear_" in name:  # fc1.weight3 of them all is the weight of expert 3's fc1
        front, number = name.split(".weight")
        name = front.replace(".experts.", f".experts.local_experts.{number}.") + ".weight"
    return name


def by_local_name(
    name: str, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor | None:
    name = local_name(name)
    return default_initialise(name, shape, generator.manual_seed(zlib.crc32(name.encode())))


@functools.cache
def local_step(residual: str, sizes: ToyGPT) -> ToyResult:
    """One process, the host's own layers."""
    return run_toy(sizes, block_spec_for(residual), initialise=by_local_name)


def assert_is_the_local_step(toy: ToyGPT, sizes: ToyGPT, residual: str, text: str) -> None:
    expected = local_step(residual, sizes)
    actual = run_toy(toy, te_spec_for(text), initialise=by_local_name)
    grads = {local_name(name): grad for name, grad in actual.grads.items()}
    assert grads.keys() != actual.grads.keys(), "no norm is fused"
    assert actual.losses == pytest.approx(expected.losses, rel=1e-5)
    assert_same(grads, expected.grads, torch.float32)


@pytest.mark.parametrize("residual", [PLAIN, HC, MHC, FULL, BLOCKS])
def test_a_step_of_its_layers_is_a_step_of_the_hosts_own(residual: str) -> None:
    toy = ToyGPT(**SIZES)
    assert_is_the_local_step(toy, toy, residual, residual)


@pytest.mark.parametrize(
    ("layout", "residual", "recompute"),
    [
        ("pp2 vpp2", MHC, "group:3"),
        ("pp2 vpp2", BLOCKS, "block"),
        ("tp2 sp", MHC, "mix"),
        ("tp2 sp", BLOCKS, "mix"),
    ],
)
def test_layouts_and_recomputation_change_nothing(
    layout: str, residual: str, recompute: str
) -> None:
    text = residual.replace(")", f", recompute='{recompute}')")
    toy = ToyGPT(**SIZES, **LAYOUTS[layout])
    assert_is_the_local_step(toy, ToyGPT(**SIZES), residual, text)


def test_grouped_experts_compute_what_single_ones_do() -> None:
    toy = ToyGPT(**{**SIZES, "num_layers": 2}, config_overrides=EXPERTS)
    assert_is_the_local_step(toy, toy, MHC, MHC.replace(")", ", recompute='mix')"))


def _chunk(toy: ToyGPT, spec: Any, initialise: Initialise = by_local_name) -> Any:
    setup_parallel(toy)
    (chunk,) = build_chunks(toy, spec, initialise=initialise)
    return chunk


def _parameters(chunk: Any) -> dict[str, torch.Tensor]:
    """By local name, whole."""
    return {
        local_name(name): whole_over_tp(parameter.detach().clone(), parameter)
        for name, parameter in named_globally(chunk)
    }


def _save(toy: ToyGPT, residual: str, folder: str) -> tuple[dict[str, torch.Tensor], bool]:
    """Its parameters, and whether modules have a state of their own beside them."""
    chunk = _chunk(toy, te_spec_for(residual))
    dist_checkpointing.save(chunk.sharded_state_dict(), folder)
    return _parameters(chunk), any("_extra_state" in name for name in chunk.state_dict())


def _load(toy: ToyGPT, spec: Any, folder: str) -> dict[str, torch.Tensor]:
    chunk = _chunk(toy, spec, lambda name, shape, generator: torch.full(shape, torch.nan))
    state = dist_checkpointing.load(chunk.sharded_state_dict(), folder)
    chunk.load_state_dict(state, strict=False)
    return _parameters(chunk)


# Torch warns, at lines of its own, of how the host calls its checkpoint functions.
@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("residual", [MHC, BLOCKS])
def test_a_checkpoint_is_loaded_in_another_layout_and_by_the_hosts_own_layers(
    residual: str, tmp_path: Path
) -> None:
    toy, folder = ToyGPT(**SIZES), str(tmp_path)
    ((saved, has_extra_state),) = run_ranks(1, _save, toy, residual, folder)
    split = ToyGPT(**SIZES, **LAYOUTS["tp2 sp"])
    loaded = run_ranks(2, _load, split, te_spec_for(residual), folder)
    loaded += run_ranks(1, _load, toy, block_spec_for(residual), folder)
    assert has_extra_state
    for parameters in loaded:
        assert parameters.keys() == saved.keys()
        assert all(torch.equal(parameters[name], saved[name]) for name in saved)


KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "qk norm": dict(qk_layernorm=True),
    "experts": dict(num_experts=4, moe_grouped_gemm=False),
    "latent attention": dict(multi_latent_attention=True, qk_layernorm=True),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_submodule_is_kept_and_the_model_is_accepted(kind: dict[str, Any]) -> None:
    base = get_gpt_layer_with_transformer_engine_spec(**kind)
    spec = replace_residual(base, ResidualConfig("mhc"))
    assert spec.module is ResidualTransformerLayer
    assert spec.submodules is base.submodules
    if not kind.get("multi_latent_attention"):
        assert spec.submodules.input_layernorm is IdentityOp
        fused = spec.submodules.self_attention.submodules.linear_qkv
        assert issubclass(fused, te.LayerNormLinear)
    check_model(transformer_config(ToyGPT()), [spec], ResidualConfig("mhc"))


def hints(toy: ToyGPT, quantized: str | None) -> dict[str, Any]:
    """What a layer is told about norms whose output is to be forgotten."""
    layer = _chunk(toy, te_spec_for("mhc()")).decoder.layers[0]
    # by hand: such a configuration asks for a GPU
    layer.config.fp8, layer.config.fp8_recipe = quantized, "tensorwise"
    layer.discard_norms()
    found: dict[str, Any] = {
        "forgets": (layer.recompute_input_layernorm, layer.recompute_pre_mlp_layernorm)
    }
    for name, module in layer.named_modules():
        if getattr(module, "save_original_input", False):
            found[name] = True
    return found


def test_a_fused_norm_is_not_forgotten_apart_from_its_linear_layer() -> None:
    for quantized in (None, "hybrid"):
        (found,) = run_ranks(1, hints, ToyGPT(num_layers=1), quantized)
        assert found == {"forgets": (False, False)}


def test_the_norm_in_front_of_experts_is_forgotten_and_quantized_nothing_keeps_a_copy() -> None:
    toy = ToyGPT(num_layers=1, bias=False, config_overrides=EXPERTS)
    (plain,) = run_ranks(1, hints, toy, None)
    assert plain == {"forgets": (False, True)}
    (quantized,) = run_ranks(1, hints, toy, "hybrid")
    assert quantized.pop("forgets") == (False, True)
    assert "mlp.shared_experts.linear_fc1" in quantized


def _hints_behind_own_norms(toy: ToyGPT) -> dict[str, bool]:
    def use_its_linear_layers(layer: Any) -> None:
        attention = layer.submodules.self_attention.submodules
        attention.linear_qkv, attention.linear_proj = TEColumnParallelLinear, TERowParallelLinear

    layer = _chunk(toy, block_spec_for("mhc()", use_its_linear_layers)).decoder.layers[0]
    layer.mlp.linear_fc1.save_original_input = False  # what Transformer Engine's have
    layer.config.fp8, layer.config.fp8_recipe = "hybrid", "tensorwise"
    layer.discard_norms()
    return {
        name: module.save_original_input
        for name, module in layer.named_modules()
        if hasattr(module, "save_original_input")
    }


def test_quantized_layers_behind_norms_of_their_own_keep_the_input_itself() -> None:
    (found,) = run_ranks(1, _hints_behind_own_norms, ToyGPT(num_layers=1))
    told = {"self_attention.linear_qkv", "mlp.linear_fc1"}
    assert found == dict.fromkeys(told, True) | {"self_attention.linear_proj": False}


@pytest.mark.parametrize("recompute", ["mix", "group:2"])
def test_delayed_scaling_with_a_norm_to_forget_is_refused(recompute: str) -> None:
    config = transformer_config(ToyGPT())
    config.fp8, config.fp8_recipe = "hybrid", "delayed"
    residual = ResidualConfig("mhc", recompute=recompute)
    dense, experts = (
        replace_residual(
            get_gpt_layer_with_transformer_engine_spec(**KINDS[kind]), ResidualConfig("mhc")
        )
        for kind in ("dense", "experts")
    )
    check_model(config, [dense], residual)
    with pytest.raises(ValueError, match="cannot be recomputed under delayed scaling"):
        check_model(config, [experts], residual)
    check_model(config, [experts], ResidualConfig("mhc"))
    config.fp8_recipe = "tensorwise"
    check_model(config, [experts], residual)
