# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Causal attention over a sequence that is cut among context-parallel ranks.

The host's attention under context parallelism is Transformer Engine's. This one gathers keys and
values, which is enough to run the rest of the model, all of it the host's, on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

from megatron_residuals.testing.toy_gpt import ToyGPT, own_positions


class _Gather(torch.autograd.Function):
    """[s / cp, ...] of every rank -> [s, ...] in the order of the ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, rank: int, group: Any) -> torch.Tensor:
        ctx.rank, ctx.group = rank, group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        torch.distributed.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.rank].clone(), None, None


class GatheredAttention(torch.nn.Module):
    """Stands in for the host's core attention: query, key, value [s / cp, b, heads, d]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[s / cp, b, heads * d]."""
        group = parallel_state.get_context_parallel_group()
        own = positions(query.shape[0], group.rank(), group.size())
        of_keys = torch.cat(
            [positions(query.shape[0], r, group.size()) for r in range(group.size())]
        )
        keys, values = (_Gather.apply(part, group.rank(), group) for part in (key, value))
        heads = (tensor.permute(1, 2, 0, 3) for tensor in (query, keys, values))
        visible = own[:, None] >= of_keys
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=visible)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def positions(length: int, rank: int, ranks: int) -> torch.Tensor:
    """Positions of the tokens of a rank that holds `length` of them."""
    return own_positions(ToyGPT(cp=ranks), length * ranks, rank)


def use_gathered_attention(layer_spec: Any) -> None:
    """Change a local layer spec of the host."""
    layer_spec.submodules.self_attention.submodules.core_attention = GatheredAttention
