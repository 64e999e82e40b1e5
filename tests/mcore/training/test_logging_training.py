# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron's own training loop with recorded steps, and what is on the disk afterwards."""

from __future__ import annotations

import importlib.util
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_residuals.config import ResidualConfig
from megatron_residuals.diagnostics import journal
from tests.mcore.test_training_scripts import RUNNER, SCRIPT, TOY, Run
from tests.scripts import Order, Scripts

wandb = pytest.importorskip("wandb")

pytestmark = [
    pytest.mark.host,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.training") is None,
        reason="this Megatron-Core has no megatron.training (wheels before 0.17)",
    ),
]

OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
FLAGS = ["--residual", "block_attnres", "--residual-block-sublayers", "3"]
FLAGS += ["--residual-log-interval", "2", "--residual-log-image-interval", "4"]


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format behind seven bytes of wandb's own."""
    assert content[:4] == b":W&B"
    position, begun = 7, b""
    while position + 7 <= len(content):
        left = 2**15 - position % 2**15
        if left < 7:  # too short for a header: the block ends in padding
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        begun += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield begun
            begun = b""


class WandbRun:
    """An offline run, read back from its file: config, and rows by iteration."""

    def __init__(self, folder: Path) -> None:
        from wandb.proto import wandb_internal_pb2

        (self.path,) = folder.rglob("offline-run-*/run-*.wandb")
        self.config: dict[str, Any] = {}
        self.rows: dict[int, dict[str, Any]] = {}
        for data in wandb_records(self.path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            for item in (*record.run.config.update, *record.config.update):
                key = item.key or "/".join(item.nested_key)
                self.config[key] = json.loads(item.value_json)
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if row:
                self.rows.setdefault(int(row["_step"]), {}).update(row)


def train_logged(scripts: Scripts, folder: Path) -> Run:
    wandb_flags = ["--wandb-project", "test", "--wandb-exp-name", "run", "--wandb-save-dir", "wb"]
    command = [*RUNNER, "--cpu-host", str(SCRIPT), *FLAGS, *wandb_flags]
    done = Run(*scripts.run(Order([*command, *TOY], folder, 2, OFFLINE, training=True)))
    assert done.status == 0, done.log[-4000:]
    return done


def test_a_real_run_reaches_wandb_without_tensorboard_and_the_file(
    scripts: Scripts, tmp_path: Path
) -> None:
    done = train_logged(scripts, tmp_path)
    where = "figures of the residual, every 2 steps: wb/residual_metrics.jsonl, wandb\n"
    assert done.log.count(where) == 1

    run = journal.read(tmp_path / "wb")
    assert list(run.steps) == [1, 2, 4]  # the first step of a process, then every second
    assert ResidualConfig.parse(run.header["config"]).log_interval == 2
    assert run.header["pipeline"] == {"ranks": 2, "chunks": 2}
    assert "transport delta" in run.header["plan"]
    # as Megatron prints them, whose second line averages the first two steps
    losses = run.losses["lm loss"]
    assert list(losses) == [1, 2, 3, 4]
    printed = {number: float(line.loss) for number, line in done.iterations.items()}
    for iteration in (1, 3, 4):
        assert losses[iteration] == pytest.approx(printed[iteration], rel=1e-6)
    for step in run.steps.values():
        assert isinstance(step["time"], int)  # seven digits of it are a quarter of an hour
        assert len(step["series"]["residual/hidden_rms"]) == 9
        assert len(step["series"]["residual/kept_bytes"]) == 4
        weights = step["matrices"]["attnres/weights"]
        for row in weights:
            assert sum(v for v in row if not math.isnan(v)) == pytest.approx(1, abs=1e-5)
    # zero queries weigh all sources alike; training moves them
    first, last = run.steps[1], run.steps[4]
    assert first["series"]["attnres/query_norm"] == [0] * 9
    assert min(last["series"]["attnres/query_norm"][1:]) > 0
    assert first["series"]["attnres/entropy"] == pytest.approx([1] * 9, abs=1e-6)

    logged = WandbRun(tmp_path / "wb")
    described = logged.config["residual_run"]
    assert described["config"] == run.header["config"] and described["plan"] == run.header["plan"]
    assert described["recompute"] == "none"
    for iteration, step in run.steps.items():
        row = logged.rows[iteration]
        hidden = step["series"]["residual/hidden_rms"]
        assert row["residual_detail/hidden_rms_layer_3_mlp"] == pytest.approx(hidden[7], rel=1e-5)
        assert row["residual_detail/hidden_rms_output"] == pytest.approx(hidden[8], rel=1e-5)
        assert row["residual/hidden_rms_max"] == pytest.approx(max(hidden), rel=1e-5)
        assert row["residual/bytes_forward_sum"] == sum(step["series"]["residual/bytes_forward"])
        # Megatron keeps these from wandb where there is no TensorBoard
        assert row["lm loss"] == pytest.approx(losses[iteration], rel=1e-6)
        assert row["grad-norm"] > 0 and row["learning-rate"] > 0
    images = {i for i, row in logged.rows.items() if "attnres/weights/width" in row}
    assert images == {1}  # the next one is due after four iterations
    assert len(list(logged.path.parent.rglob("weights_*.png"))) == 1
