# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which tensors of the exported model a tensor of the host's becomes.

A checkpoint may stack layers along a first axis. A ``Part`` is what belongs to one layer; it is
split into tensors of public names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_residuals.interchange.names import ModelShape
from megatron_residuals.text import first_few, raise_faults

Config = Mapping[str, Any]

TOP = {
    "embedding.word_embeddings.": "model.embed_tokens.",
    "embedding.position_embeddings.": "model.embed_positions.",
    "decoder.residual_head.": "model.residual_head.",
    "decoder.final_layernorm.": "model.norm.",
    "output_layer.": "lm_head.",
}
# Of a layer; norms are fused into the linear behind them, or stand alone.
LAYER = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "input_layernorm.": "input_layernorm.",
    "self_attention.linear_qkv.": "self_attn.{q_proj,k_proj,v_proj}.",
    "self_attention.q_layernorm.": "self_attn.q_norm.",
    "self_attention.k_layernorm.": "self_attn.k_norm.",
    "self_attention.linear_proj.": "self_attn.o_proj.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
    "self_attention_residual.": "attn_residual.",
    "mlp_residual.": "mlp_residual.",
}
_FC = re.compile(r"mlp\.linear_fc(?P<which>[12])\.")
_DECODER = "decoder.layers."


class Part(NamedTuple):
    """A tensor of one layer, or of none.

    Attributes:
        key: its name in the checkpoint.
        place: where in the first axes of what has that name.
        size: its shape.
        names: of the exported tensors.
    """

    key: str
    place: tuple[int, ...]
    size: tuple[int, ...]
    names: tuple[str, ...]


def parts_of(
    shapes: Mapping[str, Sequence[int]], shape: ModelShape, config: Config, source: object
) -> list[Part]:
    """Everything in a checkpoint, in the order of the model.

    Raises:
        ValueError: it has tensors that the exported model has not; names them.
    """
    parts, unknown = [], []
    for key, size in shapes.items():
        if math.prod(size) == 0:  # what the host keeps for extra states
            continue
        for layer, rest, index in _places(key.removeprefix(shape.prefix), shape.num_layers):
            names = _names(layer, rest, config)
            if names is None:
                unknown.append(f"{key} {list(size)} has no place in the exported model.")
                break
            parts.append((_order(layer, rest), Part(key, index, tuple(size[len(index) :]), names)))
    raise_faults(f"{source} cannot be exported", first_few(unknown))
    return [part for _, part in sorted(parts, key=lambda item: item[0])]


def _places(key: str, num_layers: int) -> Iterator[tuple[int | None, str, tuple[int, ...]]]:
    """Layer, name within it, and index, for everything under one key."""
    if not key.startswith(_DECODER):
        yield None, key, ()
        return
    first, _, rest = key.removeprefix(_DECODER).partition(".")
    if first.isdecimal():
        yield int(first), rest, ()
        return
    for layer in range(num_layers):
        yield layer, f"{first}.{rest}", (layer,)


def _order(layer: int | None, name: str) -> tuple[int, int, str]:
    if layer is not None:
        return 1, layer, name
    return (0 if name.startswith("embedding.") else 2), 0, name


def _names(layer: int | None, name: str, config: Config) -> tuple[str, ...] | None:
    """Public names of one tensor of the host's; None if there are none."""
    table = TOP if layer is None else LAYER
    public = next((name.replace(k, v, 1) for k, v in table.items() if name.startswith(k)), None)
    if public is None and layer is not None and (match := _FC.match(name)):
        public = _linear(match, name[match.end() :], bool(config["gated"]))
    if public is None or (public.startswith("lm_head.") and config["tie_word_embeddings"]):
        return None
    return _spelled(public if layer is None else f"model.layers.{layer}.{public}")


def _linear(match: re.Match[str], name: str, gated: bool) -> str:
    if match["which"] == "2":
        return f"mlp.down_proj.{name}"
    if name.endswith(("_w", "_v")):  # saved apart
        return f"mlp.{'gate' if name.endswith('_w') else 'up'}_proj.{name[:-2]}"
    return f"mlp.{'{gate_proj,up_proj}' if gated else 'up_proj'}.{name}"


def _spelled(pattern: str) -> tuple[str, ...]:
    """`a.{b,c}.d` -> a.b.d, a.c.d."""
    if "{" not in pattern:
        return (pattern,)
    before, choices, after = re.split(r"[{}]", pattern)
    return tuple(before + choice + after for choice in choices.split(","))


def _heads(part: Part, config: Config) -> tuple[int, tuple[int, ...]]:
    """Groups, and rows of each group that go to each name: queries, one key, one value."""
    groups, dim = config["num_key_value_heads"], config["head_dim"]
    return groups, (config["num_attention_heads"] // groups * dim, dim, dim)


def split(part: Part, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    """A tensor of the host's [rows, ...] -> the exported ones, by name."""
    if len(part.names) == 3:
        groups, rows = _heads(part, config)
        pieces = tensor.unflatten(0, (groups, sum(rows))).split(rows, dim=1)
        pieces = tuple(piece.flatten(0, 1) for piece in pieces)
    else:
        pieces = tensor.chunk(len(part.names))
    return dict(zip(part.names, pieces, strict=True))


def join(part: Part, pieces: Mapping[str, Tensor], config: Config) -> Tensor:
    """Inverse of ``split``."""
    found = [pieces[name] for name in part.names]
    if len(found) == 3:
        groups, rows = _heads(part, config)
        parts = zip(found, rows, strict=True)
        return torch.cat([t.unflatten(0, (groups, n)) for t, n in parts], dim=1).flatten(0, 1)
    return torch.cat(found)
