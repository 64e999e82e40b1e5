# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The layers of the host's `hybrid_stack_spec` without Transformer Engine.

Every release has this spec with Transformer Engine's classes only. Here are the same layers of the
host, its own linear layers and torch's norms in them: `M G * + - E`, as far as a release has them.
Call `cpu_host.install()` before importing this module: it imports Megatron-Core.
"""

from __future__ import annotations

import dataclasses
import sys

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
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
        "gdn_layer": _attention_layer(_gated_delta_net()),
        "attention_layer": _attention_layer(_gpt_part("self_attention")),
        "mla_layer": _attention_layer(_gpt_part("self_attention", multi_latent_attention=True)),
        "mlp_layer": _mlp_layer(MLPLayer),
        # the spec of experts is one, whatever their number
        "moe_layer": _mlp_layer(MoETransformerLayer, num_experts=1),
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
        ),
    )


def _gated_delta_net() -> ModuleSpec:
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )


def _attention_layer(attention: ModuleSpec) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
        ),
    )


def _mlp_layer(layer: type, **kind: int) -> ModuleSpec:
    return ModuleSpec(
        module=layer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=_gpt_part("mlp", **kind),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _gpt_part(name: str, **kind: int) -> ModuleSpec:
    return getattr(get_gpt_layer_local_spec(**kind).submodules, name)
