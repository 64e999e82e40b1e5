# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What ``--residual-log-interval`` costs: recorded steps against the others of the same run.

    python -m benchmarks.recording [--interval 10 --rounds 7 ...]

One process, one thread, CPU time. Every second step is recorded, so that whatever else the machine
does hits both kinds alike; the writing of the record is counted. The share is what recording adds
to a step on average at the interval that is asked for.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence

from megatron_residuals import cpu_host
from megatron_residuals.testing import run_ranks

MODELS = ("residual", "hc", "mhc", "attnres", "block_attnres")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print a line for each mechanism."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recording", description=(__doc__ or "").split("\n")[0]
    )
    for name, default, text in (
        ("--layers", 8, "transformer layers"),
        ("--hidden-size", 512, "of the model; attention heads are 64 wide"),
        ("--seq-length", 1024, "tokens"),
        ("--microbatches", 2, "per step"),
        ("--interval", 10, "steps between two records"),
        ("--rounds", 5, "recorded steps"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    args = parser.parse_args(argv)
    cpu_host.install()
    print("| mechanism | recorded step / other step | share of all steps |\n|---|---|---|")
    for model in args.models:
        (ratio,) = run_ranks(1, measure, args, model, timeout_s=3000)
        share = (ratio - 1) / args.interval
        print(f"| {model} | {ratio:.3f} | {share:.2%} at every {args.interval}th |", flush=True)
    return 0


def measure(args: argparse.Namespace, model: str) -> float:
    """CPU time of a recorded step over that of another, medians."""
    from megatron_residuals.mcore.training import monitor
    from megatron_residuals.testing.residual_toy import keep_residual_init, spec_for
    from megatron_residuals.testing.toy_gpt import (
        ToyGPT,
        build_chunks,
        setup_parallel,
        train_step,
    )

    toy = ToyGPT(
        num_layers=args.layers,
        hidden_size=args.hidden_size,
        num_heads=max(1, args.hidden_size // 64),
        seq_length=args.seq_length,
        micro_batch_size=1,
        num_microbatches=args.microbatches,
    )
    setup_parallel(toy)
    chunks = build_chunks(toy, spec_for(f"{model}(log_interval=2)"), initialise=keep_residual_init)
    taken: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEGATRON_RESIDUALS_LOG_DIR"] = folder
        for iteration in range(1, 2 * args.rounds + 3):
            begun = time.thread_time()
            train_step(chunks, toy)
            recorded = monitor.log_step(iteration) is not None
            if iteration > 2:  # the first steps allocate, and write the run's header
                taken[recorded].append(time.thread_time() - begun)
    return statistics.median(taken[True]) / statistics.median(taken[False])


if __name__ == "__main__":
    raise SystemExit(main())
