# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for Transformer Engine's layers: the structure of its specs, on a CPU.

The host's function that writes a Transformer Engine spec is the real one; the layers it names are
these. Each does in plain torch what the layer it stands for does in exact arithmetic. Nothing here
shows that Transformer Engine itself runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear


class InputKeepingLinear(ColumnParallelLinear):
    """Stands for TEColumnParallelLinear, which quantized keeps a copy of its input if not told."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.save_original_input = False


class FusedNormLinear(InputKeepingLinear):
    """Stands for TELayerNormColumnParallelLinear: the norm and the linear layer in one module."""

    def __init__(self, input_size: int, *args: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, *args, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))
        self.layer_norm_bias = torch.nn.Parameter(torch.zeros(input_size))
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            parameter.sequence_parallel = config.sequence_parallel
        self.eps = config.layernorm_epsilon

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Norm, then the linear layer."""
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        normed = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, self.eps)
        return super().forward(normed, *args, **kwargs)


class FusedProvider(LocalSpecProvider):
    """What the host's TESpecProvider answers, with the stand-ins."""

    def linear(self) -> type:
        return InputKeepingLinear

    def column_parallel_linear(self) -> type:
        return InputKeepingLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return FusedNormLinear

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> Any:
        return super().layer_norm(rms_norm, for_qk)


def install_fused_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the host's spec functions find the stand-ins where they look for Transformer Engine."""
    for module in (gpt_layer_specs, moe_module_specs):
        monkeypatch.setattr(module, "TESpecProvider", FusedProvider, raising=False)


def local_name(name: str) -> str:
    """The name of a fused model's parameter in the model whose norms are modules of their own."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
