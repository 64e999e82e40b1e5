# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""One block of Block AttnRes with F the identity: ours, two-phase or not, and its peers.

The block's sublayers read the finished sources and the running sum, and add to the latter. All
candidates compute the same function; `attn-res` has no key gain, so its rows are made with unit
gain folded into the query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.clock import Candidate
from megatron_residuals import functional
from megatron_residuals.mechanisms.sources.module import DepthAttention, open_reads
from megatron_residuals.modules import SourceState

EPS = 1e-6
Read = Callable[[Sequence[Tensor], Tensor, Tensor], Tensor]


def candidates(
    *, tokens: int, sources: int, sublayers: int, hidden: int, dtype: torch.dtype, device: str
) -> dict[str, Candidate]:
    """Every variant that can run here; `sources` counts the running sum."""
    torch.manual_seed(11)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    closed = [random(tokens, hidden).requires_grad_() for _ in range(sources - 1)]
    partial = random(tokens, hidden).requires_grad_()
    layers = [_layer(hidden, device) for _ in range(sublayers)]
    leaves = [*closed, partial, *[p for layer in layers for p in layer.parameters()]]
    cotangent = random(tokens, hidden)

    def candidate(forward: Callable[[], Tensor]) -> Candidate:
        return Candidate(lambda: [forward()], leaves, [cotangent])

    def reading(read: Read) -> Candidate:
        return candidate(lambda: _block(layers, closed, partial, read))

    found = {
        "ours torch": candidate(lambda: _ours(layers, closed, partial, "torch", True)),
        "ours torch, one-phase": candidate(lambda: _ours(layers, closed, partial, "torch", False)),
    }
    if device == "cuda" and find_spec("triton"):
        found["ours triton"] = candidate(lambda: _ours(layers, closed, partial, "triton", True))
        found["ours triton, one-phase"] = candidate(
            lambda: _ours(layers, closed, partial, "triton", False)
        )
    found["naive eager"] = reading(_naive)
    found["naive compiled"] = reading(torch.compile(_naive, fullgraph=True))
    if find_spec("fla"):
        found |= {name: reading(read) for name, read in _fla(device).items()}
    if device == "cuda" and find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_attn_res

        found["liger"] = reading(
            lambda values, query, gain: liger_attn_res(
                torch.stack([value.unsqueeze(0) for value in values]), query, gain, EPS
            )[0].to(values[0].dtype)
        )
    if find_spec("attn_res"):
        found["attn-res"] = reading(_attn_res(hidden))
    return found


def _layer(hidden: int, device: str) -> DepthAttention:
    layer = DepthAttention(hidden, opens_block=False, eps=EPS, device=torch.device(device))
    torch.nn.init.normal_(layer.query, std=hidden**-0.5)
    torch.nn.init.uniform_(layer.key_gain, 0.5, 1.5)
    return layer


def _ours(
    layers: Sequence[DepthAttention],
    closed: Sequence[Tensor],
    partial: Tensor,
    kernels: str,
    two_phase: bool,
) -> Tensor:
    for layer in layers:
        layer.kernels = kernels
    state = SourceState.of(closed, partial)
    if two_phase:
        state = open_reads(state, layers)
    for layer in layers:
        x, pending = layer.read(state)
        state = layer.write(pending, x)
    return state.partial


def _block(
    layers: Sequence[DepthAttention], closed: Sequence[Tensor], partial: Tensor, read: Read
) -> Tensor:
    for layer in layers:
        partial = partial + read([*closed, partial], layer.query, layer.key_gain)
    return partial


def _naive(values: Sequence[Tensor], query: Tensor, gain: Tensor) -> Tensor:
    stacked = torch.stack(list(values)).float()
    keys = torch.nn.functional.rms_norm(stacked, stacked.shape[-1:], gain, EPS)
    weights = torch.softmax((keys * query).sum(-1), dim=0)
    return (weights.unsqueeze(-1) * stacked).sum(0).to(values[0].dtype)


def _fla(device: str) -> dict[str, Read]:
    if device == "cpu":
        from fla.ops.attnres.naive import naive_attnres

        return {"fla naive": lambda values, query, gain: naive_attnres(query, values, gain)}
    from fla.ops.attnres import fused_attnres

    def level(number: int) -> Read:
        return lambda values, query, gain: fused_attnres(
            query, values, gain, rms_eps=EPS, checkpoint_level=number
        )

    return {f"fla level {number}": level(number) for number in (0, 1)}


def _attn_res(hidden: int) -> Read:
    from attn_res import AttnResOperator

    operator = AttnResOperator(hidden, eps=EPS)
    del operator._parameters["pseudo_query"]  # set by each read instead

    def read(values: Sequence[Tensor], query: Tensor, gain: Tensor) -> Tensor:
        operator.pseudo_query = (query * gain).to(values[0].dtype)
        result: Tensor = operator(torch.stack(list(values)).unsqueeze(1))
        return result[0].to(values[0].dtype)

    return read


def reference(
    closed: Sequence[Tensor], partial: Tensor, weights: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """The block by the specification, in the dtype of what is given; weights: (query, gain)."""
    for query, gain in weights:
        partial = partial + functional.read_sources([*closed, partial], query, gain, eps=EPS)
    return partial
