# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""``megatron-residuals check``: whether a mechanism keeps to what everything here relies on."""

from __future__ import annotations

import argparse

from megatron_residuals.config import ResidualConfig

EXAMPLES = """\
examples:
  megatron-residuals check mhc
  PYTHONPATH=examples megatron-residuals check 06_own_mechanism:DENSEFORMER
  megatron-residuals check 'my_module:NAME(my_option=2)'
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser."""
    parser = commands.add_parser(
        "check",
        help="try a mechanism, built-in or your own, against what everything relies on",
        description="Start, gradients, state, recomputation, precision, and a pipeline of two "
        "small ranks against one process. Exit status 1 if something does not hold.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "mechanism", metavar="MECHANISM", help="module:NAME, or as text with options in brackets"
    )
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Print one line for each check."""
    config = ResidualConfig.parse(args.mechanism)
    from megatron_residuals import testing

    testing.install()
    from megatron_residuals.testing.conformance import conform

    failed = False
    for outcome in conform(config):
        failed = failed or outcome.verdict == "fault"
        print(f"{outcome.verdict:<6} {outcome.check:<11} {outcome.seen}", flush=True)
    return int(failed)
