# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A pre-norm language model of a few numbers, in float64, without Megatron, for any residual.

    embedding -> layers of two different sublayers (causal token mixing, MLP) -> final norm -> head

Norms have a negligible eps, so the model does not notice the scale of what it reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megatron_residuals.config import ResidualConfig
from megatron_residuals.modules import (
    ResidualState,
    build_head,
    build_sublayer_residual,
    open_state,
)
from tests.functional.loops import random_tensors

NUM_LAYERS, HIDDEN, VOCABULARY, TOKENS = 3, 6, 11, 4
NUM_SUBLAYERS = 2 * NUM_LAYERS
NORM_EPS = 1e-30


class Norm(nn.Module):
    """RMS norm with a gain."""

    def __init__(self, gain: Tensor) -> None:
        super().__init__()
        self.gain = nn.Parameter(gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS)


class TokenMixing(nn.Module):
    """Pre-norm, then every token looks at itself and its predecessors through one weight."""

    def __init__(self, gain: Tensor, mixing: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.norm = Norm(gain)
        self.mixing, self.weight = nn.Parameter(mixing), nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("st,t...->s...", self.mixing.tril(), self.norm(x) @ self.weight)


class Mlp(nn.Module):
    """Pre-norm, two linear maps, tanh between them."""

    def __init__(self, gain: Tensor, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.norm = Norm(gain)
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x) @ self.up) @ self.down


class SharedParts(nn.Module):
    """Everything but the residual: the same numbers for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        draw, d = random_tensors(seed), HIDDEN
        self.embedding = nn.Parameter(draw(VOCABULARY, d))
        self.sublayers = nn.ModuleList(
            TokenMixing(1 + 0.3 * draw(d), draw(TOKENS, TOKENS), 0.4 * draw(d, d))
            if i % 2 == 0
            else Mlp(1 + 0.3 * draw(d), 0.5 * draw(d, 2 * d), 0.5 * draw(2 * d, d))
            for i in range(NUM_SUBLAYERS)
        )
        self.final_norm = Norm(1 + 0.3 * draw(d))
        self.unembedding = nn.Parameter(draw(d, VOCABULARY))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.final_norm(hidden) @ self.unembedding


class TinyModel(nn.Module):
    """The model with the residual of a configuration.

    random_residual replaces the initial values of the mechanism's parameters by noise around them.
    """

    def __init__(self, config: ResidualConfig, *, random_residual: float = 0.0) -> None:
        super().__init__()
        self.config, depth = config, config.depth_map(NUM_LAYERS)
        self.shared = SharedParts()
        self.residuals = nn.ModuleList(
            build_sublayer_residual(config, depth, hidden_size=HIDDEN, sublayer=i)
            for i in range(NUM_SUBLAYERS)
        ).double()
        self.head = build_head(config, depth, hidden_size=HIDDEN).double()
        draw = random_tensors(99)
        with torch.no_grad():
            for _, parameter in self.mechanism_parameters():
                parameter += random_residual * draw(*parameter.shape)

    def mechanism_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.residuals.named_parameters()
        yield from self.head.named_parameters(prefix="head")

    def open(self, tokens: Tensor) -> ResidualState:
        return open_state(self.config, self.shared.embedding[tokens])

    def step(self, state: ResidualState, i: int) -> ResidualState:
        x, pending = self.residuals[i].read(state)
        return self.residuals[i].write(pending, self.shared.sublayers[i](x))

    def close(self, state: ResidualState) -> Tensor:
        return self.shared.logits(self.head(state))

    def states(self, tokens: Tensor) -> list[ResidualState]:
        """The state before every sublayer and before the final read."""
        states = [self.open(tokens)]
        for i in range(NUM_SUBLAYERS):
            states.append(self.step(states[-1], i))
        return states

    def forward(self, tokens: Tensor) -> Tensor:
        return self.close(self.states(tokens)[-1])


def tokens(seed: int = 0) -> Tensor:
    """Token ids [s, b] = [4, 2]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (TOKENS, 2), generator=generator)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Logits, and the gradients of a random cotangent by parameter name."""

    logits: Tensor
    gradients: dict[str, Tensor]


def outcome(logits: Tensor, parameters: Iterator[tuple[str, nn.Parameter]]) -> Outcome:
    named = dict(parameters)
    cotangent = random_tensors(7)(*logits.shape)
    gradients = torch.autograd.grad(logits, list(named.values()), cotangent)
    return Outcome(logits.detach(), dict(zip(named, gradients, strict=True)))


def plain_outcome() -> Outcome:
    """The plain pre-norm model, written down without the package: h = h + F(h)."""
    shared = SharedParts()
    hidden = shared.embedding[tokens()]
    for sublayer in shared.sublayers:
        hidden = hidden + sublayer(hidden)
    return outcome(shared.logits(hidden), shared.named_parameters())


MECHANISMS = [
    ResidualConfig("residual"),
    ResidualConfig("hc", streams=3),
    ResidualConfig("hc", streams=3, hc_norm="rmsnorm", contraction="learned"),
    ResidualConfig("hc", streams=2, hc_dynamic=False, contraction="mean"),
    ResidualConfig("mhc", streams=3),
    ResidualConfig("mhc", streams=3, mhc_convention="dsv4"),
    ResidualConfig("mhc", streams=1, contraction="sum"),
    # a mean does not notice how streams are mixed last where columns sum to one exactly
    ResidualConfig("mhc", streams=3, mhc_mixing="permutations", contraction="learned"),
    ResidualConfig("ihc", streams=3),
    ResidualConfig("single_pass_mhc", streams=3),
    ResidualConfig("attnres"),
    ResidualConfig("block_attnres", block_layers=2),
    ResidualConfig("block_attnres", block_sublayers=5),
    ResidualConfig("block_attnres", block_layers=2, attnres_heads=2, attnres_additive=True),
]
