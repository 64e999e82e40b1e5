# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A launch on two hosts, both of them this one: PP=2 over two agents, with a failure half-way."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settings(folder: Path) -> dict[str, str]:
    """Variables of both hosts."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(paths),
        "ENTRY": str(ROOT / "tests" / "launch" / "failing_entry.py"),
        "DEVICE": "cpu",
        "NUM_NODES": "2",
        "GPUS_PER_NODE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "LOCAL_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MAX_RESTARTS": "2",
        "PP": "2",
        "VPP": "1",
        "NUM_LAYERS": "2",
        "HIDDEN_SIZE": "32",
        "FFN_HIDDEN_SIZE": "64",
        "NUM_ATTENTION_HEADS": "4",
        "SEQ_LENGTH": "32",
        "VOCAB_SIZE": "64",
        "GLOBAL_BATCH_SIZE": "2",
        "TRAIN_ITERS": "4",
        "LR_WARMUP_ITERS": "1",
        "EVAL_INTERVAL": "100",
        "EVAL_ITERS": "0",
        "LOG_INTERVAL": "1",
        "NUM_WORKERS": "0",
        "RESIDUAL": "block_attnres",
        "RESIDUAL_OPTIONS": "--residual-block-layers 1",
        "RUN_DIR": str(folder / "run"),
        "CHECKPOINT_PATH": str(folder / "checkpoints"),
        "SAVE_INTERVAL": "1",
        "DATA_CACHE_PATH": str(folder / "cache"),
        "WANDB_PROJECT": "rehearsal",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }


def run_hosts(folder: Path) -> tuple[list[int], str]:
    """Exit statuses of two agents, and what both printed."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    env = kept | settings(folder)
    logs = [folder / f"host{host}.log" for host in range(2)]
    hosts = [
        subprocess.Popen(
            [str(ROOT / "launch" / "multi_node.sh")],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for log in logs
    ]
    try:
        statuses = [host.wait() for host in hosts]
    finally:
        for host in hosts:
            if host.poll() is None:
                os.killpg(host.pid, signal.SIGKILL)
                host.wait()
    return statuses, "".join(log.read_text() for log in logs)


@pytest.mark.slow
@pytest.mark.timeout(260)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_two_hosts_train_one_pipeline_fail_and_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("megatron.training", reason="not in the 0.16 wheel")
    statuses, log = run_hosts(tmp_path)
    assert statuses == [0, 0], log[-6000:]
    assert log.count("RuntimeError: failing once, to be restarted") == 1
    assert re.search(r"successfully loaded checkpoint from .* at iteration 2\b", log)
    steps = re.findall(r"iteration +(\d)/ +4 \|.*lm loss: (\S+)", log)
    assert sorted(step for step, _ in steps) == ["1", "2", "3", "4"]  # none of them twice
    run_id = (tmp_path / "run" / "wandb_run_id").read_text().strip()
    runs = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(runs) == 2 and all(run.name.endswith(f"-{run_id}") for run in runs)
