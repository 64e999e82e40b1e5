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

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mechanisms.streams import Streams
from megatron_residuals.pipeline.plan import TransferPlan

# Tokens whose H_res are taken home whole, for products over all stages: 2 KiB a sublayer at n = 4.
COMPOSITE_TOKENS = 32


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


def fields_for(residual: ResidualConfig, plan: TransferPlan) -> Fields:
    """The fields of a model. L sublayers, P pipeline ranks, n streams, m sources at most.

    Sums over tokens have their number of tokens in ``tokens`` and ``gradient_tokens``.
    """
    layout = plan.layout
    sublayers, readers = 2 * layout.num_layers, 2 * layout.num_layers + 1
    shapes: dict[str, tuple[int, ...]] = {
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
    }
    if isinstance(residual.entry, Streams):
        n = residual.streams
        for name in ("gain_forward", "gain_backward", "row_error", "column_error", "diagonal"):
            shapes[name] = (sublayers,)
        for name in ("pre_saturated", "post_saturated", "stream_cosine"):
            shapes[name] = (sublayers,)
        for name in ("read_weights", "write_weights", "stream_square"):
            shapes[name] = (sublayers, n)
        shapes["gates"] = (sublayers, 3)
        shapes["matrix_tokens"] = (sublayers,)
        shapes["matrices"] = (sublayers, COMPOSITE_TOKENS, n, n)
    if plan.depth is not None:
        shapes["weights"] = (readers, plan.depth.num_read(sublayers))
        for name in ("entropy", "peak", "query_norm", "key_gain_rms"):
            shapes[name] = (readers,)
    return Fields(shapes)
