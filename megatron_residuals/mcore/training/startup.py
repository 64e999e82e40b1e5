# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a training run prints once, when its model is built."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from megatron_residuals._version import __version__
from megatron_residuals.mcore.arguments import global_args
from megatron_residuals.mcore.block import ResidualBlockMixin
from megatron_residuals.mcore.route import Route
from megatron_residuals.mcore.runner import StageRunner
from megatron_residuals.mcore.support import host_warnings
from megatron_residuals.mcore.training.forecast import model_sizes
from megatron_residuals.planner.memory import MemoryPlan
from megatron_residuals.planner.storages import RESIDUAL
from megatron_residuals.text import format_bytes

logger = logging.getLogger(__name__)


def announce(block: ResidualBlockMixin, seams: str) -> None:
    """Print the report on rank 0 for the first block of a model; log it outside a training loop.

    ``seams`` is what stands ahead of it: the report of the host's seams.
    """
    route = block.stage_io.route
    if len(route.blocks) > 1 or (dist.is_initialized() and dist.get_rank() != 0):
        return
    for warning in host_warnings(block.config):
        logger.warning("megatron_residuals: %s", warning)
    text = f"{seams}\n{model_report(route, block.runner, block.config)}"
    if global_args() is not None:
        print(text, flush=True)
    else:
        logger.info("%s", text)


def model_report(route: Route, runner: StageRunner, config: Any) -> str:
    """The mechanism, what crosses the pipeline and what is recomputed, a line each."""
    lines = [f"megatron_residuals {__version__}: {route.residual}", *_depth(route), *_wire(route)]
    lines.append(f"  recompute: {_recompute(runner, route.residual.recompute)}")
    return "\n".join([*lines, *_memory(route, config)])


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


def _memory(route: Route, config: Any) -> list[str]:
    """What the residual path keeps, where the sizes of a micro-batch are known."""
    args = global_args()
    if args is None or config.recompute_granularity == "full" or config.fp32_residual_connection:
        return []
    try:
        sizes, _ = model_sizes(args, config, for_gpus=torch.cuda.is_available())
        micro_batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
        plan = MemoryPlan(
            route.plan.layout,
            route.residual,
            sizes,
            micro_batches,
            config.microbatch_group_size_per_vp_stage,
        )
        ranks = plan.predict().ranks
    except ValueError:  # a model or schedule that the planner does not know; the run may
        return []
    fullest = max(ranks, key=lambda rank: rank.kept_parts[RESIDUAL])
    return [
        f"  memory: {format_bytes(fullest.kept_parts[RESIDUAL])} kept by the residual path for one "
        f"micro-batch on pipeline rank {fullest.rank}, predicted; attention and MLP apart"
    ]


def _recompute(runner: StageRunner, policy: str) -> str:
    if runner.group_length is not None:
        return f"{policy}: streams kept once for {runner.group_length} sublayers on rank 0"
    checkpoints = [segment for segment in runner.segments if segment.checkpoint]
    if not checkpoints:
        return policy
    sizes = sorted({len(segment.sublayers) for segment in checkpoints})
    name = "the host's" if policy == "none" else policy
    return f"{name}: {len(checkpoints)} checkpoints of {sizes} sublayers in the first stage"
