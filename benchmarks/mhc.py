# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A chain of mHC sublayers with F the identity: ours on every backend, and its trainable peers.

A chain, because the write of one sublayer and the read of the next are one pass in ours. Peers that
compute the same function (DeepSeek-V4's convention) are compared with it; those that compute a
relative of it (hyper-connections; Megatron's own, which no release has yet) are there for their
cost only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.clock import Candidate
from megatron_residuals import functional
from megatron_residuals.mechanisms.streams.module import ManifoldHyperConnection
from megatron_residuals.modules import StreamState

CHAIN = 4
EPS, ITERATIONS = 1e-6, 20


def candidates(
    *, tokens: int, streams: int, hidden: int, dtype: torch.dtype, device: str
) -> dict[str, Candidate]:
    """Every variant that can run here, on the same weights and the same input."""
    torch.manual_seed(7)
    shape = (tokens, streams, hidden)
    entering = torch.randn(shape, device=device).to(dtype).requires_grad_()
    cotangent = torch.randn(shape, device=device).to(dtype)
    layers = [_layer(streams, hidden, index, device) for index in range(CHAIN)]
    leaves = [entering, *[p for layer in layers for p in layer.parameters()]]

    def candidate(forward: Callable[[], Tensor]) -> Candidate:
        return Candidate(lambda: [forward()], leaves, [cotangent])

    found = {"ours torch": candidate(lambda: _ours(layers, entering, "torch"))}
    if device == "cuda" and find_spec("triton"):
        found["ours triton"] = candidate(lambda: _ours(layers, entering, "triton"))
    found["naive eager"] = candidate(lambda: _chain(layers, entering, _naive))
    compiled = torch.compile(_naive, fullgraph=True)
    found["naive compiled"] = candidate(lambda: _chain(layers, entering, compiled))
    if device == "cuda" and find_spec("liger_kernel") and dtype != torch.float32:
        found["liger"] = candidate(lambda: _chain(layers, entering, _liger()))
    if find_spec("hyper_connections"):
        found |= _hyper_connections(entering, cotangent)
    if find_spec("megatron.core.transformer.hyper_connection"):
        found |= _megatron(entering, cotangent)
    return found


def _layer(streams: int, hidden: int, index: int, device: str) -> ManifoldHyperConnection:
    layer = ManifoldHyperConnection(
        hidden,
        num_streams=streams,
        home_stream=index % streams,
        options=functional.MhcOptions("dsv4", ITERATIONS, EPS),
        alpha_init=0.5,
        initialisation="a6",
        device=torch.device(device),
    )
    torch.nn.init.normal_(layer.mapping_weight, std=(streams * hidden) ** -0.5)
    return layer


def _ours(layers: Sequence[ManifoldHyperConnection], entering: Tensor, kernels: str) -> Tensor:
    state = StreamState(entering)
    for layer in layers:
        layer.kernels = kernels
        x, pending = layer.read(state)
        state = layer.write(pending, x)
    return state.settled().streams


def _chain(
    layers: Sequence[ManifoldHyperConnection], entering: Tensor, sublayer: Callable[..., Tensor]
) -> Tensor:
    streams = entering
    for layer in layers:
        alphas = (layer.alpha_pre, layer.alpha_post, layer.alpha_res)
        streams = sublayer(streams, layer.mapping_weight, layer.bias, *alphas)
    return streams


def _naive(
    streams: Tensor, mapping: Tensor, bias: Tensor, pre: Tensor, post: Tensor, res: Tensor
) -> Tensor:
    weights = functional.MhcWeights(mapping, bias, torch.cat((pre, post, res)))
    options = functional.MhcOptions("dsv4", ITERATIONS, EPS)
    h_pre, h_post, h_res = functional.mhc_coefficients(streams, weights, options)
    x = functional.read_streams(streams, h_pre)
    return functional.write_streams(functional.StreamUpdate(streams, x, h_post, h_res))


def _liger() -> Callable[..., Tensor]:
    from liger_kernel.transformers import functional as liger

    def sublayer(
        streams: Tensor, mapping: Tensor, bias: Tensor, pre: Tensor, post: Tensor, res: Tensor
    ) -> Tensor:
        h_pre, h_post, h_res = liger.liger_mhc_coeffs(
            streams,
            mapping.t().contiguous(),
            bias,
            pre,
            post,
            res,
            tmax=ITERATIONS,
            rms_eps=EPS,
            pre_eps=EPS,
            sinkhorn_eps=EPS,
        )
        x = liger.liger_mhc_pre(streams, h_pre).to(streams.dtype)
        # its matrices act as [old, new] on the left; ours, like DeepSeek's, from the right
        mixed = liger.liger_mhc_post_res(streams, x, h_post, h_res.transpose(-1, -2).contiguous())
        return mixed.to(streams.dtype)

    return sublayer


def _hyper_connections(entering: Tensor, cotangent: Tensor) -> dict[str, Candidate]:
    from hyper_connections import ManifoldConstrainedHyperConnections

    tokens, streams, hidden = entering.shape
    chain = [
        ManifoldConstrainedHyperConnections(streams, dim=hidden, layer_index=index)
        .to(entering.device)
        .to(entering.dtype)
        for index in range(CHAIN)
    ]
    flat = entering.detach().transpose(0, 1).contiguous().requires_grad_()  # (streams, tokens, d)
    weights = [p for module in chain for p in module.parameters()]

    def forward() -> Sequence[Tensor]:
        residuals = flat
        for module in chain:
            x, add = module(residuals)
            residuals = add(x)
        return [residuals]

    cotangents = [cotangent.transpose(0, 1).contiguous()]
    return {"hyper-connections": Candidate(forward, [flat, *weights], cotangents)}


def _megatron(entering: Tensor, cotangent: Tensor) -> dict[str, Candidate]:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.hyper_connection import HyperConnectionModule

    tokens, streams, hidden = entering.shape
    config = TransformerConfig(
        num_layers=CHAIN,
        hidden_size=hidden,
        num_attention_heads=1,
        enable_mhc_connections=True,
        mhc_num_residual_streams=streams,
        mhc_sinkhorn_iterations=ITERATIONS,
        hidden_dropout=0.0,
    )
    chain = [
        HyperConnectionModule(config, index).to(entering.device).to(entering.dtype)
        for index in range(CHAIN)
    ]
    flat = entering.detach().view(tokens, 1, streams * hidden).requires_grad_()
    weights = [p for module in chain for p in module.parameters()]

    def forward() -> Sequence[Tensor]:
        residuals = flat
        for module in chain:
            x, h_res, h_post = module(residuals)
            residuals = module.fused_h_res_h_post_bda(
                h_res, residuals, h_post, (x, None), 0.0, True, False
            )
        return [residuals]

    return {"megatron native": Candidate(forward, [flat, *weights], [cotangent.view_as(flat)])}
