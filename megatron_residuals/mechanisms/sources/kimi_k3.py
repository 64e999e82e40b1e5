# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""AttnRes parameters under the names and in the shapes of Kimi-K3.

    language_model.model.layers.<l>.self_attention_res_proj.weight, mlp_res_proj.weight   [1, d]
    language_model.model.layers.<l>.self_attention_res_norm.weight, mlp_res_norm.weight   [d]
    language_model.model.output_attn_res_proj.weight, output_attn_res_norm.weight

proj is the query and norm the gain of the keys. Kimi-K3 counts blocks in whole layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.interchange.names import head_key, shape_faults, sublayer_key
from megatron_residuals.pipeline.layout import GPT_LAYER, gpt_place, gpt_sublayers
from megatron_residuals.settings import BLOCK_LENGTH, Setting
from megatron_residuals.text import raise_faults

NAME = "kimi-k3"
MODEL_TYPES = ("kimi_k3", "kimi_linear")  # the whole model, and its language model alone
SAID: dict[str, Setting] = {"attnres_heads": 1, "attnres_additive": False}  # by the names alone
SETTINGS = {
    "attn_res_block_size": (BLOCK_LENGTH, len(GPT_LAYER)),
    "rms_norm_eps": ("attnres_eps", 1.0),
}
FIXED: dict[str, float] = {}
PREFIX = "language_model.model."
SUBLAYERS = ("self_attention", "mlp")
_LAYER = re.compile(
    r"^(?:language_model\.)?(?:model\.)?layers\.(\d+)\.(self_attention|mlp)_res_(proj|norm)\.weight$"
)
_OUTPUT = re.compile(r"^(?:language_model\.)?(?:model\.)?output_attn_res_(proj|norm)\.weight$")


def block_layers(config: ResidualConfig, num_layers: int) -> int:
    """``attn_res_block_size`` of Kimi-K3's configuration: the block length in layers.

    Raises:
        ValueError: the mechanism is not AttnRes, its reads are not Kimi-K3's, or its blocks are no
            whole layers.
    """
    depth = config.depth_map(num_layers)
    if depth is None:
        raise ValueError(f"{NAME}: the mechanism is {config.mechanism!r}; the names are AttnRes'.")
    if not config.single_softmax:
        raise ValueError(
            f"{NAME}: reads with {config.attnres_heads} head(s), additive "
            f"{config.attnres_additive}, have no form there; Kimi-K3 has one head and adds nothing"
        )
    sublayers = min(depth.block_sublayers, depth.num_sublayers)
    layers, rest = gpt_place(sublayers)
    if rest:
        raise ValueError(
            f"{NAME}: blocks of {sublayers} sublayer(s) cannot be said in Kimi-K3's configuration, "
            "which counts whole layers (2 sublayers each)"
        )
    return layers


def public_config(config: ResidualConfig, num_layers: int) -> dict[str, Setting]:
    """The options under the names of Kimi-K3's configuration."""
    return {
        "attn_res_block_size": block_layers(config, num_layers),
        "rms_norm_eps": config.attnres_eps,
    }


def export_parameters(
    parameters: Mapping[str, Tensor], config: ResidualConfig, num_layers: int
) -> dict[str, Tensor]:
    """The parameters of a Block AttnRes model under Kimi-K3's names, float32.

    Raises:
        ValueError: the mechanism is not AttnRes, or its blocks are no whole layers.
    """
    block_layers(config, num_layers)
    tensors = {}
    for sublayer in gpt_sublayers(num_layers):
        layer, position = gpt_place(sublayer)
        start = f"{PREFIX}layers.{layer}.{SUBLAYERS[position]}_res_"
        query = parameters[sublayer_key(sublayer, "query")]
        tensors[start + "proj.weight"] = query.float().unsqueeze(0)
        tensors[start + "norm.weight"] = parameters[sublayer_key(sublayer, "key_gain")].float()
    start = f"{PREFIX}output_attn_res_"
    tensors[start + "proj.weight"] = parameters[head_key("query")].float().unsqueeze(0)
    tensors[start + "norm.weight"] = parameters[head_key("key_gain")].float()
    return tensors


def matches(name: str) -> bool:
    """Whether a name in a file is one of the parameters here."""
    return _LAYER.match(name) is not None or _OUTPUT.match(name) is not None


def import_parameters(
    tensors: Mapping[str, Tensor], config: ResidualConfig, num_layers: int, hidden_size: int
) -> dict[str, Tensor]:
    """Inverse of ``export_parameters``; prefixes may be missing, other names are passed over.

    Raises:
        ValueError: parameters are missing or of another shape (all faults at once), or the
            mechanism is not AttnRes with blocks of whole layers.
    """
    block_layers(config, num_layers)
    found = {_key(name): tensor.float() for name, tensor in tensors.items() if matches(name)}
    starts = [sublayer_key(i, "") for i in gpt_sublayers(num_layers)] + [head_key("")]
    wanted: dict[str, tuple[int, ...]] = {}
    for start in starts:
        wanted |= {start + "query": (1, hidden_size), start + "key_gain": (hidden_size,)}
    there = {name: tensor.shape for name, tensor in found.items()}
    raise_faults(NAME, shape_faults(there, wanted))
    return {key: found[key].squeeze(0) if key.endswith("query") else found[key] for key in wanted}


def _key(name: str) -> str:
    """Our key of a name that matches."""
    ours = {"proj": "query", "norm": "key_gain"}
    if (match := _LAYER.match(name)) is not None:
        sublayer = len(SUBLAYERS) * int(match[1]) + SUBLAYERS.index(match[2])
        return sublayer_key(sublayer, ours[match[3]])
    return head_key(ours[name.rsplit("_", 1)[-1].partition(".")[0]])
