# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A transfer plan as text: one line per hop, then the totals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_residuals.depth import source_names
from megatron_residuals.pipeline.boundary import Boundary
from megatron_residuals.text import format_bytes, table

if TYPE_CHECKING:
    from megatron_residuals.pipeline.plan import TransferPlan

_LEFT_ALIGNED = ("holds", "sends", "partial", "carries")


def plan_grid(plan: TransferPlan, row_bytes: int | None = None) -> str:
    """Table of the hops of `plan` and its totals; ASCII only, no trailing newline."""
    full = plan.with_transport("full").boundaries
    records = [
        _record(plan, boundary, full_boundary.rows, row_bytes)
        for boundary, full_boundary in zip(plan.boundaries, full, strict=True)
    ]
    lines = [_headline(plan)]
    if records:
        lines += ["", *table(records, left=_LEFT_ALIGNED), ""]
    return "\n".join(lines + _totals(plan, row_bytes))


def _headline(plan: TransferPlan) -> str:
    layout = plan.layout
    counts = sorted(set(layout.layers))
    per_stage = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    what = (
        f"{plan.num_streams} stream(s)"
        if plan.depth is None
        else f"blocks of {plan.depth.block_sublayers} sublayers ({plan.depth.num_blocks} blocks)"
    )
    return (
        f"{layout.num_layers} layers, {what}, P={layout.num_ranks}, V={layout.num_chunks}, "
        f"{per_stage} layers per stage, transport {plan.transport}"
    )


def _record(
    plan: TransferPlan, boundary: Boundary, full_rows: int, row_bytes: int | None
) -> dict[str, str]:
    record = {
        "hop": f"{boundary.stage - 1} -> {boundary.stage}",
        "ranks": f"r{boundary.sender_rank} -> r{boundary.receiver_rank}",
        "layers before": str(plan.layout.first_layer(boundary.stage)),
    }
    if plan.depth is None:
        record["carries"] = _stream_state(boundary)
    else:
        record["holds"] = source_names(boundary.held)
        record["sends"] = source_names(boundary.sent)
        record["partial"] = (
            "hidden"
            if boundary.partial is None
            else f"s{boundary.partial}{'' if boundary.partial_complete else '~'}"
        )
    record["rows"] = str(boundary.rows)
    if plan.depth is not None:
        record["full"] = str(full_rows)
    if row_bytes is not None:
        record["bytes"] = format_bytes(boundary.rows * row_bytes)
    return record


def _stream_state(boundary: Boundary) -> str:
    if boundary.carries_state:
        return f"{boundary.rows} stream(s)"
    return "hidden" if boundary.sublayer else "embedding"


def _totals(plan: TransferPlan, row_bytes: int | None) -> list[str]:
    def amount(rows: int) -> str:
        return f"{rows}" if row_bytes is None else f"{rows} ({format_bytes(rows * row_bytes)})"

    if plan.depth is None:
        return [
            "rows of [s, b, h] per micro-batch, forward (the backward moves as many): "
            f"{amount(plan.rows)}",
            f"widest hop: {amount(plan.max_rows)}",
        ]
    lines = [
        "s0 is the embedding; ~ marks a partial that is still growing.",
        "rows of [s, b, h] per micro-batch, forward (the backward moves as many): "
        f"full {amount(plan.rows_full)}, delta {amount(plan.rows_delta)}",
        f"widest hop: full {amount(plan.max_rows_full)}, delta {amount(plan.max_rows_delta)}",
        f"kept on a rank per micro-batch, at most: {amount(plan.cache_rows)}",
    ]
    if plan.layout.num_chunks == 1:
        lines.append("V=1: no rank meets a source twice, so delta saves nothing over full.")
    return lines
