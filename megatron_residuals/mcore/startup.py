# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a training run prints once, when its model is built."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_residuals._version import __version__

if TYPE_CHECKING:
    from megatron_residuals.mcore.route import Route
    from megatron_residuals.mcore.runner import StageRunner

logger = logging.getLogger(__name__)


def announce(route: Route, runner: StageRunner) -> None:
    """Print the report on rank 0 for the first block of a model; log it outside a training loop."""
    if len(route.blocks) > 1 or (dist.is_initialized() and dist.get_rank() != 0):
        return
    text = model_report(route, runner)
    global_vars = sys.modules.get("megatron.training.global_vars")
    if getattr(global_vars, "_GLOBAL_ARGS", None) is not None:
        print(text, flush=True)
    else:
        logger.info("%s", text)


def model_report(route: Route, runner: StageRunner) -> str:
    """The mechanism, what crosses the pipeline and what is recomputed, a line each."""
    lines = [f"megatron_residuals {__version__}: {route.residual}", *_depth(route), *_wire(route)]
    return "\n".join([*lines, f"  recompute: {_recompute(runner, route.residual.recompute)}"])


def _depth(route: Route) -> list[str]:
    depth = route.plan.depth
    if depth is None:
        return []
    return [
        f"  depth: {depth.num_blocks} blocks of {depth.block_sublayers} sublayers over "
        f"{depth.num_sublayers}"
    ]


def _wire(route: Route) -> list[str]:
    plan = route.plan
    if not plan.boundaries:
        return []
    text = f"  pipeline: {plan.rows} rows of [s, b, h] over {len(plan.boundaries)} hops for each "
    text += f"micro-batch, at most {plan.max_rows} on one"
    if plan.depth is not None and plan.transport == "delta":
        text += f" (the full prefix would be {plan.rows_full}, at most {plan.max_rows_full})"
    return [text]


def _recompute(runner: StageRunner, policy: str) -> str:
    if runner.group_length is not None:
        return f"{policy}: streams kept once for {runner.group_length} sublayers on rank 0"
    checkpoints = [segment for segment in runner.segments if segment.checkpoint]
    if not checkpoints:
        return policy
    sizes = sorted({len(segment.sublayers) for segment in checkpoints})
    name = "the host's" if policy == "none" else policy
    return f"{name}: {len(checkpoints)} checkpoints of {sizes} sublayers in the first stage"
