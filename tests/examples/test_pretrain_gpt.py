# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The entry script's own decisions; that it trains is shown by the launch test."""

from __future__ import annotations

import ast
from argparse import ArgumentParser, Namespace
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("megatron.training", reason="not in the 0.16 wheel")

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.training.arguments import add_megatron_arguments  # noqa: E402

from examples import pretrain_gpt  # noqa: E402

pytestmark = pytest.mark.host


def stock_args(**changed: object) -> Namespace:
    defaults = {
        "spec": None,
        "transformer_impl": "local",
        "num_experts": None,
        "normalization": "RMSNorm",
        "qk_l2_norm": False,
    }
    return Namespace(**(defaults | changed))


def config(**changed: object) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, normalization="RMSNorm", **changed
    )


def test_the_script_imports_nothing_of_ours() -> None:
    tree = ast.parse(Path(pretrain_gpt.__file__).read_text())
    modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    modules |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert "torch" in modules
    assert not [name for name in modules if name.startswith("megatron_residuals")]


def test_everything_unsupported_is_refused_at_once() -> None:
    args = Namespace(sft=True, fim_data=False, hybrid_context_parallel=True)
    with pytest.raises(ValueError, match=r"\['sft', 'hybrid_context_parallel'\].*Leave them out"):
        pretrain_gpt.refuse_unsupported(args, pretrain_gpt.REFUSED_ARGS)
    args.sft = args.hybrid_context_parallel = None
    pretrain_gpt.refuse_unsupported(args, pretrain_gpt.REFUSED_ARGS)


def test_a_spec_is_handed_on_untouched() -> None:
    args = stock_args(spec=["math", "tau"])  # any object of any module
    assert pretrain_gpt.stock_layer_spec(args, config(), None) == pytest.approx(6.2831853)


@pytest.mark.parametrize("qk_layernorm", [False, True])
def test_the_layer_spec_follows_the_switches_of_the_config(qk_layernorm: bool) -> None:
    spec = pretrain_gpt.stock_layer_spec(stock_args(), config(qk_layernorm=qk_layernorm), None)
    norm = spec.submodules.self_attention.submodules.q_layernorm
    assert (norm is not None and norm is not IdentityOp) == qk_layernorm


@pytest.mark.filterwarnings("ignore:'type' is deprecated:DeprecationWarning")  # Megatron's parser
def test_both_names_of_every_renamed_dataset_option_exist() -> None:
    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    arguments = {action.dest for action in parser._actions}
    known = {field.name for field in fields(GPTDatasetConfig)}
    assert set(pretrain_gpt.DATASET_ARGS) <= known
    assert set(pretrain_gpt.DATASET_ARGS.values()) <= arguments


def test_experts_get_a_block_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def block_spec(config: TransformerConfig, **options: object) -> TransformerBlockSubmodules:
        asked.update(options)
        return TransformerBlockSubmodules()

    monkeypatch.setattr(pretrain_gpt.gpt_layer_specs, "get_gpt_decoder_block_spec", block_spec)
    spec = pretrain_gpt.stock_layer_spec(stock_args(num_experts=4), config(), 1)
    assert isinstance(spec, TransformerBlockSubmodules)
    assert asked["vp_stage"] == 1 and asked["use_transformer_engine"] is False
