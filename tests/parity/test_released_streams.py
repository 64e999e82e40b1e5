# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""mHC and iHC against the modules of transformers' own DeepSeek-V4 and Hy4."""

from __future__ import annotations

import dataclasses
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
EPS, NORM_EPS = 1e-6, 1e-5


@dataclasses.dataclass(frozen=True)
class Family:
    """A model of transformers, and what it is called here.

    Attributes:
        returns: what its attention returns behind the output.
        renames: pieces of released names, and what transformers makes of them.
    """

    package: str
    prefix: str
    returns: tuple[None, ...]
    renames: dict[str, str]
    options: dict[str, Any]
    norm_eps: float

    def module(self, kind: str) -> Any:
        """``modeling`` or ``configuration``, which older releases do not have."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                name = f"transformers.models.{self.package}.{kind}_{self.package}"
                return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"no transformers with {self.package} is installed ({error})")

    def published(self, name: str) -> str:
        """A name of a released file -> the name of transformers' module."""
        for old, new in self.renames.items():
            name = name.replace(old, new)
        return name


FAMILIES = {
    "deepseek_v4": Family(
        "deepseek_v4",
        "DeepseekV4",
        (None,),
        {"hc_head_": "hc_head.hc_", "hc_attn_": "attn_hc.", "hc_ffn_": "ffn_hc."},
        dict(mechanism="mhc", mhc_convention="dsv4"),
        EPS,
    ),
    "hy_v4": Family(
        "hy_v4",
        "HYV4",
        (None, None),
        {
            "model.": "",
            "hc_head.hc_head_": "hc_head.hc_",
            "hc_attn_layer.hc_pre.hc_": "attn_hc.",
            "hc_mlp_layer.hc_pre.hc_": "ffn_hc.",
        },
        dict(mechanism="ihc"),
        NORM_EPS,
    ),
}
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


class Theirs(nn.Module):
    """The parameters of two layers and the head, in transformers' modules and under its names."""

    def __init__(self, family: Family, streams: int) -> None:
        super().__init__()
        config = SimpleNamespace(
            hidden_size=HIDDEN,
            hc_mult=streams,
            hc_sinkhorn_iters=20,
            hc_eps=EPS,
            hc_magnitude=2.0,
            rms_norm_eps=family.norm_eps,
        )
        source = family.module("modeling")
        connection = getattr(source, f"{family.prefix}HyperConnection")
        self._layer = getattr(source, f"{family.prefix}DecoderLayer")
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: connection(config) for name in ("attn_hc", "ffn_hc")})
            for _ in range(LAYERS)
        )
        self.hc_head = getattr(source, f"{family.prefix}HyperHead")(config)
        self.streams, self._returns = streams, family.returns

    def forward(self, embedding: Tensor, sublayers: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """Every layer through the forward pass of transformers' decoder layer."""
        hidden = embedding.unsqueeze(2).expand(-1, -1, self.streams, -1).contiguous()
        for layer, parts in enumerate(self.layers):
            attention, mlp = sublayers[2 * layer : 2 * layer + 2]

            def attend(
                x: Tensor | None = None,
                attention: Callable[[Tensor], Tensor] = attention,
                hidden_states: Tensor | None = None,
                **_: object,
            ) -> tuple[Tensor | None, ...]:
                given = x if x is not None else hidden_states
                assert given is not None
                return (attention(given), *self._returns)

            bare = SimpleNamespace(
                attn_hc=parts["attn_hc"],
                ffn_hc=parts["ffn_hc"],
                input_layernorm=nn.Identity(),
                post_attention_layernorm=nn.Identity(),
                self_attn=attend,
                mlp=lambda x, mlp=mlp, **_: mlp(x),
            )
            found = inspect.unwrap(self._layer.forward)(bare, hidden)
            hidden = found[0] if isinstance(found, tuple) else found
        return self.hc_head(hidden)


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


@every_family
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_streams_compute_what_transformers_computes_forward_and_backward(
    family: Family, streams: int
) -> None:
    theirs = Theirs(family, streams)
    config = ResidualConfig(streams=streams, **family.options)
    modules = ours(config)
    parameters = {k + n: p for k, m in modules.items() for n, p in m.named_parameters()}
    tensors, _ = export_residual(parameters, config, LAYERS)
    theirs.load_state_dict({family.published(name): tensor for name, tensor in tensors.items()})
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
        (own,) = [tensor for key, tensor in mine_named.items() if family.published(key) == name]
        # gradients of few, large parameters: their error is that of sums over all tokens
        error = (own - gradient).abs().max() / gradient.abs().max()
        assert gradient.abs().max() > 0 and error < 2e-4, f"{name}: {error:.1e}"


def test_the_default_configuration_has_the_eps_and_iterations_that_ours_has() -> None:
    public = FAMILIES["deepseek_v4"].module("configuration").DeepseekV4Config()
    config = ResidualConfig("mhc", mhc_convention="dsv4")
    assert (public.hc_mult, public.hc_sinkhorn_iters, public.hc_eps) == (
        config.streams,
        config.mhc_sinkhorn_iterations,
        config.resolved_mhc_eps,
    )
    assert public.rms_norm_eps == config.resolved_mhc_eps


def test_the_default_configuration_of_hy4_has_the_eps_and_magnitude_that_ours_has() -> None:
    public = FAMILIES["hy_v4"].module("configuration").HYV4Config()
    config = ResidualConfig("ihc")
    assert (public.hc_mult, public.hc_magnitude) == (config.streams, 2.0)
    assert (public.hc_eps, public.rms_norm_eps) == (
        config.resolved_gate_eps,
        config.resolved_mhc_eps,
    )
