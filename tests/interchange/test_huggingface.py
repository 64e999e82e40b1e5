# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""An exported model computes what Megatron's does, elsewhere, and nothing is exported wrong."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_residuals import testing

transformers = pytest.importorskip("transformers")
testing.install()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.activations import squared_relu  # noqa: E402
from megatron.core.models.common.embeddings.rotary_pos_embedding import (  # noqa: E402
    RotaryEmbedding,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402

from megatron_residuals.cli import main  # noqa: E402
from megatron_residuals.config import ResidualConfig  # noqa: E402
from megatron_residuals.interchange import open_checkpoint  # noqa: E402
from megatron_residuals.interchange.huggingface.architecture import model_config  # noqa: E402
from megatron_residuals.interchange.huggingface.folder import exported_module  # noqa: E402
from megatron_residuals.mcore.install import install  # noqa: E402
from megatron_residuals.mcore.spec import replace_residual  # noqa: E402
from megatron_residuals.mechanisms.sources import AttnRes  # noqa: E402
from megatron_residuals.mechanisms.sources.module import DepthAttention  # noqa: E402
from megatron_residuals.testing.ranks import run_ranks  # noqa: E402
from megatron_residuals.testing.residual_toy import toy_spec  # noqa: E402
from megatron_residuals.testing.toy_gpt import ToyGPT, build_chunks, setup_parallel  # noqa: E402
from tests.interchange.cases import assert_same  # noqa: E402

TOKENS = torch.randint(64, (3, 7), generator=torch.Generator().manual_seed(7))
LLAMA = {"normalization": "RMSNorm", "bias": False}
GATED = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}


class Case(NamedTuple):
    """A model: its residual, fields of the toy, and of the host's configuration."""

    residual: str
    toy: dict[str, Any]
    overrides: dict[str, Any]
    args: dict[str, Any] = {}


ROTARY = {  # with 16 rotated numbers waves on both sides of the scaling, and one between
    "rotary_base": 200_000,
    "rotary_percent": 0.5,
    "rotary_seq_len_interpolation_factor": 2,
    "use_rope_scaling": True,
    "rope_scaling_factor": 4.0,
}
CASES = {
    "plain": Case("residual()", LLAMA, {**GATED, "num_query_groups": 2}),
    "rotary": Case(
        "residual()",
        LLAMA,
        {"activation_func": squared_relu, "kv_channels": 32},
        {"squared_relu": True, **ROTARY},
    ),
    "hc": Case("hc()", {}, {"qk_layernorm": True}),
    "mhc": Case(
        "mhc()",
        {**LLAMA, "tied_embeddings": True},
        {**GATED, "num_query_groups": 2, "qk_layernorm": True, "kv_channels": 12},
    ),
    "dsv4": Case(
        "mhc(mhc_convention='dsv4')",
        {"positions": "learned_absolute"},
        {"bias_activation_fusion": True},
        {"bias_gelu_fusion": True},
    ),
    "ihc": Case("ihc(streams=3)", LLAMA, GATED),
    "single pass": Case("single_pass_mhc(streams=3)", LLAMA, GATED),
    "kronecker": Case("mhc(mhc_mixing='kronecker')", LLAMA, GATED),
    "by heads": Case("block_attnres(block_sublayers=3, attnres_heads=2)", LLAMA, GATED),
    "additive": Case("attnres(attnres_additive=True)", LLAMA, GATED),
    "attnres": Case("attnres()", LLAMA, {**GATED, "add_qkv_bias": True}),
    "block": Case("block_attnres(block_sublayers=3)", LLAMA, GATED),
}


def arguments(toy: ToyGPT, config: Any, more: Mapping[str, Any]) -> argparse.Namespace:
    """What Megatron's argument parser would have recorded."""
    found = argparse.Namespace(
        num_layers=toy.num_layers,
        hidden_size=toy.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=toy.num_heads,
        num_query_groups=config.num_query_groups,
        group_query_attention=config.num_query_groups != toy.num_heads,
        kv_channels=config.kv_channels,
        normalization=toy.normalization,
        layernorm_epsilon=config.layernorm_epsilon,
        position_embedding_type=toy.positions,
        rotary_base=10000,
        rotary_percent=1.0,
        max_position_embeddings=toy.seq_length,
        swiglu=config.gated_linear_unit,
        bias_gelu_fusion=False,
        add_bias_linear=config.add_bias_linear,
        add_qkv_bias=config.add_qkv_bias,
        qk_layernorm=config.qk_layernorm,
        untie_embeddings_and_output_weights=not toy.tied_embeddings,
        num_experts=None,
    )
    vars(found).update(more)
    return found


def turns(config: Any, args: argparse.Namespace) -> RotaryEmbedding:
    """As the host's builder makes it of arguments that the toy does not have."""
    return RotaryEmbedding(
        config.kv_channels,
        args.rotary_percent,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        use_cpu_initialization=True,
    )


