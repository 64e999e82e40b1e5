# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""``--defer-embedding-wgrad-compute``: the last stage's output layer catches up behind the step."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers

from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import ToyGPT
from megatron_residuals.testing.toy_training import Trained, Training, train_toy

KERNEL = "fused_weight_gradient_mlp_cuda"


@pytest.fixture
def drained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Apex's kernel of that name in torch; a file that is there once a rank has caught up."""
    kernel, catch_up = ModuleType(KERNEL), schedules.drain_embedding_wgrad_compute

    def accumulate(x: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
        total.add_(gradient.t() @ x)

    def drain(*args: Any) -> None:
        (tmp_path / "drained").touch()
        catch_up(*args)

    kernel.wgrad_gemm_accum_fp32 = accumulate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, KERNEL, kernel)
    monkeypatch.setattr(layers, KERNEL, kernel, raising=False)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    monkeypatch.setattr(schedules, "drain_embedding_wgrad_compute", drain)
    return tmp_path / "drained"


def defer_at_the_output_alone(chunks: Any) -> None:
    """The host's local layers would all defer; Transformer Engine's, for which it is, do not."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, layers.ColumnParallelLinear) and name != "output_layer":
                module.config = copy.copy(module.config)
                module.config.defer_embedding_wgrad_compute = False


def trained(residual: str, **options: Any) -> Trained:
    sizes = dict(num_layers=2, hidden_size=16, num_heads=2, seq_length=6)
    toy = ToyGPT(pp=2, config_overrides=dict(gradient_accumulation_fusion=True, **options), **sizes)
    return train_toy(toy, spec_for(residual), Training(prepare=defer_at_the_output_alone))


@pytest.mark.parametrize("residual", ["mhc(streams=2)", "block_attnres(block_sublayers=3)"])
def test_deferring_the_output_layers_gradient_changes_nothing(residual: str, drained: Path) -> None:
    at_once = trained(residual)
    assert not drained.exists()
    later = trained(residual, defer_embedding_wgrad_compute=True)
    assert drained.exists()
    assert later.losses == at_once.losses
    assert at_once.grads["output_layer.weight"].any()
    for name, gradient in at_once.grads.items():
        assert torch.equal(later.grads[name], gradient), name
