# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron's own training loop, as far as logging goes: when a step is over, where figures go.

``megatron.training.training.training_log`` runs on every rank once after each step, in all
supported versions; ``train`` looks it up by name. It is wrapped when a model that logs is built,
which that module has by then been imported to do, and never otherwise.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_residuals.mcore.arguments import global_args

LOOP, NAME = "megatron.training.training", "training_log"
FOLDER_VARIABLE = "MEGATRON_RESIDUALS_LOG_DIR"

_stock: Callable[..., Any] | None = None


def follow(log_step: Callable[..., Any]) -> None:
    """Have ``log_step(iteration, losses, figures)`` called behind every step of Megatron's loop.

    Does nothing where that loop has not been imported. Twice is once.

    Raises:
        RuntimeError: the host's function has no ``iteration`` or ``loss_dict`` (any more).
    """
    global _stock
    stock = getattr(sys.modules.get(LOOP), NAME, None)
    if stock is None or _stock is not None:
        return
    signature = inspect.signature(stock)
    if not {"iteration", "loss_dict"} <= signature.parameters.keys():
        raise RuntimeError(
            f"{LOOP}.{NAME} has no iteration and loss_dict among {list(signature.parameters)}; "
            "this Megatron is not one that megatron_residuals was tested with. Leave "
            "--residual-log-interval out"
        )

    @functools.wraps(stock)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        returned = stock(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        figures = {"learning-rate": given.get("learning_rate"), "grad-norm": given.get("grad_norm")}
        log_step(given["iteration"], given["loss_dict"], figures)
        return returned

    _stock = stock
    setattr(sys.modules[LOOP], NAME, training_log)


def unfollow() -> None:
    """Put the host's function back."""
    global _stock
    if _stock is not None:
        setattr(sys.modules[LOOP], NAME, _stock)
        _stock = None


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
