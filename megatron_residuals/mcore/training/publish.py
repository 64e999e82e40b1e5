# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""From a record to the JSON lines file, wandb and TensorBoard, on the one rank that has it."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megatron_residuals._version import __version__
from megatron_residuals.diagnostics.heatmap import heatmaps
from megatron_residuals.diagnostics.journal import FORMAT, JournalWriter
from megatron_residuals.diagnostics.records import Record, scalars_of
from megatron_residuals.diagnostics.sinks import Sink, TensorBoardSink, open_wandb, send
from megatron_residuals.mcore.arguments import global_args
from megatron_residuals.mcore.compat import host_version
from megatron_residuals.mcore.route import Route
from megatron_residuals.modules import build_head, build_sublayer_residual

logger = logging.getLogger(__name__)
RECORDS_PER_IMAGE = 10
FOLDER_VARIABLE = "MEGATRON_RESIDUALS_LOG_DIR"


class Publisher:
    """Writes records; opens its file and finds the sinks with the first one.

    By then the host has opened its writers, and a rank that never has a record makes no file.
    """

    def __init__(self, route: Route, config: Any) -> None:
        residual = route.residual
        self._mechanism = residual.mechanism
        self._places = route.plan.layout.places
        interval = residual.log_image_interval
        self._image_interval = (
            RECORDS_PER_IMAGE * residual.log_interval if interval is None else interval
        )
        self._header = header_of(route, config)
        self._journal: JournalWriter | None = None
        self._sinks: list[Sink] = []
        self._last_image: int | None = None

    def publish(self, record: Record) -> None:
        """Write one record everywhere."""
        if self._journal is None:
            self._journal = self._start()
        line = dataclasses.asdict(record)
        self._journal.write("step", {"time": int(time.time()), **line})
        scalars = scalars_of(record, self._mechanism, self._places)
        if global_args() is not None and tensorboard_writer() is None:
            # Megatron gives its own to wandb only beside TensorBoard
            scalars |= {**record.losses.get(record.iteration, {}), **record.figures}
        for sink in self._sinks:
            send(sink, "scalars", scalars, record.iteration)
        if self._sinks and self._is_image_due(record):
            self._last_image = record.iteration
            pictures = self._images(record)
            for sink in self._sinks:
                send(sink, "images", pictures, record.iteration)

    def _start(self) -> JournalWriter:
        journal = JournalWriter(log_folder())
        journal.write("start", self._header)
        writer = tensorboard_writer()
        found = (open_wandb(), TensorBoardSink(writer) if writer is not None else None)
        self._sinks = [sink for sink in found if sink is not None]
        for sink in self._sinks:
            sink.start(self._header)
        where = ", ".join([str(journal.path), *(sink.name for sink in self._sinks)])
        interval = self._header["interval"]
        text = f"megatron_residuals: figures of the residual, every {interval} steps: {where}"
        print(text, flush=True) if global_args() is not None else logger.info("%s", text)
        return journal

    def _is_image_due(self, record: Record) -> bool:
        if not record.matrices or self._image_interval == 0:
            return False
        return (
            self._last_image is None or record.iteration - self._last_image >= self._image_interval
        )

    def _images(self, record: Record) -> dict[str, Any]:
        try:
            return heatmaps(record.matrices, self._mechanism, self._places)
        except ImportError:
            logger.warning("no heatmaps: matplotlib is not installed")
            self._image_interval = 0
            return {}


def header_of(route: Route, config: Any) -> dict[str, Any]:
    """What a run is, for its file and for wandb's config: settings, plan, recompute."""
    residual, layout = route.residual, route.plan.layout
    return {
        "format": FORMAT,
        "time": int(time.time()),
        "version": __version__,
        "megatron_core": str(host_version()),
        "config": str(residual),
        "settings": residual.as_mapping(),
        "interval": residual.log_interval,
        "recompute": residual.recompute,
        "host_recompute": str(config.recompute_granularity or "none"),
        "num_layers": layout.num_layers,
        "layer_kinds": layout.layer_kinds,
        "hidden_size": config.hidden_size,
        "parameters_added": _added(route, config),
        "pipeline": {"ranks": layout.num_ranks, "chunks": layout.num_chunks},
        "layers_per_stage": list(layout.layers),
        "plan": route.plan.grid(),
        "rows_per_micro_batch": route.plan.rows,
    }


def _added(route: Route, config: Any) -> int:
    """Elements of all parameters that the mechanism adds to the whole model."""
    residual, plan = route.residual, route.plan
    with torch.device("meta"):
        head = build_head(residual, plan.depth, hidden_size=config.hidden_size)
        modules = [head] + [
            build_sublayer_residual(
                residual, plan.depth, hidden_size=config.hidden_size, sublayer=i
            )
            for i in range(plan.layout.num_sublayers)
        ]
    return sum(each.numel() for module in modules for each in module.parameters())


def tensorboard_writer() -> Any:
    """The writer that Megatron has opened, or None."""
    return getattr(
        sys.modules.get("megatron.training.global_vars"), "_GLOBAL_TENSORBOARD_WRITER", None
    )


def log_folder() -> Path:
    """Where the JSON lines file goes: the first of these that is set.

    ``MEGATRON_RESIDUALS_LOG_DIR``, ``--save``, ``--tensorboard-dir``, ``--wandb-save-dir``,
    ``residual_log`` in the current folder.
    """
    args = global_args()
    named = [os.environ.get(FOLDER_VARIABLE)]
    named += [getattr(args, name, None) for name in ("save", "tensorboard_dir", "wandb_save_dir")]
    return Path(next((name for name in named if name), "residual_log"))
