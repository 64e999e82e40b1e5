# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron_residuals.run --rehearse [WORLD] SCRIPT ARGS…``: its options and its end."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from megatron_residuals.config import ResidualConfig
from megatron_residuals.text import one_line

REHEARSE = "--rehearse"


def add_rehearsal_options(parser: argparse.ArgumentParser) -> None:
    """The options in front of the script."""
    group = parser.add_argument_group(
        "rehearsal", "one training step without a GPU, and its memory"
    )
    group.add_argument(
        REHEARSE,
        type=int,
        metavar="WORLD",
        help="run one step as one rank of each kind of a launch of WORLD ranks (default: the "
        "variable WORLD_SIZE, or 1) on fake tensors: nothing is allocated, sent, loaded or saved",
    )
    group.add_argument(
        "--ranks", type=_ranks, metavar="N,N", help="rehearse these in place of one of each kind"
    )
    group.add_argument(
        "--budget-gib",
        type=float,
        metavar="GIB",
        help="end with status 1 if a rank needs more, and name the cheapest policy that fits",
    )
    group.add_argument("--json", action="store_true", help="print JSON; sizes are bytes")


def _ranks(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def with_world(argv: Sequence[str]) -> list[str]:
    """The words of a command, in which ``--rehearse`` has a number."""
    words = list(argv)
    at = words.index(REHEARSE) + 1 if REHEARSE in words else 0
    if 0 < at < len(words) and not words[at].isdecimal():
        words.insert(at, os.environ.get("WORLD_SIZE", "1"))
    return words


def rehearse(
    options: argparse.Namespace, argv: Sequence[str], residual: ResidualConfig | None
) -> int:
    """Rehearse a launch and print what was seen.

    Returns:
        0; 1 if the budget is exceeded; 2 if the launch is refused or a rank ends in an error.
    """
    from megatron_residuals.mcore.rehearsal import report
    from megatron_residuals.mcore.rehearsal.launch import Launch

    budget_gib = options.budget_gib
    try:
        launch = Launch.read(
            options.script, argv, options.rehearse, residual, on_gpu=not options.cpu_host
        )
        kinds = launch.kinds(options.ranks)
        rehearsal = launch.rehearse(kinds)
        verdict = None if budget_gib is None else launch.verdict(rehearsal, budget_gib)
    except (ValueError, RuntimeError) as error:
        print(f"megatron_residuals.run: error: {one_line(error)}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report.fields(rehearsal, verdict)))
    else:
        print(report.rendered(rehearsal, verdict))
    return int(budget_gib is not None and not rehearsal.fits(budget_gib))
