# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The example's training script, with what it, or the host without Transformer Engine, lacks.

That is multi-token prediction on one stage, and an attention whose values are narrower than keys.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from examples import pretrain_gpt  # noqa: E402


def build(self: DotProductAttention, config: Any, *_: Any, **__: Any) -> None:
    MegatronModule.__init__(self, config)


def attend(
    self: DotProductAttention, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> Tensor:
    """[s, b, heads, d] thrice -> [s, b, heads * d of the values]"""
    query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.permute(2, 0, 1, 3).flatten(2)


if __name__ == "__main__":
    refused = pretrain_gpt.REFUSED_ARGS
    pretrain_gpt.REFUSED_ARGS = tuple(name for name in refused if name != "mtp_num_layers")
    if "--multi-latent-attention" in sys.argv:
        DotProductAttention.__init__, DotProductAttention.forward = build, attend
    pretrain_gpt.main()
