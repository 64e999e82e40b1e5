# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""torch.compile(fullgraph=True) takes every kernel and both kinds of modules."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_one_graph_holds_a_kernel_with_the_same_values_and_gradients() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TORCHDYNAMO_DISABLE"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.compiled"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    backends = ["torch", *(["triton"] if importlib.util.find_spec("triton") else [])]
    assert [line.split()[0] for line in run.stdout.splitlines()] == sorted(6 * backends)
