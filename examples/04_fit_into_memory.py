# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which checkpointing policy fits: predict every policy for a pipeline, take the cheapest.

    python examples/04_fit_into_memory.py

Standard library only, like the planner itself.
"""

from megatron_residuals import ResidualConfig
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.planner.memory import MemoryPlan
from megatron_residuals.planner.sizes import ModelSizes

LAYERS, RANKS, CHUNKS, MICRO_BATCHES, BUDGET_GIB = 48, 4, 2, 32, 44
SIZES = ModelSizes(
    seq_length=4096,
    micro_batch_size=1,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_heads=32,
    query_groups=8,
    gated=True,
    # Flash attention keeps no s x s scores: bytes of one layer, measured with RetainedBytes.
    host_layer_bytes=4096 * 4096 * 2 * 16,
)


def main() -> None:
    """Print kept and peak memory of the worst rank under every policy."""
    layout = StageLayout.even(LAYERS, RANKS, CHUNKS)
    for residual in (
        ResidualConfig("mhc", streams=4),
        ResidualConfig("block_attnres", block_layers=6),
    ):
        plan = MemoryPlan(layout, residual, SIZES, MICRO_BATCHES)
        print(f"{residual}; the stock model peaks at {plan.stock.worst.peak_bytes / 2**30:.1f} GiB")
        for policy in plan.policies:
            worst = plan.predict(policy).worst
            print(
                f"  {policy:12} kept for a micro-batch {worst.kept_bytes / 2**30:6.2f} GiB,"
                f" peak {worst.peak_bytes / 2**30:6.1f} GiB on rank {worst.rank}"
            )
        fits = plan.cheapest(BUDGET_GIB * 2**30)
        advice = f"take {fits.policy!r}" if fits else "no policy fits"
        print(f"  within {BUDGET_GIB} GiB: {advice}")


if __name__ == "__main__":
    main()
