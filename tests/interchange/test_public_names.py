# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters under the names of DeepSeek-V4 and Kimi-K3: bit for bit, and the right way round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.functional import (
    MhcOptions,
    MhcWeights,
    StreamCoefficients,
    mhc_coefficients,
    mhc_head_weights,
)
from megatron_residuals.interchange import read_residual, tensor_file, write_residual
from megatron_residuals.interchange.public_file import (
    config_of,
    export_residual,
    taken_from_flags,
)
from megatron_residuals.settings import settings_of
from tests.interchange.cases import HIDDEN, LAYERS, assert_same, random_parameters

needs_safetensors = pytest.mark.skipif(
    not tensor_file.is_available(), reason="safetensors is not installed"
)
DSV4 = ResidualConfig("mhc", streams=3, mhc_convention="dsv4")
PAPER = ResidualConfig("mhc", streams=3)
BLOCKS = ResidualConfig("block_attnres", block_layers=2)
V41 = ResidualConfig("single_pass_mhc", streams=3, mhc_convention="dsv4")
IHC = ResidualConfig("ihc", streams=3)
CONFIGS = [
    DSV4,
    V41,
    IHC,
    PAPER,
    ResidualConfig("mhc", streams=3, contraction="learned"),
    ResidualConfig("mhc", streams=2, mhc_convention="dsv4", contraction="mean"),
    BLOCKS,
    ResidualConfig("block_attnres", block_sublayers=4),
]


