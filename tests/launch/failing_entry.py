# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The example's training script, in which the last rank fails once, in the middle of a run."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

from megatron.training import training

FAILING_STEP = 3
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"

stock, steps = training.train_step, 0


def train_step(*args: Any, **kwargs: Any) -> Any:
    """The host's, until the step that fails."""
    global steps
    steps += 1
    first_try = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first_try and steps == FAILING_STEP and os.environ["RANK"] == "1":
        raise RuntimeError("failing once, to be restarted")
    return stock(*args, **kwargs)


training.train_step = train_step
runpy.run_path(str(SCRIPT), run_name="__main__")
