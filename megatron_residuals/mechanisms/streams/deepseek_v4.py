# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""mHC parameters under the names and in the layout of DeepSeek-V4.

    layers.<l>.hc_attn_fn, hc_ffn_fn         [2n + n^2, n d]   mapping_weight
    layers.<l>.hc_attn_base, hc_ffn_base     [2n + n^2]        bias
    layers.<l>.hc_attn_scale, hc_ffn_scale   [3]               alpha_pre, alpha_post, alpha_res
    hc_head_fn [n, n d], hc_head_base [n], hc_head_scale [1]   head_weight, head_bias, head_scale

The last n^2 rows are comb[old, new], which is the layout of the ``dsv4`` convention. ``paper`` has
H_res[new, old] there: its rows change places on the way out and back, which is exact. What a model
of the other convention computes with them is the same up to eps (the paper's Sinkhorn steps are
DeepSeek's on the transposed logits, without eps).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.interchange.names import head_key, shape_faults, sublayer_key
from megatron_residuals.mechanisms.base import Setting
from megatron_residuals.pipeline.layout import gpt_place, gpt_sublayers
from megatron_residuals.text import raise_faults

NAME = "deepseek-v4"
# V4.1 has other layers under the same names: it reads with the weights of the sublayer before.
MODEL_TYPES = ("deepseek_v4",)
SAID = {"mhc_convention": "dsv4"}  # by the names alone
SETTINGS = {  # in a released configuration: our name, and how many of ours one of theirs is
    "hc_mult": ("streams", 1),
    "hc_sinkhorn_iters": ("mhc_sinkhorn_iterations", 1),
    "hc_eps": ("mhc_eps", 1.0),
    "rms_norm_eps": ("mhc_eps", 1.0),  # of the norm in front of the coefficients
}
SUBLAYERS = ("attn", "ffn")
_ALPHAS = ("alpha_pre", "alpha_post", "alpha_res")
_HEAD = {"fn": "head_weight", "base": "head_bias", "scale": "head_scale"}
# Released files, with or without a prefix, and the same under the names of transformers' module.
_PUBLISHED = re.compile(r"^(?:model\.)?layers\.(\d+)\.hc_(attn|ffn)_(fn|base|scale)$")
_MODULE = re.compile(r"^(?:model\.)?layers\.(\d+)\.(attn|ffn)_hc\.(fn|base|scale)$")
_PUBLISHED_HEAD = re.compile(r"^(?:model\.)?(?:hc_head\.hc_|hc_head_)(fn|base|scale)$")


def public_config(config: ResidualConfig, num_layers: int) -> dict[str, Setting]:
    """The options under the names of DeepSeek-V4's configuration."""
    return {
        "hc_mult": config.streams,
        "hc_sinkhorn_iters": config.mhc_sinkhorn_iterations,
        "hc_eps": config.resolved_mhc_eps,
        "rms_norm_eps": config.resolved_mhc_eps,
    }


def export_parameters(
    parameters: Mapping[str, Tensor], config: ResidualConfig, num_layers: int
) -> dict[str, Tensor]:
    """The parameters of an mHC model under DeepSeek-V4's names, float32.

    A plain mean over the streams becomes the head of equal weights, since DeepSeek-V4 always has
    one.

    Raises:
        ValueError: the mechanism is not mHC, or its contraction is no sum with sigmoid weights.
    """
    faults = []
    if config.mechanism != "mhc":
        faults.append(f"the mechanism is {config.mechanism!r}; {NAME} names are for mhc.")
    elif config.resolved_contraction == "sum":
        faults.append(
            "the contraction is sum, whose weights of one are no values of DeepSeek-V4's sigmoid "
            "head; train with --residual-contraction mean or learned."
        )
    elif config.streams == 1 and config.resolved_contraction == "mean":
        faults.append("one stream with the weight one is no value of a sigmoid head.")
    raise_faults(NAME, faults)
    tensors = {}
    for sublayer in gpt_sublayers(num_layers):
        layer, position = gpt_place(sublayer)
        for name, tensor in _sublayer(parameters, sublayer, config).items():
            tensors[f"layers.{layer}.hc_{SUBLAYERS[position]}_{name}"] = tensor
    for name, tensor in _head(parameters, config).items():
        tensors[f"hc_head_{name}"] = tensor
    return tensors


def _sublayer(
    parameters: Mapping[str, Tensor], sublayer: int, config: ResidualConfig
) -> dict[str, Tensor]:
    def get(name: str) -> Tensor:
        return parameters[sublayer_key(sublayer, name)].float()

    return {
        "fn": _turned(get("mapping_weight"), config),
        "base": _turned(get("bias"), config),
        "scale": torch.cat([get(name) for name in _ALPHAS]),
    }


def _turned(rows: Tensor, config: ResidualConfig) -> Tensor:
    """Rows of the other layout: its own inverse, and nothing to do for ``dsv4``."""
    if config.mhc_convention == "dsv4":
        return rows
    n = config.streams
    res = rows[2 * n :].unflatten(0, (n, n)).transpose(0, 1).flatten(0, 1)
    return torch.cat([rows[: 2 * n], res])


def _head(parameters: Mapping[str, Tensor], config: ResidualConfig) -> dict[str, Tensor]:
    if config.resolved_contraction == "learned":
        return {ours: parameters[head_key(name)].float() for ours, name in _HEAD.items()}
    n = config.streams
    some = parameters[sublayer_key(0, "mapping_weight")]
    weight = 1 / n - config.resolved_mhc_eps
    return {
        "fn": torch.zeros(n, some.shape[1], device=some.device),
        "base": torch.full((n,), math.log(weight / (1 - weight)), device=some.device),
        "scale": torch.ones(1, device=some.device),
    }


def matches(name: str) -> bool:
    """Whether a name in a file is one of the parameters here."""
    return any(form.match(name) for form in (_PUBLISHED, _MODULE, _PUBLISHED_HEAD))


def import_parameters(
    tensors: Mapping[str, Tensor], config: ResidualConfig, num_layers: int, hidden_size: int
) -> dict[str, Tensor]:
    """Inverse of ``export_parameters``, for the names of released files and of transformers.

    Tensors with other names are passed over.

    Raises:
        ValueError: parameters are missing or of another shape, or the file has a head that is more
            than the mean, for a model without one; all faults at once.
    """
    n, width = config.streams, config.streams * hidden_size
    columns = 2 * n + n * n
    shapes = {"fn": (columns, width), "base": (columns,), "scale": (3,)}
    head_shapes = {"fn": (n, width), "base": (n,), "scale": (1,)}
    wanted = {
        f"layers.{layer}.hc_{part}_{name}": shape
        for layer in range(num_layers)
        for part in SUBLAYERS
        for name, shape in shapes.items()
    }
    wanted |= {f"hc_head_{name}": shape for name, shape in head_shapes.items()}
    found = _renamed(tensors)
    there = {name: tensor.shape for name, tensor in found.items()}
    raise_faults(NAME, shape_faults(there, wanted))
    parameters = dict(_imported(found, config, num_layers))
    if config.resolved_contraction == "learned":
        parameters |= {head_key(name): found[f"hc_head_{ours}"] for ours, name in _HEAD.items()}
    elif not _is_mean(found, config):
        raise ValueError(
            f"{NAME}: the file has a learned head, and the model contracts by "
            f"{config.resolved_contraction}; give --residual-contraction learned"
        )
    return parameters


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whatever names a file uses -> those of ``export_parameters``, in float32."""
    found = {}
    for name, tensor in tensors.items():
        if (match := _PUBLISHED.match(name) or _MODULE.match(name)) is not None:
            layer, part, last = match.groups()
            found[f"layers.{int(layer)}.hc_{part}_{last}"] = tensor.float()
        elif (match := _PUBLISHED_HEAD.match(name)) is not None:
            found[f"hc_head_{match[1]}"] = tensor.float()
    return found


def _imported(
    found: Mapping[str, Tensor], config: ResidualConfig, num_layers: int
) -> Iterator[tuple[str, Tensor]]:
    for sublayer in gpt_sublayers(num_layers):
        layer, position = gpt_place(sublayer)
        start = f"layers.{layer}.hc_{SUBLAYERS[position]}_"
        yield sublayer_key(sublayer, "mapping_weight"), _turned(found[start + "fn"], config)
        yield sublayer_key(sublayer, "bias"), _turned(found[start + "base"], config)
        for name, alpha in zip(_ALPHAS, found[start + "scale"].split(1), strict=True):
            yield sublayer_key(sublayer, name), alpha


def _is_mean(found: Mapping[str, Tensor], config: ResidualConfig) -> bool:
    """Whether the head of a file says no more than the mean."""
    weights = torch.sigmoid(found["hc_head_base"].double()) + config.resolved_mhc_eps
    even = torch.full_like(weights, 1 / config.streams)
    return not found["hc_head_fn"].any() and torch.allclose(weights, even, rtol=0, atol=1e-6)
