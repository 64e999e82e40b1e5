# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a launch differ in what they hold, so that not all of them have to be rehearsed.

Ranks of one pipeline rank hold the same, up to the shards of the optimizer. Two pipeline ranks are
of one kind if their chunks have the same layers, of the same kinds, embedding and loss included;
of each kind the first and the last are taken, between which the passes in flight and the sources in
the cache lie.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_residuals.mcore.compat import stage_layout
from megatron_residuals.pipeline.layout import GPT_LAYER, StageLayout
from megatron_residuals.pipeline.pattern import KINDS

EXPERTS = (KINDS["E"],)


@dataclass(frozen=True)
class RankKind:
    """A rank that stands for others.

    Attributes:
        rank: in the world.
        pipeline_rank: of its pipeline.
        name: what its stages have.
    """

    rank: int
    pipeline_rank: int
    name: str


def ranks_to_rehearse(args: argparse.Namespace, config: Any) -> list[RankKind]:
    """One rank of each kind, or two, in the order of the pipeline."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    layout = stage_layout(config, args.pipeline_model_parallel_size, pattern)
    signatures = [_signature(layout, config, p) for p in range(layout.num_ranks)]
    chosen = {signatures.index(each) for each in signatures}
    chosen |= {_last_index(signatures, each) for each in signatures}
    return [
        RankKind(first_rank(args, p), p, _name(layout, config, p, signatures[p]))
        for p in sorted(chosen)
    ]


def first_rank(args: argparse.Namespace, pipeline_rank: int) -> int:
    """The first rank of the world in a pipeline rank."""
    between = args.world_size // args.pipeline_model_parallel_size
    if getattr(args, "use_tp_pp_dp_mapping", False):
        between = args.tensor_model_parallel_size * args.context_parallel_size
    return pipeline_rank * between


def pipeline_rank(args: argparse.Namespace, rank: int) -> int:
    """The pipeline rank of a rank of the world."""
    return rank // first_rank(args, 1) % args.pipeline_model_parallel_size


def _signature(layout: StageLayout, config: Any, rank: int) -> tuple[object, ...]:
    last = layout.num_stages - 1
    return tuple(
        (g == 0, g == last, _layers(layout, config, g))
        for g in range(rank, layout.num_stages, layout.num_ranks)
    )


def _layers(layout: StageLayout, config: Any, stage: int) -> tuple[object, ...]:
    """The kinds of a stage's layers, those of a GPT with experts apart from its others."""
    before = sum(layout.layers[:stage])
    layers = range(before, before + layout.layers[stage])
    if layout.layer_kinds is not None:
        return layout.layer_kinds[before : layers.stop]
    return tuple(EXPERTS if has else GPT_LAYER for has in _have_experts(layers, config))


def _have_experts(layers: range, config: Any) -> tuple[bool, ...]:
    if not config.num_moe_experts:
        return (False,) * len(layers)
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in layers)
    return tuple(bool(frequency[layer]) for layer in layers)


def _last_index(values: Sequence[object], value: object) -> int:
    return len(values) - 1 - list(reversed(values)).index(value)


def _name(layout: StageLayout, config: Any, rank: int, signature: tuple[Any, ...]) -> str:
    layers = [layers for *_, layers in signature]
    words = [f"{'+'.join(str(len(each)) for each in layers)} layers"]
    if any(EXPERTS in each for each in layers):
        words.append("experts")
    if any(first for first, *_ in signature):
        words.append("embedding")
    if any(last for _, last, _ in signature):
        words += ["prediction"] if getattr(config, "mtp_num_layers", None) else []
        words.append("loss")
    return ", ".join(words)
