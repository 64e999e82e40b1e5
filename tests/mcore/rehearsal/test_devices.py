# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Operations in the form that a GPU gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from megatron_residuals.mcore.rehearsal import devices


def test_a_norm_keeps_its_input_and_a_number_per_token_also_where_backward_replays_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch has no fused norm on a CPU: it kept two float32 copies of every input. And replays ran
    # with the mode off.
    applied: list[torch.Size] = []
    stock = devices.FusedRMSNorm.apply

    def apply(x: torch.Tensor, weight: torch.Tensor) -> Any:
        applied.append(x.shape)
        return stock(x, weight)

    monkeypatch.setattr(devices.FusedRMSNorm, "apply", apply)
    with devices.as_on_gpu(), FakeTensorMode():
        norm = torch.nn.RMSNorm(8, dtype=torch.bfloat16)
        x = torch.empty(5, 8, dtype=torch.bfloat16, requires_grad=True)
        kept: list[tuple[int, torch.dtype]] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append((tensor.numel(), tensor.dtype)) or tensor, lambda t: t
        ):
            norm(x)
        assert sorted(kept) == [(5, torch.float32), (8, torch.bfloat16), (40, torch.bfloat16)]
        checkpoint(norm, x, use_reentrant=False).sum().backward()
        assert len(applied) == 3 and x.grad is not None and x.grad.shape == (5, 8)
