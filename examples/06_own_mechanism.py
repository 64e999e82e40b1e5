# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A mechanism of your own: DenseFormer, static weights over the outputs of all earlier sublayers.

    python examples/06_own_mechanism.py
    PYTHONPATH=examples megatron-residuals check 06_own_mechanism:DENSEFORMER
    PYTHONPATH=examples torchrun … -m megatron_residuals.run pretrain_gpt.py … \\
        --residual 06_own_mechanism:DENSEFORMER --residual-weight-init 1.0

All that the mechanism is stands in this file; docs/own-mechanism.md explains it.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_residuals import ResidualConfig
from megatron_residuals.depth import DepthMap
from megatron_residuals.diagnostics.metric import Metric
from megatron_residuals.diagnostics.probes import Looked, Probe
from megatron_residuals.mechanisms import Place, option
from megatron_residuals.mechanisms.sources import Sources
from megatron_residuals.mechanisms.sources.module import SourceResidual
from megatron_residuals.modules import ResidualHead, SourceState
from megatron_residuals.modules.base import Float32Module


@dataclass(frozen=True)
class Options:
    """Flags of the mechanism; ``--residual-weight-init`` is the only one."""

    weight_init: float = option(
        1.0, "initial weight of every source (1: the plain model)", above=0.0, binds=False
    )


class Weights(Float32Module):
    """x = sum_j w_j s_j (DenseFormer, arXiv 2402.02622), over outputs of single sublayers.

    A weight for each source there will ever be, of which a reader uses the first: parameters have
    one shape in every layer, so that checkpoints stack them.
    """

    def __init__(self, config: ResidualConfig, place: Place) -> None:
        super().__init__()
        self.initial, depth = config.weight_init, place.depth
        self.opens_block = place.sublayer < depth.num_sublayers  # every output is a source
        self.newest = depth.num_read(place.sublayer) - 1
        self.weights = nn.Parameter(torch.empty(depth.num_blocks + 1, device=place.device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The same weight for all."""
        nn.init.constant_(self.weights, self.initial)

    def attend(self, sources: tuple[Tensor, ...]) -> Tensor:
        """sources m x [..., d] -> [..., d]"""
        weights = self.weights.unbind()
        return functools.reduce(operator.add, map(operator.mul, sources, weights))


class WeightedRead(Weights, SourceResidual):
    """The read in front of one sublayer; writing is that of all mechanisms with sources."""


class WeightedHead(Weights, ResidualHead[SourceState]):
    """The read in front of the final norm."""

    def close(self, state: SourceState) -> Tensor:
        """The hidden state."""
        return self.attend(state.visible)


class WeightProbe(Probe):
    """What is recorded while it trains: figures of the parameters are enough here."""

    def parameters(self, module: Any) -> Looked:
        """One number each, under the names of the metrics below."""
        weights = module.weights.detach()
        return {"embedding_weight": weights[0], "newest_weight": weights[module.newest]}


class DenseFormer(Sources):
    """The entry: what everything else asks."""

    summary = "a static weighted sum of the outputs of all earlier sublayers"
    options = Options
    metrics = (
        Metric("embedding_weight", "reader", "mean", "weight of the embedding", per="step"),
        Metric("newest_weight", "reader", "mean", "weight of the last output", per="step"),
    )

    def build_sublayer(self, config: ResidualConfig, place: Place) -> WeightedRead:
        """The module of a sublayer."""
        return WeightedRead(config, place)

    def build_head(self, config: ResidualConfig, place: Place) -> WeightedHead:
        """The module behind the last one."""
        return WeightedHead(config, place)

    def probe(self, config: ResidualConfig, depth: DepthMap | None) -> Probe:
        """Its figures."""
        return WeightProbe(self, config, depth)


DENSEFORMER = DenseFormer("06_own_mechanism:DENSEFORMER")


def main() -> None:
    """Train the toy on one process and on two ranks with two virtual stages each; compare."""
    from megatron_residuals import testing

    testing.install()
    from megatron_residuals.testing.residual_toy import keep_residual_init, spec_for
    from megatron_residuals.testing.toy_gpt import ToyGPT, run_toy

    residual = ResidualConfig("__main__:DENSEFORMER")
    plain = run_toy(ToyGPT(), initialise=keep_residual_init)
    one = run_toy(ToyGPT(), spec_for(residual), initialise=keep_residual_init)
    two = run_toy(ToyGPT(pp=2, vpp=2), spec_for(residual), initialise=keep_residual_init)
    worst = max((one.grads[name] - two.grads[name]).abs().max().item() for name in one.grads)
    print(f"first loss: plain {plain.losses[0]:.6f}, DenseFormer {one.losses[0]:.6f}")
    print(f"PP2 x VPP2 against one process: largest gradient difference {worst:.1e}")


if __name__ == "__main__":
    main()
