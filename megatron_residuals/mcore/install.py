# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The named seams: host symbols that are replaced at run time, and put back.

Two places of the host are touched. Its GPT model builds its block by name, so the name is given a
function that builds ours for specs with a residual; its schedules make their communicator by name
and, when interleaved, ask by name for the order of their passes. Models without a residual run
through the replaced symbols exactly as before.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_residuals.mcore.compat import check_host_version, host_version

logger = logging.getLogger(__name__)


def _block_factory(stock: Any) -> Any:
    from megatron_residuals.mcore.block import ResidualTransformerBlock
    from megatron_residuals.mcore.spec import residual_of

    @functools.wraps(stock, updated=())
    def build_block(*args: Any, **kwargs: Any) -> Any:
        spec = kwargs["spec"] if "spec" in kwargs else args[1]
        block = ResidualTransformerBlock if residual_of(spec) else stock
        return block(*args, **kwargs)

    return build_block


def _communicator(stock: Any) -> Any:
    from megatron_residuals.mcore.communicator import ResidualP2PCommunicator

    if not issubclass(ResidualP2PCommunicator, stock):
        raise RuntimeError(
            f"the schedules' communicator is already {stock.__module__}.{stock.__qualname__}, "
            "not the host's own; another plugin replaced it, and one of the two has to go"
        )
    return ResidualP2PCommunicator


def _announcing_table(stock: Any) -> Any:
    from megatron_residuals.mcore.communicator import ResidualP2PCommunicator

    @functools.wraps(stock)
    def get_schedule_table(*args: Any, **kwargs: Any) -> Any:
        table = stock(*args, **kwargs)
        ResidualP2PCommunicator.announce(table)
        return table

    return get_schedule_table


@dataclass(frozen=True)
class Seam:
    """One replaced symbol: the module that looks it up, its name there, and its replacement."""

    module: str
    name: str
    purpose: str
    make: Callable[[Any], Any]

    @property
    def path(self) -> str:
        """Dotted path of the symbol."""
        return f"{self.module}.{self.name}"

    def current(self) -> Any:
        """What the host finds under the name now.

        Raises:
            RuntimeError: the host has no such symbol.
        """
        try:
            return getattr(importlib.import_module(self.module), self.name)
        except (ImportError, AttributeError):
            raise RuntimeError(
                f"{self.path} does not exist in megatron-core {host_version()}; this version is "
                "not one that megatron_residuals was tested with"
            ) from None

    def set(self, value: Any) -> None:
        """Put something under the name."""
        setattr(importlib.import_module(self.module), self.name, value)


SEAMS = (
    Seam(
        "megatron.core.models.gpt.gpt_model",
        "TransformerBlock",
        "builds blocks that carry a residual state",
        _block_factory,
    ),
    Seam(
        "megatron.core.pipeline_parallel.schedules",
        "P2PCommunicator",
        "sends payloads of exact width",
        _communicator,
    ),
    Seam(
        "megatron.core.pipeline_parallel.schedules",
        "get_schedule_table",
        "tells the communicator the order of an interleaved schedule",
        _announcing_table,
    ),
)

_stock: dict[str, Any] = {}


def install() -> None:
    """Replace the named symbols of the host. Twice is once.

    Raises:
        RuntimeError: the host's version is outside the tested window, a symbol is missing, or
            another plugin has taken one.
    """
    check_host_version()
    replacements = {seam: (seam.current(), seam) for seam in SEAMS if seam.path not in _stock}
    made = {seam: seam.make(stock) for seam, (stock, _) in replacements.items()}
    for seam, (stock, _) in replacements.items():
        _stock[seam.path] = stock
        seam.set(made[seam])
    if made:
        logger.info("\n%s", report())


def uninstall() -> None:
    """Put every replaced symbol back."""
    for seam in SEAMS:
        if seam.path in _stock:
            seam.set(_stock.pop(seam.path))


def is_installed() -> bool:
    """Whether every seam is in place."""
    return all(seam.path in _stock for seam in SEAMS)


def report() -> str:
    """The seams and their state, one line each."""
    lines = [f"megatron_residuals on megatron-core {host_version()}"]
    for seam in SEAMS:
        state = "replaced" if seam.path in _stock else "stock"
        lines.append(f"  {state:<8}  {seam.path}: {seam.purpose}")
    return "\n".join(lines)
