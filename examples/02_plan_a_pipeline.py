# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plan a pipeline of Block AttnRes on a laptop: what crosses which boundary, and what it saves.

    python examples/02_plan_a_pipeline.py

Uses the standard library alone: neither PyTorch nor Megatron has to be installed.
"""

from megatron_residuals.depth import DepthMap
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.plan import TransferPlan

LAYERS, BLOCK_LAYERS, RANKS = 48, 6, 8
ROW_BYTES = 4096 * 1 * 4096 * 2  # [s, b, h] in bf16


def main() -> None:
    """Compare the transports over the number of virtual chunks, then print one grid."""
    depth = DepthMap.from_layers(LAYERS, BLOCK_LAYERS)
    print(
        f"{LAYERS} layers, blocks of {BLOCK_LAYERS}, {RANKS} ranks; rows per micro-batch, forward"
    )
    for chunks in (1, 2, 3, 6):
        plan = TransferPlan.for_sources(StageLayout.even(LAYERS, RANKS, chunks), depth)
        saved = (plan.rows_full - plan.rows_delta) * ROW_BYTES / 2**20
        print(
            f" V={chunks}: full {plan.rows_full:4}, delta {plan.rows_delta:4},"
            f" {saved:4.0f} MiB less;"
            f" widest hop {plan.max_rows_full} -> {plan.max_rows_delta};"
            f" cache {plan.cache_rows} rows"
        )
    print()
    print(TransferPlan.for_sources(StageLayout.even(LAYERS, RANKS, 2), depth))


if __name__ == "__main__":
    main()
