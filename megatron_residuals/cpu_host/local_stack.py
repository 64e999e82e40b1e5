# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The layers of the host's `hybrid_stack_spec` without Transformer Engine.

Every release has this spec with Transformer Engine's classes only. Here are the same layers of the
host, its own linear layers and torch's norms in them: `M G * + - E`, as far as a release has them,
and multi-token prediction. In checkpoints norms are called as those that are fused there.
Call `cpu_host.install()` before importing this module: it imports Megatron-Core.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_block import MambaStack
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)


def local_stack_spec() -> ModuleSpec:
    """A spec for HybridModel (MambaModel up to 0.17); norms are as the config says."""
    layers = {
        "mamba_layer": _mamba_layer(),
        "gdn_layer": _attention_layer(_gated_delta_net(), fused_into="in_proj"),
        "attention_layer": _attention_layer(_gpt_part("self_attention"), fused_into="linear_qkv"),
        "mla_layer": _attention_layer(_gpt_part("self_attention", multi_latent_attention=True)),
        "mlp_layer": _mlp_layer(MLPLayer, fused_into="linear_fc1"),
        # the spec of experts is one, whatever their number
        "moe_layer": _mlp_layer(MoETransformerLayer, num_experts=1),
        "mtp_block_spec": _prediction(getattr(mamba_stack_spec.submodules, "mtp_block_spec", None)),
    }
    submodules = getattr(sys.modules[MambaStack.__module__], f"{MambaStack.__name__}Submodules")
    known = {field.name for field in dataclasses.fields(submodules)}
    chosen = {name: layer for name, layer in layers.items() if name in known}
    return ModuleSpec(module=MambaStack, submodules=submodules(**chosen))


def _mamba_layer() -> ModuleSpec:
    linear = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=WrappedTorchNorm,
            mixer=ModuleSpec(module=MambaMixer, submodules=linear),
            mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )


def _gated_delta_net() -> ModuleSpec:
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )


def _attention_layer(attention: ModuleSpec, fused_into: str = "") -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=_keys("input_layernorm", "self_attention", fused_into),
        ),
    )


def _mlp_layer(layer: type, fused_into: str = "", **kind: int) -> ModuleSpec:
    return ModuleSpec(
        module=layer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=_gpt_part("mlp", **kind),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=_keys("pre_mlp_layernorm", "mlp", fused_into),
        ),
    )


def _gpt_part(name: str, **kind: int) -> ModuleSpec:
    return getattr(get_gpt_layer_local_spec(**kind).submodules, name)


def _keys(norm: str, module: str, fused_into: str) -> dict[str, str]:
    """Of a norm in front of a module, if the other spec fuses it into a linear layer of that."""
    return {f"{norm}.": f"{module}.{fused_into}.layer_norm_"} if fused_into else {}


def _prediction(stock: Any) -> Any:
    """The host's block of multi-token prediction, whose layers the model's pattern names."""
    if stock is None:
        return None
    (layer,) = stock.submodules.layer_specs
    norms = dict.fromkeys(("enorm", "hnorm", "layer_norm"), WrappedTorchNorm)
    local = _with(layer, eh_proj=ColumnParallelLinear, **norms)
    return _with(stock, layer_specs=[local])


def _with(spec: ModuleSpec, **submodules: Any) -> ModuleSpec:
    spec = copy.copy(spec)
    spec.submodules = dataclasses.replace(spec.submodules, **submodules)
    return spec
