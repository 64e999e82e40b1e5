# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The arguments of Megatron's training loop, where it runs."""

from __future__ import annotations

import argparse
import sys

from megatron_residuals.config import ResidualConfig
from megatron_residuals.flags import add_residual_arguments, config_from_args

__all__ = ["add_residual_arguments", "config_from_global_args", "global_args"]


def config_from_global_args(mechanism: str | None) -> ResidualConfig:
    """The configuration of the running script: its flags where Megatron parsed any.

    Without Megatron's training loop (library use), or without our flags in its parser, this is the
    mechanism with its defaults.
    """
    return config_from_args(global_args() or argparse.Namespace(), mechanism)


def global_args() -> argparse.Namespace | None:
    """The arguments of Megatron's training loop, or None where it does not run."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
