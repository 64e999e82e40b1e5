# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The parameters that a residual starts training with, by the keys of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.interchange.names import (
    ModelShape,
    head_key,
    is_residual_key,
    sublayer_key,
)
from megatron_residuals.modules import build_head, build_sublayer_residual
from megatron_residuals.pipeline.layout import gpt_sublayers


def initial_parameters(
    config: ResidualConfig, num_layers: int, hidden_size: int
) -> dict[str, Tensor]:
    """What the modules of a new model hold: ``{decoder.layers.0.…: float32 tensor}``.

    Built from the modules themselves, so there is no second place where an initial value stands.
    """
    depth = config.depth_map(num_layers)
    parameters = {}
    for sublayer in gpt_sublayers(num_layers):
        module = build_sublayer_residual(config, depth, hidden_size=hidden_size, sublayer=sublayer)
        for name, parameter in module.named_parameters():
            parameters[sublayer_key(sublayer, name)] = parameter.detach()
    head = build_head(config, depth, hidden_size=hidden_size)
    for name, parameter in head.named_parameters():
        parameters[head_key(name)] = parameter.detach()
    return parameters


def shaped_for(parameters: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Parameters by layer -> the keys of a checkpoint of that shape, stacked where it stacks."""
    if not shape.stacked:
        return {shape.prefix + key: tensor for key, tensor in parameters.items()}
    result: dict[str, list[Tensor]] = {}
    for key, tensor in parameters.items():  # layers come in order
        result.setdefault(shape.prefix + _without_layer(key), []).append(tensor)
    head = shape.prefix + head_key("")
    return {
        key: tensors[0] if key.startswith(head) else torch.stack(tensors)
        for key, tensors in result.items()
    }


def by_layer(stored: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Inverse of ``shaped_for``: the residual's parameters among the tensors of a checkpoint."""
    parameters = {}
    for key, tensor in stored.items():
        if not is_residual_key(key):
            continue
        key = key.removeprefix(shape.prefix)
        if shape.stacked and not key.startswith(head_key("")):
            start = "decoder.layers."
            for layer, one in enumerate(tensor):
                parameters[f"{start}{layer}.{key.removeprefix(start)}"] = one
        else:
            parameters[key] = tensor
    return parameters


def _without_layer(key: str) -> str:
    words = key.split(".")
    return ".".join(word for word in words if not word.isdecimal())