def save_models(folder: Path) -> dict[str, Tensor]:
    """Every case as a checkpoint of the host's; its logits [b, s, vocabulary] on `TOKENS`."""
    logits = {}
    install()
    for number, (name, case) in enumerate(CASES.items()):
        toy = ToyGPT(**case.toy, config_overrides={"ffn_hidden_size": 48, **case.overrides})
        if number == 0:
            setup_parallel(toy)

        def spec(config: Any, vp_stage: int | None, residual: str = case.residual) -> Any:
            layer = get_gpt_layer_local_spec(
                qk_layernorm=config.qk_layernorm, normalization=config.normalization
            )
            return replace_residual(layer, ResidualConfig.parse(residual))

        model = build_chunks(toy, spec)[0].eval()
        args = arguments(toy, model.config, case.args)
        if "rotary_percent" in case.args:
            model.rotary_pos_emb = turns(model.config, args)
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases too
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
            positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS).contiguous()
            logits[name] = model(TOKENS, positions, None)
        (folder / name).mkdir()
        content = {"args": args, **model.sharded_state_dict()}
        dist_checkpointing.save(content, str(folder / name))
    return logits


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("models")
    return folder, run_ranks(1, save_models, folder)[0]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def export(*words: object) -> int:
    return main(["export", "--to", "hf", *map(str, words)])


def convert(*words: object) -> None:
    assert main(["convert", *map(str, words)]) == 0


@pytest.mark.parametrize("name", CASES)
def test_an_exported_model_computes_what_megatron_does(
    name: str, models: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, logits = models
    target = tmp_path / f"model_{name}"  # transformers names a module after the folder
    assert export(folder / name, target, "--verify", "--shard-gib", 2e-5) == 0
    assert len(list(target.glob("*.safetensors"))) > 1
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, found = load(target, trust_remote_code=True, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, logits[name], rtol=0, atol=1e-6)
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        cached = model.generate(TOKENS, use_cache=True, **options)
        tokens = TOKENS
        for _ in range(6):
            best = model(tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, best), dim=1)
    assert torch.equal(cached, tokens)
    half = load(target, trust_remote_code=True, dtype=torch.bfloat16)
    of_residual = [p for n, p in half.named_parameters() if "residual" in n]
    assert {p.dtype for p in of_residual} <= {torch.float32}
    assert half.lm_head.weight.dtype == torch.bfloat16


def save_in_parts(layout: Mapping[str, Any], folder: Path) -> None:
    """A model whose weights no layout changes, by all of its ranks and chunks."""
    toy = ToyGPT(**LLAMA, **layout)
    setup_parallel(toy)
    chunks = build_chunks(toy, toy_spec(toy, "mhc()"))
    parts = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
    args = arguments(toy, chunks[0].config, {})
    dist_checkpointing.save({"args": args, **parts}, str(folder))


def test_a_checkpoint_of_any_layout_is_exported_as_the_same_folder(tmp_path: Path) -> None:
    layouts: dict[str, dict[str, Any]] = {"one": {}, "many": {"tp": 2, "pp": 2, "vpp": 2}}
    for name, layout in layouts.items():
        (tmp_path / name).mkdir()
        ranks = layout.get("tp", 1) * layout.get("pp", 1)
        run_ranks(ranks, save_in_parts, layout, tmp_path / name)
        assert export(tmp_path / name, tmp_path / f"{name}_folder") == 0
    one, many = (sorted((tmp_path / f"{name}_folder").glob("*")) for name in layouts)
    assert [path.name for path in one] == [path.name for path in many] and len(one) > 3
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(one, many, strict=True))


