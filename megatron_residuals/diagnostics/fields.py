# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The one flat vector of sums that every rank fills during a recorded step.

Its layout follows from the configuration and the pipeline's plan alone, so every rank has the same
and one reduction adds them all. A rank fills the rows of its own sublayers and leaves the rest 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_residuals.diagnostics.probes import Probe
from megatron_residuals.pipeline.plan import TransferPlan


class Fields:
    """Named slices of a flat vector: ``shapes`` by name, in order."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self._starts: dict[str, int] = {}
        self.size = 0
        for name, shape in self.shapes.items():
            self._starts[name] = self.size
            self.size += math.prod(shape)

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The field in a flat vector [size], as a view of its shape."""
        shape, start = self.shapes[name], self._starts[name]
        return flat[start : start + math.prod(shape)].view(shape)

    def zeros(self, device: torch.device | int | str | None = None) -> Tensor:
        """A flat vector of nothing, float64: sums over a step and bytes stay exact enough."""
        return torch.zeros(self.size, dtype=torch.float64, device=device)


def fields_for(plan: TransferPlan, probe: Probe) -> Fields:
    """The fields of a model: those of every mechanism, and those of its probe.

    Sums over tokens have their number of tokens in ``tokens`` and ``gradient_tokens``.
    """
    layout = plan.layout
    sublayers, readers = layout.num_sublayers, layout.num_sublayers + 1
    return Fields(
        {
            "tokens": (readers,),
            "hidden_square": (readers,),
            "output_square": (sublayers,),
            "gradient_tokens": (sublayers,),
            "gradient_square": (sublayers,),
            "bytes_forward": (len(plan.boundaries),),
            "bytes_backward": (len(plan.boundaries),),
            "cache_bytes": (layout.num_ranks,),
            "kept_bytes": (layout.num_stages,),
            "parameters_added": (1,),
            **probe.shapes(sublayers),
        }
    )
