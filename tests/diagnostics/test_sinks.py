# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Figures in TensorBoard and wandb, and a sink that fails."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from megatron_residuals.diagnostics import sinks
from megatron_residuals.diagnostics.heatmap import heatmaps
from megatron_residuals.pipeline.layout import gpt_places

HEADER = {"kind": "start", "config": "attnres()", "recompute": "none", "plan": "two\nlines"}
NAN = float("nan")


def pictures() -> dict[str, Any]:
    pytest.importorskip("matplotlib")
    return heatmaps(
        {"attnres/weights": [[1.0, NAN], [0.25, 0.75], [0.5, 0.5]]}, "attnres", gpt_places(1)
    )


def test_tensorboard_gets_numbers_pictures_and_the_plan(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        sink = sinks.TensorBoardSink(writer)
        sink.start(HEADER)
        sink.scalars({"attnres/peak_mean": 0.5, "residual_detail/hidden_rms_output": 2.0}, 7)
        sink.images(pictures(), 7)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (peak,) = events.Scalars("attnres/peak_mean")
    assert (peak.step, peak.value) == (7, 0.5)
    (image,) = events.Images("attnres/weights")
    assert image.step == 7 and image.width > 100
    text = events.Tensors("residual_run/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "config: attnres()" in text and "    lines" in text


def test_a_picture_shows_each_weight_by_its_colour() -> None:
    (picture,) = pictures().values()
    assert picture.dtype == "uint8" and picture.ndim == 3 and picture.shape[2] == 3
    yellow, purple = (253, 231, 37), (68, 1, 84)  # the ends of the colour map
    for colour in (yellow, purple):  # the weight of 1, and the colour bar's 0
        assert (abs(picture.astype(int) - colour).max(-1) <= 2).any()


def test_wandb_is_used_when_a_run_is_open_and_never_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert sinks.open_wandb() is None
    closed = types.SimpleNamespace(run=None)
    monkeypatch.setitem(sys.modules, "wandb", closed)
    assert sinks.open_wandb() is None

    logged: list[Any] = []
    config = types.SimpleNamespace(update=lambda *args, **kwargs: logged.append((args, kwargs)))
    opened = types.SimpleNamespace(
        run=types.SimpleNamespace(config=config),
        log=lambda row, step: logged.append((step, row)),
        Image=lambda picture: "image",
    )
    monkeypatch.setitem(sys.modules, "wandb", opened)
    sink = sinks.open_wandb()
    assert sink is not None
    sink.start(HEADER)
    sink.scalars({"a": 1.0}, 3)
    sink.images({"b": None}, 3)
    described = {key: value for key, value in HEADER.items() if key != "kind"}
    assert logged[0] == (({"residual_run": described},), {"allow_val_change": True})
    assert logged[1:] == [(3, {"a": 1.0}), (3, {"b": "image"})]


OFFLINE_RUN = """
import numpy, wandb
from megatron_residuals.diagnostics import sinks

wandb.init(project="test", mode="offline")
sink = sinks.open_wandb()
sink.start({"kind": "start", "config": "attnres()"})
sink.scalars({"attnres/peak_mean": 0.5}, 7)
sink.images({"attnres/weights": numpy.zeros((4, 4, 3), "uint8")}, 7)
wandb.finish()
"""


def test_a_real_run_of_wandb_takes_numbers_and_pictures(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "WANDB_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OFFLINE_RUN],
        cwd=tmp_path,
        env={**env, "WANDB_SILENT": "true"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (record,) = tmp_path.rglob("offline-run-*/run-*.wandb")
    content = record.read_bytes()
    for words in (b"residual_run", b"attnres/peak_mean", b"attnres/weights"):
        assert words in content, words
    assert list(tmp_path.rglob("offline-run-*/files/media/images/attnres/*.png"))


def test_a_sink_that_fails_is_reported_and_does_not_stop_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        name = "broken"

        def scalars(self, values: Any, iteration: int) -> None:
            raise OSError("disk full")

    with caplog.at_level(logging.WARNING):
        sinks.send(Broken(), "scalars", {}, 5)  # type: ignore[arg-type]
    assert "broken did not take scalars of iteration 5" in caplog.text
    assert "disk full" in caplog.text