@pytest.mark.parametrize("name", ["mhc", "dsv4", "block"])
def test_an_exported_model_comes_back_into_a_checkpoint_bit_for_bit(
    name: str, models: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, other = tmp_path / "exported", tmp_path / "other"
    assert export(models[0] / name, folder, "--shard-gib", 2e-5) == 0
    shutil.copytree(folder, tmp_path / "negative")
    for path in (tmp_path / "negative").glob("*.safetensors"):
        save_file({k: -v for k, v in load_file(path).items()}, path, metadata={"format": "pt"})
    convert(models[0] / name, other, "--import-from", tmp_path / "negative")
    convert(other, tmp_path / "back", "--import-from", folder)
    found = {p: open_checkpoint(p).checkpoint for p in (models[0] / name, other, tmp_path / "back")}
    expected, negative, back = (c.read(bool) for c in found.values())
    assert_same(back, expected)
    assert_same(negative, {key: -tensor for key, tensor in expected.items()})
    assert len({str(c.settings()) for c in found.values()}) == 1
    assert found[tmp_path / "back"].settings() is not None


def test_a_folder_of_another_model_is_named_and_nothing_is_written(
    models: tuple[Path, dict[str, Tensor]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert export(models[0] / "hc", tmp_path / "hc") == 0
    words = [models[0] / "mhc", tmp_path / "back", "--import-from", tmp_path / "hc"]
    assert main(["convert", *map(str, words)]) == 2
    told = capsys.readouterr().err
    assert "hidden_act is 'gelu'; the checkpoint's is 'silu'" in told and "residual is" in told
    words[0] = models[0] / "hc"
    (shard,) = (tmp_path / "hc").glob("*.safetensors")
    tensors = load_file(shard)
    del tensors["model.layers.1.mlp.up_proj.bias"]
    save_file(tensors, shard)
    assert main(["convert", *map(str, words)]) == 2
    assert "model.layers.1.mlp.up_proj.bias is missing" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_a_residual_stays_float32_where_an_engine_makes_parameters_anew(
    models: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    # as vLLM's backend for models of transformers loads: a model without memory, each parameter
    # replaced by an empty one in the model's dtype, and filled by its name
    folder = tmp_path / "served"
    assert export(models[0] / "mhc", folder) == 0
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config, trust_remote_code=True)
    assert model.is_backend_compatible()
    for module in model.modules():
        for name, held in list(module.named_parameters(recurse=False)):
            empty = torch.empty_like(held, dtype=torch.bfloat16, device="cpu")
            setattr(module, name, torch.nn.Parameter(empty))
    (shard,) = folder.glob("*.safetensors")
    stored = load_file(shard)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(stored[f"model.{name}"])
        exact = "residual" in name
        assert parameter.dtype == (torch.float32 if exact else torch.bfloat16), name
        assert not exact or torch.equal(parameter, stored[f"model.{name}"]), name


def test_an_exported_model_loads_where_this_package_is_not(
    models: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    assert export(models[0] / "mhc", tmp_path / "elsewhere") == 0
    program = (
        "import sys; sys.modules['megatron_residuals'] = sys.modules['megatron'] = None\n"
        "from transformers import AutoModel\n"
        "print(type(AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)).__name__)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "elsewhere")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert run.stdout.strip() == "ResidualGPTModel", run.stderr


def test_a_folder_is_replaced_only_if_asked_and_only_an_exported_one(
    models: tuple[Path, dict[str, Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, other = tmp_path / "model", tmp_path / "mine"
    other.mkdir()
    assert export(models[0] / "hc", target) == 0
    assert export(models[0] / "mhc", target) == 2
    assert "--force" in capsys.readouterr().err
    assert export(models[0] / "mhc", target, "--force") == 0
    assert json.loads((target / "config.json").read_text())["residual"]["mechanism"] == "mhc"
    assert export(models[0] / "mhc", other, "--force") == 2
    assert "no exported model" in capsys.readouterr().err


def test_what_the_exported_model_cannot_express_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {
        "embedding.word_embeddings.weight": torch.zeros(8, 4),
        "decoder.final_layernorm.weight": torch.ones(4),
        "decoder.layers.0.self_attention.surprise.weight": torch.ones(4),
    }
    args = argparse.Namespace(
        num_layers=1, hidden_size=4, ffn_hidden_size=8, num_attention_heads=1, norm_epsilon=1e-5
    )
    path, target = tmp_path / "model.pt", tmp_path / "out"
    torch.save({"model": tensors, "args": args}, path)
    assert export(path, target) == 2
    assert "self_attention.surprise.weight" in capsys.readouterr().err
    args.num_experts, args.window_size = 8, (4, 0)
    torch.save({"model": tensors, "args": args}, path)
    assert export(path, target) == 2
    told = capsys.readouterr().err
    assert "num_experts is 8" in told and "window_size is (4, 0)" in told
    torch.save({"model": tensors}, path)
    assert export(path, target) == 2
    assert "arguments of its run" in capsys.readouterr().err
    assert not target.exists()


def test_the_eps_of_norms_is_found_under_the_name_of_every_release() -> None:
    # Only the older name was known, and no checkpoint trained with 0.19 could be exported.
    sizes = {"num_layers": 1, "hidden_size": 4, "ffn_hidden_size": 8, "num_attention_heads": 1}
    for name in ("layernorm_epsilon", "norm_epsilon"):
        assert model_config({**sizes, name: 3e-6}, 8, "it")["norm_eps"] == 3e-6
    with pytest.raises(ValueError, match="no layernorm_epsilon or norm_epsilon"):
        model_config(sizes, 8, "it")


def test_a_mechanism_that_derives_from_another_is_not_exported_as_that() -> None:
    class Own(AttnRes):
        def build_sublayer(self, config: Any, place: Any) -> DepthAttention:
            raise NotImplementedError

    config = ResidualConfig("attnres")
    object.__setattr__(config, "mechanism", "own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResidualConfig, "entry", Own("own"))
        with pytest.raises(ValueError, match="'own', which has no form outside"):
            exported_module(config)


def test_an_option_that_exported_models_do_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ResidualConfig("mhc", mhc_mixing="permutations")
    module = exported_module(config)
    known = tuple(name for name in module.OPTIONS if name != "mhc_mixing")
    monkeypatch.setattr(module, "OPTIONS", known)
    with pytest.raises(ValueError, match="mhc_mixing is 'permutations'"):
        exported_module(config)
    monkeypatch.setattr(module, "MECHANISMS", ("hc",))
    with pytest.raises(ValueError, match="'mhc', which has no form outside"):
        exported_module(config)
