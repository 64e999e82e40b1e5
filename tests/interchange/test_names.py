# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What the keys of a checkpoint say about its model and its residual."""

from __future__ import annotations

import pytest
import torch

from megatron_residuals.config import ResidualConfig
from megatron_residuals.interchange import by_layer, initial_parameters, shaped_for
from megatron_residuals.interchange.names import ModelShape, is_residual_key, missing_keys
from tests.interchange.cases import HIDDEN, LAYERS, assert_same, dense_shapes, random_parameters

CONFIGS = [
    ResidualConfig("hc", streams=2),
    ResidualConfig("mhc", streams=3, mhc_convention="dsv4"),
    ResidualConfig("block_attnres"),
]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_shape_of_a_model_is_read_from_its_keys(stacked: bool, prefix: str) -> None:
    shapes = {prefix + key: shape for key, shape in dense_shapes(stacked=stacked).items()}
    # models with experts have several optimizers, which the host numbers: these were taken for a
    # model of their own, with another prefix
    for optimizer in ("optimizer", "chained_1.optimizer"):
        shapes[f"{optimizer}.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"] = (99, 2)
    assert ModelShape.of(shapes) == ModelShape(LAYERS, HIDDEN, stacked, prefix)


def test_the_hidden_size_comes_from_the_embedding_where_the_final_norm_is_elsewhere() -> None:
    shapes = dense_shapes(stacked=True)
    del shapes["decoder.final_layernorm.weight"]
    assert ModelShape.of(shapes).hidden_size == HIDDEN
    del shapes["embedding.word_embeddings.weight"]
    with pytest.raises(ValueError, match="no hidden size, for lack of .*; give --hidden-size"):
        ModelShape.of(shapes)
    assert ModelShape.of(shapes, hidden_size=7).hidden_size == 7


def test_keys_that_do_not_tell_one_model_are_refused_with_the_reason() -> None:
    shapes = dense_shapes(stacked=False)
    with pytest.raises(ValueError, match="no key of the form decoder.layers"):
        ModelShape.of({"transformer.h.0.weight": (2, 2)})
    without = {key: shape for key, shape in shapes.items() if ".1." not in key}
    with pytest.raises(ValueError, match=r"layers \[1\] have no keys; this is one pipeline stage"):
        ModelShape.of(without)
    with pytest.raises(ValueError, match="some keys hold one layer each and others all layers"):
        ModelShape.of({**shapes, **dense_shapes(stacked=True)})
    with pytest.raises(ValueError, match="several prefixes"):
        ModelShape.of({**shapes, "teacher.decoder.layers.0.weight": (2, 2)})
    uneven = {**dense_shapes(stacked=True), "decoder.layers.bias": (LAYERS + 1, 2)}
    with pytest.raises(ValueError, match=r"stacked keys of \[3, 4\] layers; give --num-layers"):
        ModelShape.of(uneven)


def test_keys_of_residuals_are_told_from_all_others() -> None:
    assert is_residual_key("decoder.layers.3.mlp_residual.query")
    assert is_residual_key("module.decoder.residual_head.head_bias")
    for other in (
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.residual_settings._extra_state/shard_0_1",
        "optimizer.state.exp_avg.decoder.layers.mlp_residual.query",
        "chained_0.optimizer.state.exp_avg.decoder.layers.mlp_residual.query",
        "decoder.layers.0.my_mlp_residual.weight",
    ):
        assert not is_residual_key(other), other


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("stacked", [False, True])
def test_stacking_all_layers_and_taking_them_apart_gives_the_same(
    config: ResidualConfig, stacked: bool
) -> None:
    shape = ModelShape(LAYERS, HIDDEN, stacked, "module.")
    parameters = random_parameters(config)
    stored = shaped_for(parameters, shape)
    if stacked:
        (key,) = [key for key in stored if key.endswith("mlp_residual.query")] or [None]
        assert len(stored) < len(parameters)
        assert key is None or stored[key].shape == (LAYERS, HIDDEN)
    assert all(key.startswith("module.decoder.") for key in stored)
    assert_same(
        by_layer({**stored, "decoder.layers.0.mlp.weight": torch.ones(1)}, shape), parameters
    )


def test_a_hybrid_model_is_not_taken_for_a_gpt_with_as_many_layers() -> None:
    keys = {"decoder.layers.0.mixer.in_proj.weight": (8, 4), "decoder.final_norm.weight": (4,)}
    with pytest.raises(ValueError, match="final_norm is of a hybrid model, and only GPTs are conv"):
        ModelShape.of(keys, hidden_size=4)


def test_initial_parameters_are_those_of_every_layer_and_the_head() -> None:
    parameters = initial_parameters(ResidualConfig("mhc", streams=2), LAYERS, HIDDEN)
    assert len(parameters) == 2 * LAYERS * 5  # the mean has no parameters
    biases = [parameters[f"decoder.layers.{i}.mlp_residual.bias"] for i in range(LAYERS)]
    assert [bias[:2].argmax().item() for bias in biases] == [1, 1, 1]  # home stream: 2 i + 1 mod 2
    assert not parameters["decoder.layers.1.self_attention_residual.mapping_weight"].any()


def test_of_many_missing_keys_the_first_are_named_and_the_rest_counted() -> None:
    wanted = [f"k{i}" for i in range(12)]
    assert missing_keys(wanted, ["k0", "k1"]) == [*wanted[2:10], "and 2 more"]
    assert missing_keys(wanted, wanted[4:]) == wanted[:4]
