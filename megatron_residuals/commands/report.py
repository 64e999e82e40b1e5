# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""`megatron-residuals report`: pictures of a run that was trained with --residual-log-interval."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_residuals.commands.arguments import Subparsers
from megatron_residuals.mechanisms import mechanism_named

EXAMPLES = """\
examples:
  megatron-residuals report runs/mhc
  megatron-residuals report runs/mhc --baseline runs/plain --output reports/mhc
"""


def register(commands: Subparsers) -> None:
    """`report`: pictures of a recorded run."""
    parser = commands.add_parser(
        "report",
        help="draw what a run recorded about its residual connection",
        description="Draw what a run recorded (--residual-log-interval) on one page, as PNG and as "
        "an HTML file that needs nothing beside it. Needs matplotlib and Jinja2, neither a GPU nor "
        "torch.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN_DIR", help="folder of the run, or its .jsonl file")
    add("--baseline", type=Path, metavar="RUN_DIR", help="a run to compare with")
    add(
        "--residual",
        metavar="module:NAME",
        help="a mechanism of your own that the run is of: imported, for its own figures",
    )
    add("--output", type=Path, metavar="DIR", help="where the page goes (default: beside the file)")
    parser.set_defaults(handler=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Write the page, and print where it is and what lies outside its healthy range."""
    from megatron_residuals.diagnostics import journal, page

    if args.residual is not None:
        mechanism_named(args.residual)
    run = journal.read(args.run)
    baseline = journal.read(args.baseline) if args.baseline is not None else None
    try:
        paths = page.write(run, baseline, args.output or run.path.parent)
    except ImportError as error:
        raise ValueError(
            f"the report needs matplotlib and Jinja2 ({error}); install them: pip install "
            "'megatron-residuals[demo]'"
        ) from error
    print(f"{len(run.steps)} records of {run.header['config']}")
    for each in (run, baseline):
        if each is not None and each.skipped:
            print(f"skipped {each.skipped} line(s) of {each.path} that are damaged or unknown")
    for line in page.health_of(run):
        if line.verdict == "look":
            print(f"look: {line.name} is {line.last:.4g}, healthy is {line.healthy}")
            print(f"      {line.metric.advice}")
    print("\n".join(str(path) for path in paths))
    return 0
