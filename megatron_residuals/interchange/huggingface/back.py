# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Reading an exported folder back, as the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_residuals.interchange import tensor_file
from megatron_residuals.interchange.huggingface.folder import read_config
from megatron_residuals.interchange.huggingface.tensors import Part, join, split
from megatron_residuals.interchange.names import shape_faults
from megatron_residuals.text import raise_faults

OF_TYING = "lm_head.weight"
"""May be written beside the embedding that it is."""


def refuse_other(folder: Path, parts: Sequence[Part], config: Mapping[str, Any]) -> None:
    """A folder is of the model that these parts are of.

    Args:
        config: of ``ResidualGPTConfig``, for the checkpoint.

    Raises:
        ValueError: its configuration or its tensors are of another one; names what differs.
    """
    found = read_config(folder)
    faults = [
        f"{name} is {found.get(name)!r}; the checkpoint's is {value!r}."
        for name, value in config.items()
        if found.get(name) != value
    ]
    raise_faults(f"{folder} is another model", faults)
    wanted = {
        name: tensor.shape
        for part in parts
        for name, tensor in split(part, torch.empty(part.size, device="meta"), config).items()
    }
    shapes = tensor_file.read_shapes(folder)
    if config["tie_word_embeddings"]:
        shapes.pop(OF_TYING, None)
    raise_faults(str(folder), shape_faults(shapes, wanted))


def read_back(folder: Path, parts: Sequence[Part], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its key, stacked where the checkpoint stacks layers."""
    stored = tensor_file.read_tensors(folder)
    layers: dict[str, dict[tuple[int, ...], Tensor]] = {}
    for part in parts:
        layers.setdefault(part.key, {})[part.place] = join(part, stored, config)
    return {key: _stacked(places) for key, places in layers.items()}


def _stacked(places: Mapping[tuple[int, ...], Tensor]) -> Tensor:
    if () in places:
        return places[()]
    return torch.stack([places[place] for place in sorted(places)])
