# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Causal core attention by PyTorch's own kernel, for models without Transformer Engine.

Imports Megatron-Core: on a CPU call ``cpu_host.install()`` first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class TorchAttention(torch.nn.Module):
    """Core attention [s, b, heads, d] -> [s, b, heads * d], causal, without dropout."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attention of all heads at once."""
        heads = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        is_causal = len(query) == len(key)  # a token that is generated sees all before it
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=is_causal)
        return mixed.permute(2, 0, 1, 3).flatten(2)
