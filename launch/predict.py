# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a launch will send and keep, worked out from its command: plan and memory in one go.

    python launch/predict.py --gpus 64 -- torchrun ... pretrain_gpt.py --num-layers 96 ...

The installed Megatron reads the command, without a GPU. Any command line will do that starts a
Megatron script for GPTs; ``megatron-residuals plan|memory|simulate -- ...`` take the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_residuals.commands import memory  # noqa: E402
from megatron_residuals.commands.launch import read_launch, with_remarks  # noqa: E402
from megatron_residuals.text import one_line  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Print both predictions; 2 if the launch cannot work."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--gpus", type=int, help="of all nodes together")
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    gpus = parser.parse_args(words[:at]).gpus
    try:
        forecast = read_launch(words[at + 1 :], gpus)
    except ValueError as error:
        print(f"this launch cannot work: {one_line(error)}", file=sys.stderr)
        return 2
    sent = forecast.transfer_plan.grid(forecast.plan.sizes.row_bytes)
    kept = memory.describe(forecast.plan, forecast=forecast)
    parts = f"What crosses the pipeline:\n\n{sent}\n\nWhat is kept for backward:\n\n{kept}"
    print(with_remarks(parts, forecast))
    return 0


if __name__ == "__main__":
    sys.exit(main())
