# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What depth sources cost in the pipeline: plain residual, `full` and `delta` beside each other.

    python -m benchmarks.transport [--pp 2 --vpp 4 --rounds 9 ...]

Forked CPU ranks over gloo hold all three models and step them in turns, so that whatever else the
machine does hits all alike. Everything is printed as a ratio within the run, or as a count. What a
CPU run cannot show: transfers that overlap with computation on another device, and slow links.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_residuals import cpu_host
from megatron_residuals.testing import run_ranks

if TYPE_CHECKING:
    from benchmarks.rank import Measured

    Ranks = Sequence[dict[str, Measured]]

MODELS = {
    "plain": "residual()",
    "full": "block_attnres(block_layers={}, transport='full')",
    "delta": "block_attnres(block_layers={}, transport='delta')",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; 1 if something was not as planned."""
    args = parse(argv)
    cpu_host.install()
    from benchmarks.rank import measure_rank

    residuals = {name: text.format(args.block_layers) for name, text in MODELS.items()}
    ranks = run_ranks(args.pp, measure_rank, args, residuals, timeout_s=args.timeout_s)
    print(table(ranks))
    faults = find_faults(ranks)
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if faults else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The sizes of the run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transport", description=(__doc__ or "").split("\n")[0]
    )
    for name, default, text in (
        ("--layers", 16, "transformer layers"),
        ("--hidden-size", 128, "of the model; attention heads are 32 wide"),
        ("--seq-length", 128, "tokens"),
        ("--micro-batch-size", 2, "sequences"),
        ("--microbatches", 8, "per step; a multiple of --pp when --vpp > 1"),
        ("--pp", 2, "pipeline ranks"),
        ("--vpp", 4, "chunks per rank; 1: the schedule without interleaving"),
        ("--block-layers", 2, "layers per AttnRes block"),
        ("--rounds", 9, "timed steps of each model, and as many with the meter"),
        ("--timeout-s", 600, "until a hanging run is given up"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{text} (default: {default})")
    return parser.parse_args(argv)


def table(ranks: Ranks) -> str:
    """The measurements as a Markdown table, one column per model."""
    lines = [("per step", *MODELS), ("---", *["---:"] * len(MODELS))]
    lines += [
        (what, *(cell(name) for name in MODELS))
        for what, cell in (*_time_rows(ranks), *_own_rows(ranks), *_count_rows(ranks))
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


Cell = Callable[[str], str]


def _time_rows(ranks: Ranks) -> list[tuple[str, Cell]]:
    """Ratios within each round, of the slowest rank's wall time and of all ranks' CPU time."""

    def wall(name: str) -> list[float]:
        return [max(step) for step in zip(*(rank[name].wall_s for rank in ranks), strict=True)]

    def cpu(name: str) -> list[float]:
        return [sum(step) for step in zip(*(rank[name].cpu_s for rank in ranks), strict=True)]

    def ratio(times: Callable[[str], list[float]], base: str) -> Cell:
        return lambda name: spread(
            [time / of_base for time, of_base in zip(times(name), times(base), strict=True)]
        )

    return [
        ("time / plain", ratio(wall, "plain")),
        ("time / full", ratio(wall, "full")),
        ("CPU time / plain", ratio(cpu, "plain")),
        ("CPU time / full", ratio(cpu, "full")),
    ]


def _own_rows(ranks: Ranks) -> list[tuple[str, Cell]]:
    """The transport's own work as a share of the step's CPU time, mean over the ranks."""
    kinds = list(ranks[0]["plain"].own_shares[0])

    def rounds(name: str, kinds: Sequence[str]) -> list[float]:
        per_rank = (rank[name].own_shares for rank in ranks)
        return [
            statistics.mean(sum(shares[kind] for kind in kinds) for shares in of_round)
            for of_round in zip(*per_rank, strict=True)
        ]

    def share(*kinds: str) -> Cell:
        return lambda name: percent(statistics.median(rounds(name, kinds)))

    def per_message(name: str) -> str:
        messages = statistics.mean(rank[name].messages for rank in ranks)
        return percent(statistics.median(rounds(name, kinds)) / messages)

    return [
        ("transport's own CPU time", share(*kinds)),
        *((f"- of it {kind}", share(kind)) for kind in kinds),
        ("own CPU time per message", per_message),
        (
            "planning, once at the start",
            lambda name: percent(statistics.mean(rank[name].planning_share for rank in ranks)),
        ),
    ]


def _count_rows(ranks: Ranks) -> list[tuple[str, Cell]]:
    def total(field: str) -> Cell:
        return lambda name: f"{sum(getattr(rank[name], field) for rank in ranks):g}"

    def mebibytes(field: str) -> Cell:
        return lambda name: f"{sum(getattr(rank[name], field) for rank in ranks) / 2**20:.3f}"

    return [
        ("messages", total("messages")),
        ("MiB on the wire", mebibytes("bytes_received")),
        ("MiB planned", mebibytes("bytes_planned")),
        ("rows sent forward", total("rows_sent")),
        ("rows copied to send them", total("rows_copied")),
        ("gradient rows sent backward", total("gradient_rows_sent")),
        ("gradient rows joined to send them", total("gradient_rows_joined")),
        ("rows copied on receive", total("rows_copied_on_receive")),
        (
            "most sends of one row by a rank",
            lambda name: str(max(rank[name].most_sends for rank in ranks)),
        ),
    ]


def spread(ratios: Sequence[float]) -> str:
    """Median, with the quartiles where there are enough values for them."""
    middle = statistics.median(ratios)
    if len(ratios) < 4:
        return f"{middle:.3f}"
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def percent(share: float) -> str:
    """A share with three significant digits."""
    return f"{100 * share:.3g} %"


def find_faults(ranks: Ranks) -> list[str]:
    """What contradicts the plan: bytes on the wire, copies beyond those sent, repeated sends."""
    faults = []
    for rank, models in enumerate(ranks):
        for name, got in models.items():
            expected = {
                "bytes_received": got.bytes_planned,
                "rows_copied": 0 if name == "plain" else got.rows_sent,
                "rows_copied_on_receive": 0,
            }
            if name != "full":
                expected["most_sends"] = 1
            faults += [
                f"rank {rank}, {name}: {field} is {getattr(got, field):g}, expected {value:g}"
                for field, value in expected.items()
                if getattr(got, field) != value
            ]
    return faults


if __name__ == "__main__":
    sys.exit(main())
