# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The step of a rehearsal on tensors that there are, over gloo: a script for the runner.

Runs the training script of the variable ENTRY, and prints what the rank has shown, as JSON in one
line. Experts are evenly loaded, as a rehearsal has them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from megatron_residuals.mcore.rehearsal.one_rank import run_one_step
from megatron_residuals.mcore.rehearsal.values import evenly_routed

if __name__ == "__main__":
    script, rank = Path(os.environ["ENTRY"]), int(os.environ["RANK"])
    sys.path.insert(0, str(script.parent))
    with evenly_routed(lambda chosen, evenly: chosen.copy_(evenly)):
        found = run_one_step(script, sys.argv[1:], rank, None, on_gpu=False)
    print("for real:", json.dumps(dataclasses.asdict(found)), flush=True)
