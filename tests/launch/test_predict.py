# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Dry runs: the prediction that follows the command, made by the Megatron that would be started."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import shlex
import subprocess
import sys
from concurrent.futures import Executor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
PRESETS = sorted(path.stem for path in (LAUNCH / "presets").glob("*.env"))


def dry_run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """launch/pretrain.sh with a clean environment; the command alone unless PREDICT says else."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        [str(LAUNCH / "pretrain.sh"), *arguments],
        env=kept | {"PYTHON": sys.executable, "DRY_RUN": "1", "PREDICT": "0"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done


def predict(words: list[str]) -> tuple[int, str, str]:
    """launch/predict.py in this process: exit status, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    main = runpy.run_path(str(LAUNCH / "predict.py"))["main"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    return status, out.getvalue(), err.getvalue()


def prediction(reader: Executor, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """What a dry run would print besides the command, read in the process for launches."""
    done = dry_run(*arguments, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    gpus = variables.get("GPUS_PER_NODE", "8")
    words = ["--gpus", gpus, "--", *shlex.split(done.stdout)]
    return reader.submit(predict, words).result()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_can_be_predicted(launch_reader: Executor, preset: str) -> None:
    status, out, err = prediction(launch_reader, PRESET=preset, GPUS_PER_NODE="64")
    assert (status, err) == (0, "")
    layers = shlex.split(dry_run(PRESET=preset).stdout)
    assert f"\n{layers[layers.index('--num-layers') + 1]} layers, " in out
    assert "rows of [s, b, h] per micro-batch" in out and "peak by rank:" in out
    assert "note: not taken into account" not in out


def test_a_prediction_is_of_the_command_that_would_be_run(
    launch_reader: Executor,
) -> None:
    _, out, _ = prediction(launch_reader, "--", "--num-layers", "16", RESIDUAL="mhc")
    assert out.startswith("8 GPU(s), 4 replica(s) of TP 1 x PP 2")
    assert "16 layers, 4 stream(s), P=2, V=2" in out
    assert "16 layers, mhc(), P=2, V=2, 32 micro-batch(es)" in out
    assert "this launch: none, " in out
    _, out, _ = prediction(launch_reader, RESIDUAL="none", DEVICE="cpu", GPUS_PER_NODE="2")
    assert "this launch: stock, " in out and "local, unfused layers" in out


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PP": "3"}, "world size (8) is not divisible by total_model_size"),
        ({"GLOBAL_BATCH_SIZE": "6"}, "global_batch_size (6) must be divisible by"),
        ({"NUM_LAYERS": "23"}, "divisible"),
        ({"RESIDUAL": "mch"}, "mechanism is 'mch' (did you mean mhc?)"),
        (
            {"RESIDUAL": "mhc", "RESIDUAL_OPTIONS": "--residual-stream 2"},
            "did you mean --residual-streams?",
        ),
        ({"RESIDUAL": "hc", "RESIDUAL_OPTIONS": "--no-residual-hc"}, "no flag --no-residual-hc"),
        ({"RESIDUAL": "mhc", "RESIDUAL_OPTIONS": "--residual-streams 0"}, "streams is 0"),
        ({"NUM_EXPERTS": "8", "EP": "8"}, "8 GPUs do not divide over 16 ranks"),
    ],
)
def test_a_dry_run_finds_what_cannot_work(
    launch_reader: Executor, variables: dict[str, str], message: str
) -> None:
    status, out, err = prediction(launch_reader, **variables)
    assert (status, out) == (2, "")
    assert err.startswith("this launch cannot work: ") and message in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_dry_run_prints_the_command_and_then_the_prediction() -> None:
    pytest.importorskip("megatron.training", reason="not in the 0.16 wheel")
    done = dry_run(PREDICT="1", RESIDUAL="mhc")
    assert done.returncode == 0
    assert "megatron_residuals.run" in shlex.split(done.stdout)
    assert "What crosses the pipeline:" in done.stderr and "note: " in done.stderr
    # nothing of what the host and its libraries say at their import
    assert done.stderr.startswith("8 GPU(s), 4 replica(s)")
