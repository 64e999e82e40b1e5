# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Layers of the host's hybrid models where Transformer Engine, of which it makes them, is not."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
from typing import Any

STACK_SPECS = (
    ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
    ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"),  # up to 0.17
)

KEYS = "sharded_state_dict_keys_map"


def localise_hybrid_stacks() -> str | None:
    """What names the host's own spec, which has no other, gets local layers of the same kinds.

    Layers of sparse attention are left as they are: the host has no local ones.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE

    path, name = next(each for each in STACK_SPECS if importlib.util.find_spec(each[0]))
    spec = getattr(importlib.import_module(path), name)
    if HAVE_TE or spec is None:
        return None
    fields = {field.name for field in dataclasses.fields(spec.submodules)}
    for field, layer in _layers(spec.submodules).items():
        if field in fields:
            setattr(spec.submodules, field, layer)
    return f"{name}: local layers, Transformer Engine is not installed"


def _layers(stock: Any) -> dict[str, Any]:
    """By field of the stack's submodules: the layers of a local GPT, and mixers, one sublayer each.

    Norms stand in front of the projections into which Transformer Engine fuses them, and are called
    in checkpoints as they are there.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm as Norm

    # the kind of norm, which this function is asked for, is that of the model's configuration
    layer = get_gpt_layer_local_submodules(normalization="RMSNorm")
    latent = get_gpt_layer_local_submodules(normalization="RMSNorm", multi_latent_attention=True)
    experts = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    attention = {
        "self_attention": layer.self_attention,
        "input_layernorm": Norm,
        KEYS: {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    }
    mlp = {
        "mlp": layer.mlp,
        "pre_mlp_layernorm": Norm,
        KEYS: {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
    }
    layers = {
        "attention_layer": _replaced(stock.attention_layer, **attention),
        "mla_layer": _replaced(
            stock.attention_layer, self_attention=latent.self_attention, input_layernorm=Norm
        ),
        "mlp_layer": _replaced(stock.mlp_layer, **mlp),
        "moe_layer": _replaced(stock.moe_layer, mlp=experts, pre_mlp_layernorm=Norm),
        "mamba_layer": _mamba_layer(stock.mamba_layer, Norm),
    }
    if hasattr(stock, "gdn_layer"):
        layers["gdn_layer"] = _delta_net_layer(stock.gdn_layer, Norm)
    if getattr(stock, "mtp_block_spec", None) is not None:
        layers["mtp_block_spec"] = _prediction(stock.mtp_block_spec, Norm)
    return layers


def _replaced(spec: Any, **submodules: Any) -> Any:
    """A copy of a module's spec with other submodules."""
    spec = copy.copy(spec)
    spec.submodules = dataclasses.replace(spec.submodules, **submodules)
    return spec


def _mamba_layer(stock: Any, norm: type) -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    mixer = _replaced(
        stock.submodules.mixer, in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
    )
    keys = {"norm.": "mixer.in_proj.layer_norm_"}
    return _replaced(stock, mixer=mixer, norm=norm, **{KEYS: keys})


def _delta_net_layer(stock: Any, norm: type) -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    attention = _replaced(
        stock.submodules.self_attention,
        in_proj=ColumnParallelLinear,
        out_norm=norm,
        out_proj=RowParallelLinear,
    )
    keys = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
    return _replaced(stock, self_attention=attention, input_layernorm=norm, **{KEYS: keys})


def _prediction(stock: Any, norm: type) -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    (layer,) = stock.submodules.layer_specs
    local = _replaced(layer, enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=ColumnParallelLinear)
    return _replaced(stock, layer_specs=[local])
