# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Entry points: ``--spec`` names, users' own specs of every kind, and MoE models."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
)
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_residuals import ResidualConfig
from megatron_residuals.mcore.block import ResidualTransformerBlock
from megatron_residuals.mcore.layer import ResidualTransformerLayer, residual_layer_class
from megatron_residuals.mcore.spec import block_submodules
from megatron_residuals.specs import residual_spec
from megatron_residuals.testing import assert_close, run_ranks
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    build_chunks,
    run_toy,
    setup_parallel,
    transformer_config,
)

pytestmark = pytest.mark.host

NAMES = ["residual", "hc", "mhc", "attnres", "block_attnres"]
LOCAL = dict(transformer_impl="local")


@pytest.mark.parametrize("name", NAMES)
def test_a_spec_name_is_taken_as_it_is_and_builds_the_mechanism(name: str) -> None:
    spec = import_module(["megatron_residuals.specs", name])
    assert isinstance(spec, ModuleSpec)
    assert run_ranks(1, built_mechanism, spec) == [name]


def built_mechanism(spec: Any) -> str:
    toy = ToyGPT(config_overrides=LOCAL)
    setup_parallel(toy)
    (chunk,) = build_chunks(toy, spec)
    assert isinstance(chunk.decoder, ResidualTransformerBlock)
    assert all(isinstance(layer, ResidualTransformerLayer) for layer in chunk.decoder.layers)
    return chunk.decoder.residual.mechanism


def test_a_spec_name_equals_the_same_spec_built_by_hand() -> None:
    toy = ToyGPT(pp=2, vpp=2, config_overrides=LOCAL)
    by_name = run_toy(toy, import_module(["megatron_residuals.specs", "mhc"]))
    by_hand = run_toy(toy, residual_spec(get_gpt_layer_local_spec(), ResidualConfig("mhc")))
    assert by_name.losses == by_hand.losses


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("mch", "invalid residual configuration: mechanism is 'mch' (did you mean mhc?); allowed"),
        ("mhc hc", "takes one name behind it"),
    ],
)
def test_a_spec_that_cannot_work_ends_the_script_in_one_line(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Without the runner: a wrong name was a KeyError of the host's, in a traceback on every rank.
    command = ["pretrain.py", "--spec", "megatron_residuals.specs", *words.split()]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.delitem(sys.modules, "megatron_residuals.specs")
    with pytest.raises(SystemExit) as end:
        importlib.import_module("megatron_residuals.specs")
    printed = capsys.readouterr().err
    assert end.value.code == 2 and printed.count("\n") == 1
    assert printed.startswith("megatron_residuals.specs: error: ") and said in printed


def test_a_layer_spec_is_copied_and_the_users_own_stays_as_it_was() -> None:
    base = get_gpt_layer_local_spec()
    replaced = residual_spec(base, ResidualConfig("mhc"))
    assert base.module is TransformerLayer
    assert base.params == {}
    assert replaced.module is ResidualTransformerLayer
    assert replaced.submodules is base.submodules


def test_a_block_spec_keeps_its_norm_and_its_layers() -> None:
    layer = get_gpt_layer_local_spec()
    base = TransformerBlockSubmodules([layer, layer], layer_norm=torch.nn.LayerNorm)
    replaced = residual_spec(base, ResidualConfig("hc"))
    assert [spec.module for spec in replaced.layer_specs] == [ResidualTransformerLayer] * 2
    assert replaced.layer_norm is torch.nn.LayerNorm


def test_a_function_keeps_its_signature_and_is_wrapped() -> None:
    def base(config: Any, vp_stage: int | None = None) -> ModuleSpec:
        return get_gpt_layer_local_spec()

    replaced = residual_spec(base, ResidualConfig("hc"))
    assert replaced.__wrapped__ is base
    assert replaced(None, vp_stage=1).module is ResidualTransformerLayer


def test_a_users_own_layer_class_is_subclassed_once() -> None:
    class OwnLayer(TransformerLayer):
        pass

    replaced = residual_spec(ModuleSpec(module=OwnLayer), ResidualConfig("hc")).module
    assert issubclass(replaced, OwnLayer)
    assert residual_layer_class(OwnLayer) is replaced
    assert residual_layer_class(replaced) is replaced


@pytest.mark.parametrize("wrong", [ModuleSpec(module=torch.nn.Linear), 3])
def test_a_spec_of_another_kind_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError):
        residual_spec(wrong, ResidualConfig("hc"))


@pytest.mark.parametrize(
    "option",
    [
        "experimental_attention_variant",
        "use_transformer_engine_op_fuser",
        "use_grouped_gemm_for_dense_mlp",
    ],
)
def test_a_name_refuses_options_whose_layers_it_would_not_build(option: str) -> None:
    config = SimpleNamespace(num_moe_experts=None, **{option: "dsa"})
    spec = import_module(["megatron_residuals.specs", "mhc"])
    with pytest.raises(ValueError, match=f"{option} = 'dsa' has layer specs of its own"):
        block_submodules(spec, config, None, None)


def in_a_block_of_the_hosts() -> list[str]:
    toy, said = ToyGPT(num_layers=1), []
    setup_parallel(toy)
    config = transformer_config(toy)
    by_name = import_module(["megatron_residuals.specs", "mhc"])
    by_hand = residual_spec(get_gpt_layer_local_spec(), ResidualConfig("mhc"))
    for spec in (by_name, by_hand):
        with pytest.raises(TypeError) as error:
            block = TransformerBlock(config, spec)
            block(torch.randn(4, 1, toy.hidden_size, dtype=toy.dtype), None)
        said.append(str(error.value))
    ours = ResidualTransformerBlock(config, by_hand)
    hidden = torch.randn(4, 1, toy.hidden_size, dtype=toy.dtype)
    assert ours(hidden, None).shape == hidden.shape
    return said


def test_a_model_that_builds_its_block_itself_is_told_what_to_build() -> None:
    (said,) = run_ranks(1, in_a_block_of_the_hosts)
    assert all("call megatron_residuals.mcore.compose.build_block" in text for text in said), said


MOE = dict(
    num_moe_experts=4, moe_layer_freq=[0, 1, 0, 1], moe_router_topk=2, moe_ffn_hidden_size=16
)


@pytest.mark.parametrize("mechanism", ["residual", "mhc", "block_attnres"])
def test_mixed_dense_and_expert_layers_equal_one_process(mechanism: str) -> None:
    options = dict(moe_token_dispatcher_type="alltoall", moe_grouped_gemm=False, **MOE)
    overrides = {**LOCAL, **options, "add_bias_linear": False}
    spec = import_module(["megatron_residuals.specs", mechanism])
    expected = run_toy(ToyGPT(config_overrides=overrides), spec)
    actual = run_toy(ToyGPT(pp=2, vpp=2, config_overrides=overrides), spec)
    assert actual.losses == expected.losses
    for name, gradient in expected.grads.items():
        assert_close(actual.grads[name], gradient, dtype=torch.float32, kind="same_math", name=name)
    if mechanism == "residual":
        stock = run_toy(
            ToyGPT(config_overrides=overrides),
            lambda config, vp_stage: get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, vp_stage=vp_stage
            ),
        )
        assert expected.losses == stock.losses