def read(path: Path, config: ResidualConfig, **options: bool) -> dict[str, Tensor]:
    return read_residual(path, config, LAYERS, HIDDEN, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "residual.safetensors"


@needs_safetensors
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_what_is_written_under_public_names_is_read_back_bit_for_bit(
    config: ResidualConfig, path: Path
) -> None:
    parameters = random_parameters(config)
    write_residual(path, parameters, config, LAYERS)
    assert_same(read(path, config), parameters)


def test_the_names_and_shapes_are_those_of_deepseek_v4() -> None:
    tensors, layout = export_residual(random_parameters(DSV4), DSV4, LAYERS)
    n, shapes = 3, {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert layout == "deepseek-v4"
    assert len(shapes) == 6 * LAYERS + 3
    assert shapes["layers.2.hc_attn_fn"] == shapes["layers.0.hc_ffn_fn"] == (15, n * HIDDEN)
    assert (shapes["layers.1.hc_ffn_base"], shapes["layers.1.hc_attn_scale"]) == ((15,), (3,))
    heads = [shapes[f"hc_head_{name}"] for name in ("fn", "base", "scale")]
    assert heads == [(n, n * HIDDEN), (n,), (1,)]
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_the_names_and_shapes_are_those_of_kimi_k3() -> None:
    parameters = random_parameters(BLOCKS)
    tensors, layout = export_residual(parameters, BLOCKS, LAYERS)
    prefix = "language_model.model."
    assert (layout, len(tensors)) == ("kimi-k3", 4 * LAYERS + 2)
    query = tensors[f"{prefix}layers.2.self_attention_res_proj.weight"]
    assert torch.equal(query[0], parameters["decoder.layers.2.self_attention_residual.query"])
    assert query.shape == (1, HIDDEN)
    gain = tensors[f"{prefix}layers.0.mlp_res_norm.weight"]
    assert torch.equal(gain, parameters["decoder.layers.0.mlp_residual.key_gain"])
    output = tensors[f"{prefix}output_attn_res_proj.weight"]
    assert torch.equal(output[0], parameters["decoder.residual_head.query"])


def coefficients(tensors: dict[str, Tensor], streams: Tensor, eps: float) -> StreamCoefficients:
    """What DeepSeek-V4's convention makes of the exported first sublayer."""
    fn, base, scale = (tensors[f"layers.0.hc_attn_{name}"] for name in ("fn", "base", "scale"))
    return mhc_coefficients(streams, MhcWeights(fn, base, scale), MhcOptions("dsv4", 20, eps))


@pytest.mark.parametrize("config", [DSV4, PAPER], ids=str)
def test_the_public_parameters_are_the_same_function_in_deepseeks_convention(
    config: ResidualConfig,
) -> None:
    # parameters of the paper's convention, read without the change of rows, are another function
    parameters = random_parameters(config)
    name = "decoder.layers.0.self_attention_residual."
    streams = torch.randn(5, 3, HIDDEN, generator=torch.Generator().manual_seed(3))
    weights = MhcWeights(
        parameters[name + "mapping_weight"],
        parameters[name + "bias"],
        torch.cat([parameters[f"{name}alpha_{part}"] for part in ("pre", "post", "res")]),
    )
    options = MhcOptions(config.mhc_convention, 20, config.resolved_mhc_eps)
    ours = mhc_coefficients(streams, weights, options)
    tensors, _ = export_residual(parameters, config, LAYERS)
    public = coefficients(tensors, streams, config.resolved_mhc_eps)
    for mine, theirs in zip(ours, public, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=5e-6)
    assert (ours.h_res - ours.h_res.transpose(-1, -2)).abs().max() > 0.01


def test_the_mean_becomes_a_head_that_weighs_all_streams_equally() -> None:
    tensors, _ = export_residual(random_parameters(PAPER), PAPER, LAYERS)
    head = [tensors[f"hc_head_{name}"] for name in ("fn", "base", "scale")]
    weights = mhc_head_weights(torch.randn(4, 3, HIDDEN), *head, eps=1e-20)
    torch.testing.assert_close(weights, torch.full((4, 3), 1 / 3))


@needs_safetensors
def test_another_convention_is_refused_unless_asked_for_and_eps_are_equal(path: Path) -> None:
    write_residual(path, random_parameters(PAPER), PAPER, LAYERS)
    target = ResidualConfig("mhc", streams=3, mhc_convention="dsv4", mhc_eps=1e-20)
    with pytest.raises(ValueError, match="mhc_convention: saved 'paper', given 'dsv4'"):
        read(path, target)
    with pytest.raises(ValueError, match="mhc_eps: saved 1e-20, given 1e-06"):
        read(path, DSV4, convert_convention=True)
    converted = read(path, target, convert_convention=True)
    written = tensor_file.read_tensors(path)
    key = "decoder.layers.1.mlp_residual.mapping_weight"
    assert torch.equal(converted[key], written["layers.1.hc_ffn_fn"])
    again = path.with_name("again.safetensors")
    write_residual(again, converted, target, LAYERS)
    assert_same(read(again, PAPER, convert_convention=True), random_parameters(PAPER))


@needs_safetensors
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_released_file_is_read_beside_other_tensors_with_either_names(
    tmp_path: Path, prefix: str
) -> None:
    parameters = random_parameters(DSV4)
    tensors, _ = export_residual(parameters, DSV4, LAYERS)
    if prefix:  # the names of transformers' module
        tensors = {
            prefix
            + name.replace("hc_head_", "hc_head.hc_")
            .replace("hc_attn_", "attn_hc.")
            .replace("hc_ffn_", "ffn_hc."): tensor
            for name, tensor in tensors.items()
        }
    tensors["model.embed_tokens.weight"] = torch.zeros(2, 2)
    names = sorted(tensors)
    for part, some in enumerate((names[:7], names[7:])):
        shard = {name: tensors[name] for name in some}
        tensor_file.write_tensors(tmp_path / f"model-{part}.safetensors", shard, {})
    assert_same(read(tmp_path, DSV4), parameters)
    public = {"hc_mult": 3, "hc_sinkhorn_iters": 20, "hc_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(public))
    with pytest.raises(ValueError, match="mhc_eps: saved 1e-05, given 1e-06"):
        read(tmp_path, DSV4)
    with pytest.raises(ValueError, match="mhc_convention: saved 'dsv4', given 'paper'"):
        read(tmp_path, ResidualConfig("mhc", streams=3, contraction="learned", mhc_eps=1e-5))


@needs_safetensors
def test_a_released_kimi_file_is_read_without_its_prefix_and_its_block_length_is_compared(
    tmp_path: Path,
) -> None:
    parameters = random_parameters(BLOCKS)
    tensors, _ = export_residual(parameters, BLOCKS, LAYERS)
    bare = {name.removeprefix("language_model."): t.bfloat16() for name, t in tensors.items()}
    tensor_file.write_tensors(tmp_path / "model.safetensors", bare, {})
    config = {"text_config": {"attn_res_block_size": 2, "rms_norm_eps": 1e-6}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read(tmp_path / "model.safetensors", BLOCKS)
    assert_same(found, {key: tensor.bfloat16().float() for key, tensor in parameters.items()})
    longer = ResidualConfig("block_attnres", block_layers=3)
    with pytest.raises(ValueError, match="block_sublayers: saved 4, given 6"):
        read(tmp_path, longer)
    assert_same(read(tmp_path, longer, convert_block_length=True), found)


def released(folder: Path, config: ResidualConfig, public: object) -> dict[str, Tensor]:
    """A released folder: parameters of a model, and its config.json."""
    folder.mkdir()
    parameters = random_parameters(config)
    tensors, _ = export_residual(parameters, config, LAYERS)
    tensor_file.write_tensors(folder / "model.safetensors", tensors, {})
    (folder / "config.json").write_text(json.dumps(public))
    return parameters


@needs_safetensors
def test_null_in_a_released_configuration_says_nothing(tmp_path: Path) -> None:
    # null for an object or a number ended in a TypeError
    for number, public in enumerate(
        (
            {"text_config": None, "attn_res_block_size": None, "rms_norm_eps": None},
            {"attn_res_block_size": 2, "text_config": {"attn_res_block_size": None}},
            {"model_type": None},
        )
    ):
        parameters = released(tmp_path / str(number), BLOCKS, public)
        assert_same(read(tmp_path / str(number), BLOCKS), parameters)


@needs_safetensors
@pytest.mark.parametrize(
    ("public", "words"),
    [
        ([], r"config\.json holds a JSON list"),
        ({"text_config": [1]}, r"config\.json: text_config is \[1\]"),
        ({"attn_res_block_size": "2"}, "attn_res_block_size is '2'; it must be a whole number"),
        ({"attn_res_block_size": 2.0}, "attn_res_block_size is 2.0"),
        ({"attn_res_block_size": 0}, "attn_res_block_size is 0"),
        ({"rms_norm_eps": {"a": 1}}, "rms_norm_eps is {'a': 1}; it must be a number above 0"),
        ({"model_type": ["kimi_k3"]}, r"model_type is \['kimi_k3'\]"),
        ({"text_config": {"model_type": "kimi_k4"}}, "model_type is 'kimi_k4'"),
    ],
)
def test_a_released_configuration_may_hold_anything(
    public: object, words: str, tmp_path: Path
) -> None:
    released(tmp_path / "model", BLOCKS, public)
    with pytest.raises(ValueError, match=words) as raised:
        read(tmp_path / "model", BLOCKS)
    assert str(tmp_path / "model" / "config.json") in str(raised.value)


@needs_safetensors
def test_what_a_released_model_does_not_say_is_listed(tmp_path: Path) -> None:
    # the length of blocks was taken from the flags without a word
    public = {"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear"}}
    released(tmp_path / "model", BLOCKS, public)
    unsaid = taken_from_flags(tmp_path / "model", BLOCKS, LAYERS)
    assert unsaid == ["attnres_eps 1e-06", "block_sublayers 4"]
    (tmp_path / "model" / "config.json").unlink()
    unsaid = taken_from_flags(tmp_path / "model", BLOCKS, LAYERS)
    assert unsaid == ["model_type kimi_k3", "attnres_eps 1e-06", "block_sublayers 4"]
    write_residual(tmp_path / "ours.safetensors", random_parameters(BLOCKS), BLOCKS, LAYERS)
    assert taken_from_flags(tmp_path / "ours.safetensors", BLOCKS, LAYERS) == []


@needs_safetensors
def test_blocks_that_are_longer_than_the_model_are_as_long_as_it(tmp_path: Path) -> None:
    whole = ResidualConfig("block_attnres", block_layers=LAYERS + 1)
    parameters = released(tmp_path / "model", whole, {"attn_res_block_size": LAYERS + 5})
    assert_same(read(tmp_path / "model", whole), parameters)


@needs_safetensors
def test_both_eps_of_deepseek_are_compared_with_the_one_that_stands_for_them(
    tmp_path: Path,
) -> None:
    # rms_norm_eps, which the norm in front of the coefficients has, was passed over
    public = {"model_type": "deepseek_v4", "hc_mult": 3, "hc_sinkhorn_iters": 20}
    released(tmp_path / "norm", DSV4, {**public, "rms_norm_eps": 1e-5})
    with pytest.raises(ValueError, match="mhc_eps: saved 1e-05, given 1e-06"):
        read(tmp_path / "norm", DSV4)
    released(tmp_path / "two", DSV4, {**public, "hc_eps": 1e-6, "rms_norm_eps": 1e-5})
    with pytest.raises(ValueError, match="hc_eps is 1e-06 and rms_norm_eps 1e-05; mhc_eps stands"):
        read(tmp_path / "two", DSV4)
    parameters = released(tmp_path / "same", DSV4, {**public, "hc_eps": 1e-6, "rms_norm_eps": 1e-6})
    assert_same(read(tmp_path / "same", DSV4), parameters)
    assert taken_from_flags(tmp_path / "same", DSV4, LAYERS) == []


@needs_safetensors
def test_a_model_of_another_type_is_never_taken_for_the_one_whose_names_it_has(
    tmp_path: Path,
) -> None:
    # V4.1 reads with the weights of the sublayer before: the same names, another model
    text = {"model_type": "deepseek_v4", "hc_mult": 3}
    released(tmp_path / "v41", DSV4, {"model_type": "deepseek_v41", "text_config": text})
    with pytest.raises(ValueError, match="model_type is 'deepseek_v41'.*known is deepseek_v4"):
        read(tmp_path / "v41", DSV4)


@needs_safetensors
def test_by_its_head_a_file_is_told_from_one_of_the_same_names(path: Path) -> None:
    """With nothing beside it that says which model it is of."""
    for mine, other, said in ((DSV4, V41, "has an hc_head"), (V41, DSV4, "has no hc_head")):
        tensors, _ = export_residual(random_parameters(mine), mine, LAYERS)
        path.unlink(missing_ok=True)
        tensor_file.write_tensors(path, tensors, {})
        assert_same(read(path, mine), random_parameters(mine))
        with pytest.raises(ValueError, match=said):
            read(path, other)


def test_the_names_and_shapes_are_those_of_hy4() -> None:
    tensors, layout = export_residual(random_parameters(IHC), IHC, LAYERS)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert (layout, len(shapes)) == ("hy4", 6 * LAYERS + 3)
    assert shapes["model.layers.2.hc_mlp_layer.hc_pre.hc_fn"] == (6, 3 * HIDDEN)
    assert shapes["model.layers.0.hc_attn_layer.hc_pre.hc_scale"] == (2,)
    assert shapes["model.hc_head.hc_head_base"] == (3,)


@needs_safetensors
def test_a_released_hy4_is_read_with_its_two_eps_and_refused_with_another_magnitude(
    tmp_path: Path,
) -> None:
    public = {"model_type": "hy_v4", "hc_mult": 3, "hc_eps": 1e-6, "rms_norm_eps": 1e-5}
    parameters = released(tmp_path / "same", IHC, {**public, "hc_magnitude": 2.0})
    assert_same(read(tmp_path / "same", IHC), parameters)
    released(tmp_path / "other", IHC, {**public, "hc_magnitude": 1.0})
    with pytest.raises(ValueError, match="hc_magnitude is 1.0; here there is only 2.0"):
        read(tmp_path / "other", IHC)


@needs_safetensors
def test_files_that_do_not_fit_the_model_are_refused_with_every_fault(path: Path) -> None:
    write_residual(path, random_parameters(DSV4), DSV4, LAYERS)
    for layers, hidden, words in (
        (LAYERS + 1, HIDDEN, r"layers\.3\.hc_attn_fn is missing"),
        (LAYERS - 1, HIDDEN, "is not of this model"),
        (LAYERS, HIDDEN + 1, r"has shape \[15, 18\]; this model's is \[15, 21\]"),
    ):
        with pytest.raises(ValueError, match=words):
            read_residual(path, DSV4, layers, hidden)
    with pytest.raises(ValueError, match="streams: saved 3, given 2"):
        read(path, ResidualConfig("mhc", streams=2, mhc_convention="dsv4"))
    with pytest.raises(ValueError, match="holds no kimi-k3 parameters.*names are deepseek-v4's"):
        read(path, BLOCKS)
    with pytest.raises(ValueError, match="the file has a learned head.*contraction learned"):
        read(path, ResidualConfig("mhc", streams=3, mhc_convention="dsv4", contraction="mean"))
    with pytest.raises(ValueError, match="neither a .safetensors file nor a folder"):
        read(path.parent / "nothing.safetensors", DSV4)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ResidualConfig("hc"), "public names exist for mhc"),
        (ResidualConfig("mhc", contraction="sum"), "contraction is sum"),
        (ResidualConfig("mhc", streams=1), "one stream"),
        (ResidualConfig("attnres"), r"blocks of 1 sublayer\(s\) cannot be said"),
        (ResidualConfig("block_attnres", block_sublayers=3), "blocks of 3 sublayer"),
    ],
    ids=str,
)
def test_what_has_no_public_form_is_refused(config: ResidualConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        export_residual(random_parameters(config), config, LAYERS)


@pytest.mark.parametrize(
    "config",
    [*CONFIGS, ResidualConfig("attnres"), ResidualConfig("hc", hc_norm="rmsnorm")],
    ids=str,
)
def test_a_settings_record_gives_back_a_configuration_of_the_same_settings(
    config: ResidualConfig,
) -> None:
    record = settings_of(config, LAYERS)
    assert settings_of(config_of(record), LAYERS) == record


def test_without_safetensors_the_error_says_what_to_install(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    assert not tensor_file.is_available()
    with pytest.raises(RuntimeError, match=r"pip install 'megatron-residuals\[interchange\]'"):
        write_residual(path, random_parameters(DSV4), DSV4, LAYERS)
