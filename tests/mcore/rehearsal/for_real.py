# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""``for_real.py SCRIPT ARGS…``: the step of a rehearsal on tensors that there are, over gloo.

Prints what the rank has shown, as JSON in one line. Experts are evenly loaded, as a rehearsal has
them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from megatron_residuals import cpu_host

if __name__ == "__main__":
    cpu_host.install(training=True)
    from megatron_residuals.mcore.install import SCRIPT, install
    from megatron_residuals.mcore.rehearsal.one_rank import run_one_step
    from megatron_residuals.mcore.rehearsal.values import evenly_routed

    script, *argv = sys.argv[1:]
    install(SCRIPT)
    with evenly_routed(lambda chosen, evenly: chosen.copy_(evenly)):
        found = run_one_step(Path(script), argv, int(os.environ["RANK"]), None, on_gpu=False)
    print("for real:", json.dumps(dataclasses.asdict(found)), flush=True)
