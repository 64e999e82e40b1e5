# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters of small models to convert."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.interchange import initial_parameters

LAYERS, HIDDEN = 3, 6


def random_parameters(config: ResidualConfig, seed: int = 0) -> dict[str, Tensor]:
    """What a trained model could hold: every number another one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: tensor + torch.randn(tensor.shape, generator=generator)
        for key, tensor in initial_parameters(config, LAYERS, HIDDEN).items()
    }


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same keys, dtypes and bits."""
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype, key
        assert torch.equal(actual[key], tensor), key


def dense_shapes(*, stacked: bool, layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    """Some keys of a plain model."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (11, HIDDEN),
        "decoder.final_layernorm.weight": (HIDDEN,),
        "output_layer.weight": (11, HIDDEN),
    }
    for name, shape in {
        "self_attention.linear_proj.weight": (HIDDEN, 4),
        "mlp.linear_fc2.weight": (HIDDEN, 8),
    }.items():
        if stacked:
            shapes[f"decoder.layers.{name}"] = (layers, *shape)
        else:
            shapes |= {f"decoder.layers.{layer}.{name}": shape for layer in range(layers)}
    return shapes


def dense_tensors(*, stacked: bool = False) -> dict[str, Tensor]:
    """A plain model of those keys."""
    generator = torch.Generator().manual_seed(5)
    return {
        key: torch.randn(shape, generator=generator)
        for key, shape in dense_shapes(stacked=stacked).items()
    }
