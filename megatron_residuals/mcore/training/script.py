# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What ``python -m megatron_residuals.run`` wraps in Megatron's training, for its scripts."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from megatron_residuals.mcore.arguments import add_residual_arguments
from megatron_residuals.mcore.route import live_routes

Parse = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def with_residual_flags(stock: Parse) -> Parse:
    """``add_megatron_arguments`` that adds our flags as well."""

    @functools.wraps(stock)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_residual_arguments(stock(parser))

    return add_megatron_arguments


def with_a_residual(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``setup_model_and_optimizer`` that ends a run whose script has built a plain model.

    Raises:
        ValueError: it has.
    """

    @functools.wraps(stock)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        ready = stock(*args, **kwargs)
        if not live_routes():
            raise ValueError(
                "a residual was asked for, but the script has built a model without one: it does "
                "not read --spec, or took another from a checkpoint or a YAML file. Give the layer "
                "spec that it builds to megatron_residuals.specs.residual_spec(spec, config)"
            )
        return ready

    return setup_model_and_optimizer
