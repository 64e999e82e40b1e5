# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""How long one pass through a stage takes: matrix products, and the traffic of the mechanism."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from functools import cached_property

from megatron_residuals.config import ResidualConfig
from megatron_residuals.pipeline.layout import ATTENTION, MLP, StageLayout
from megatron_residuals.pipeline.traffic import Planes, plain
from megatron_residuals.planner.simulate.hardware import Gpu
from megatron_residuals.planner.sizes import MambaSizes, ModelSizes
from megatron_residuals.text import raise_faults

# How often the forward of what is replayed runs once more in backward, by recompute policy: the
# matrix products, and the traffic of the mechanism.
REPLAYS = {
    "none": (0, 0),
    "mix": (0, 1),
    "group": (0, 1),
    "block": (1, 1),
    "block+layer": (2, 2),
    "host full": (1, 1),
}


def sublayer_flops(sizes: ModelSizes, kind: str) -> int:
    """FLOPs of a sublayer's forward on one rank: projections and causal scores, or the MLP.

    With experts, ``ffn_hidden_size`` is the width that one token goes through (top-k times that of
    an expert); routing and its messages are not in it.

    Raises:
        ValueError: no such kind of sublayer is known.
    """
    known = {
        ATTENTION: _attention_flops,
        "mla": _attention_flops,
        MLP: _mlp_flops,
        "moe": _expert_flops,
        "mamba": _mamba_flops,
    }
    if kind not in known:
        raise ValueError(f"a sublayer is {kind!r}; costs are known of {', '.join(known)}.")
    return sizes.region_tokens * known[kind](sizes) // sizes.tp


def _attention_flops(sizes: ModelSizes) -> int:
    """Of one token on all tensor-parallel ranks; on average it sees half of the sequence."""
    hidden, keys = sizes.hidden_size, sizes.groups * sizes.head_size
    return 2 * hidden * (2 * hidden + 2 * keys) + 2 * sizes.seq_length * hidden


def _mlp_flops(sizes: ModelSizes) -> int:
    return 2 * sizes.hidden_size * sizes.ffn_hidden_size * (3 if sizes.gated else 2)


def _expert_flops(sizes: ModelSizes) -> int:
    width = sizes.expert_ffn_hidden_size or sizes.ffn_hidden_size
    return _mlp_flops(dataclasses.replace(sizes, ffn_hidden_size=width))


def _mamba_flops(sizes: ModelSizes) -> int:
    """Projections, and the scan as it is written: each state is multiplied, added to and read."""
    mamba = sizes.mamba or MambaSizes.of(sizes.hidden_size)
    projections = 2 * sizes.hidden_size * (mamba.projected + mamba.inner)
    return projections + 6 * mamba.inner * mamba.state


def logit_flops(sizes: ModelSizes) -> int:
    """FLOPs of the output layer's forward on one rank."""
    return 2 * sizes.region_tokens * sizes.hidden_size * sizes.vocab_size // sizes.tp


@dataclass(frozen=True)
class Rates:
    """What a GPU reaches of its peak: ``efficiency`` in a stock model's step as a whole,
    ``memory_efficiency`` in the kernels of a mechanism.

    Raises:
        ValueError: a share is not in (0, 1].
    """

    gpu: Gpu
    efficiency: float = 0.45
    memory_efficiency: float = 0.8

    def __post_init__(self) -> None:
        shares = {"efficiency": self.efficiency, "memory efficiency": self.memory_efficiency}
        raise_faults(
            "rates",
            [
                f"{name} is {share:g}; give the share of peak, above 0 and at most 1."
                for name, share in shares.items()
                if not 0 < share <= 1
            ],
        )


@dataclass(frozen=True)
class PassCosts:
    """Seconds of every pass of one model."""

    layout: StageLayout
    residual: ResidualConfig
    sizes: ModelSizes
    rates: Rates
    policy: str = "none"

    @cached_property
    def forward_s(self) -> tuple[float, ...]:
        """By stage."""
        return tuple(sum(self._forward(g)) for g in range(self.layout.num_stages))

    @cached_property
    def backward_s(self) -> tuple[float, ...]:
        """By stage: twice the products, the mechanism's own traffic, and what is replayed."""
        return tuple(self._backward(g) for g in range(self.layout.num_stages))

    def forward_flops(self, stage: int) -> int:
        """Of the layers and, on the last stage, of the output layer."""
        is_last = stage == self.layout.num_stages - 1
        return self._layer_flops[stage] + (logit_flops(self.sizes) if is_last else 0)

    @cached_property
    def _layer_flops(self) -> tuple[int, ...]:
        """Forward of the sublayers of each stage."""
        of_kind = functools.cache(functools.partial(sublayer_flops, self.sizes))
        layout = self.layout
        return tuple(
            sum(of_kind(layout.kind(i)) for i in layout.sublayers(g))
            for g in range(layout.num_stages)
        )

    @cached_property
    def planes(self) -> tuple[Planes, ...]:
        """Of each stage, beyond the plain residual's, which are in the stock model's efficiency."""
        residual, layout = self.residual, self.layout
        depth = residual.depth_map(layout.num_layers, layout.sublayers_per_layer)
        return tuple(
            residual.entry.planes(residual, layout, depth, g).plus(
                plain(len(layout.sublayers(g))), times=-1
            )
            for g in range(layout.num_stages)
        )

    def _forward(self, stage: int) -> tuple[float, float]:
        planes = self.planes[stage].forward
        return self._products(self.forward_flops(stage)), self._traffic(planes)

    def _backward(self, stage: int) -> float:
        products, traffic = REPLAYS[_kind(self.policy)]
        planes = self.planes[stage]
        flops = 2 * self.forward_flops(stage) + products * self._layer_flops[stage]
        return self._products(flops) + self._traffic(planes.backward + traffic * planes.forward)

    def _products(self, flops: float) -> float:
        return flops / (self.rates.gpu.flops_per_s * self.rates.efficiency)

    def _traffic(self, planes: float) -> float:
        rate = self.rates.gpu.memory_bytes_per_s * self.rates.memory_efficiency
        return planes * self.sizes.row_bytes / rate


def _kind(policy: str) -> str:
    """The policy without a length; that of the stock model is the host's full or nothing."""
    name = policy.partition(":")[0]
    if name.startswith(("host full", "stock full")):
        return "host full"
    return "none" if name == "stock" else name
