# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""mHC in the ``dsv4`` convention against the modules of transformers' own DeepSeek-V4."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_residuals.config import ResidualConfig
from megatron_residuals.interchange.names import head_key, sublayer_key
from megatron_residuals.interchange.public_file import export_residual
from megatron_residuals.modules import build_head, build_sublayer_residual, open_state
from megatron_residuals.testing import assert_close

LAYERS, HIDDEN, TOKENS = 2, 24, 7
EPS = 1e-6


def transformers_module(name: str) -> Any:
    """A module of transformers' DeepSeek-V4, which releases before 5.9 do not have."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(f"transformers.models.deepseek_v4.{name}")
    except ImportError as error:
        pytest.skip(f"no transformers with DeepSeek-V4 is installed ({error})")


class Theirs(nn.Module):
    """The parameters of two layers and the head, in transformers' modules and under its names."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        config = SimpleNamespace(
            hidden_size=HIDDEN,
            hc_mult=streams,
            hc_sinkhorn_iters=20,
            hc_eps=EPS,
            rms_norm_eps=EPS,
        )
        self._source = source = transformers_module("modeling_deepseek_v4")
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {name: source.DeepseekV4HyperConnection(config) for name in ("attn_hc", "ffn_hc")}
            )
            for _ in range(LAYERS)
        )
        self.hc_head = source.DeepseekV4HyperHead(config)
        self.streams = streams

    def forward(self, embedding: Tensor, sublayers: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """Every layer through the forward pass of transformers' decoder layer."""
        hidden = embedding.unsqueeze(2).expand(-1, -1, self.streams, -1).contiguous()
        for layer, parts in enumerate(self.layers):
            attention, mlp = sublayers[2 * layer : 2 * layer + 2]
            bare = SimpleNamespace(
                attn_hc=parts["attn_hc"],
                ffn_hc=parts["ffn_hc"],
                input_layernorm=nn.Identity(),
                post_attention_layernorm=nn.Identity(),
                self_attn=lambda x, attention=attention, **_: (attention(x), None),
                mlp=lambda x, mlp=mlp, **_: mlp(x),
            )
            hidden = inspect.unwrap(self._source.DeepseekV4DecoderLayer.forward)(bare, hidden)
        return self.hc_head(hidden)


def published(name: str) -> str:
    """A name of a released file -> the name of transformers' module."""
    name = name.replace("hc_head_", "hc_head.hc_")
    return name.replace("hc_attn_", "attn_hc.").replace("hc_ffn_", "ffn_hc.")


def ours(config: ResidualConfig) -> dict[str, nn.Module]:
    """Modules with random parameters, by the start of their keys."""
    modules: dict[str, nn.Module] = {
        sublayer_key(i, ""): build_sublayer_residual(config, None, hidden_size=HIDDEN, sublayer=i)
        for i in range(2 * LAYERS)
    }
    modules[head_key("")] = build_head(config, hidden_size=HIDDEN)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in modules.values():
            for name, parameter in module.named_parameters():
                scale = 0.2 if "weight" in name else 1.0
                parameter += scale * torch.randn(parameter.shape, generator=generator)
    return modules


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_mhc_computes_what_transformers_computes_forward_and_backward(streams: int) -> None:
    theirs = Theirs(streams)
    config = ResidualConfig("mhc", streams=streams, mhc_convention="dsv4")
    modules = ours(config)
    parameters = {k + n: p for k, m in modules.items() for n, p in m.named_parameters()}
    tensors, _ = export_residual(parameters, config, LAYERS)
    theirs.load_state_dict({published(name): tensor for name, tensor in tensors.items()})
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(2 * LAYERS, HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
    sublayers = [lambda x, weight=weight: torch.tanh(x @ weight) for weight in weights]
    embedding = torch.randn(TOKENS, 1, HIDDEN, generator=generator, requires_grad=True)
    cotangent = torch.randn(TOKENS, 1, HIDDEN, generator=generator)

    state = open_state(config, embedding)
    for i, sublayer in enumerate(sublayers):
        x, pending = modules[sublayer_key(i, "")].read(state)
        state = modules[sublayer_key(i, "")].write(pending, sublayer(x))
    mine = modules[head_key("")](state)
    public = theirs(embedding, sublayers)

    assert_close(mine, public, dtype=torch.float32, kind="reordered", name="hidden state")
    grads = torch.autograd.grad(mine, [embedding, *parameters.values()], cotangent)
    named = dict(theirs.named_parameters())
    expected = torch.autograd.grad(public, [embedding, *named.values()], cotangent)
    assert_close(grads[0], expected[0], dtype=torch.float32, kind="reordered", name="embedding")
    mine_named, _ = export_residual(dict(zip(parameters, grads[1:], strict=True)), config, LAYERS)
    for name, gradient in zip(named, expected[1:], strict=True):
        (own,) = [tensor for key, tensor in mine_named.items() if published(key) == name]
        # gradients of few, large parameters: their error is that of sums over all tokens
        error = (own - gradient).abs().max() / gradient.abs().max()
        assert gradient.abs().max() > 0 and error < 2e-4, f"{name}: {error:.1e}"


def test_the_default_configuration_has_the_eps_and_iterations_that_ours_has() -> None:
    public = transformers_module("configuration_deepseek_v4").DeepseekV4Config()
    config = ResidualConfig("mhc", mhc_convention="dsv4")
    assert (public.hc_mult, public.hc_sinkhorn_iters, public.hc_eps) == (
        config.streams,
        config.mhc_sinkhorn_iterations,
        config.resolved_mhc_eps,
    )
    assert public.rms_norm_eps == config.resolved_mhc_eps
