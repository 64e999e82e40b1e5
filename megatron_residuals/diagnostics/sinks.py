# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Where figures go besides the JSON lines file: a wandb run and a TensorBoard writer that exist."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the figures of a recorded step."""

    name: str

    def start(self, header: Mapping[str, Any]) -> None:
        """What the run is, once."""

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        """Single numbers by name."""

    def images(self, pictures: Mapping[str, Any], iteration: int) -> None:
        """Pictures by name, uint8 [height, width, 3]."""


class WandbSink:
    """The wandb run that is open in this process; never opens one.

    Everything is logged at the iteration as wandb's step, which is what Megatron does: the figures
    come into the same row as its own.
    """

    name = "wandb"

    def __init__(self, wandb: Any) -> None:
        self._wandb = wandb

    def start(self, header: Mapping[str, Any]) -> None:
        """Settings, plan and policy, into the run's config under ``residual_run``."""
        described = {key: value for key, value in header.items() if key != "kind"}
        self._wandb.run.config.update({"residual_run": described}, allow_val_change=True)

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        """One call for all of them."""
        self._wandb.log(dict(values), step=iteration)

    def images(self, pictures: Mapping[str, Any], iteration: int) -> None:
        """As ``wandb.Image``."""
        images = {name: self._wandb.Image(picture) for name, picture in pictures.items()}
        self._wandb.log(images, step=iteration)


class TensorBoardSink:
    """A ``SummaryWriter``."""

    name = "TensorBoard"

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def start(self, header: Mapping[str, Any]) -> None:
        """Settings, plan and policy, as text."""
        lines = [f"    {key}: {header[key]}" for key in ("config", "recompute")]
        plan = "\n".join(f"    {line}" for line in str(header["plan"]).splitlines())
        self._writer.add_text("residual_run", "\n".join([*lines, "", plan]), 0)

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        """One event each, under its name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)

    def images(self, pictures: Mapping[str, Any], iteration: int) -> None:
        """One image event each."""
        for name, picture in pictures.items():
            self._writer.add_image(name, picture, iteration, dataformats="HWC")


def open_wandb() -> WandbSink | None:
    """A sink for the wandb run that this process has open, if it has."""
    wandb = sys.modules.get("wandb")
    return WandbSink(wandb) if getattr(wandb, "run", None) is not None else None


def send(sink: Sink, what: str, content: Mapping[str, Any], iteration: int) -> None:
    """Give scalars or images to a sink; one that fails is reported and does not stop training."""
    try:
        getattr(sink, what)(content, iteration)
    except Exception:
        message = "%s did not take %s of iteration %d"
        logger.warning(message, sink.name, what, iteration, exc_info=True)
