# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The named seams: where we come into the host at run time, and out of it again.

Two places of the host are touched. Its GPT model builds its block by name, so the name is given a
function that builds ours for specs with a residual; its schedules make their communicator by name
and, when interleaved, ask by name for the order of their passes. Models without a residual run
through the seams exactly as before.

A host whose sources carry one of ``patches/`` has a hook of its own for each seam. There we
register at the hook, and its symbols stay as they are.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch.distributed as dist

from megatron_residuals.mcore.compat import check_host_version, host_version

State: TypeAlias = Literal["stock", "replaced", "native"]
"""A seam without us; ours in place of a host symbol; ours at the hook of a patched host."""

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

    if not isinstance(stock, type) or not issubclass(ResidualP2PCommunicator, stock):
        name = f"{stock.__module__}.{stock.__qualname__}" if isinstance(stock, type) else stock
        raise RuntimeError(
            f"the schedules' communicator is already {name}, not the host's own; another plugin "
            "replaced it, and one of the two has to go"
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
    """One place where we come in: a module of the host and a name that it looks up there."""

    module: str
    name: str
    """The symbol of a stock host."""
    hook: str
    """The name that a host patched with one of ``patches/`` looks up instead."""
    purpose: str
    make: Callable[[Any], Any]
    """What goes under the name, from what stands there."""

    @property
    def attribute(self) -> str:
        """The name that this host looks up.

        Raises:
            RuntimeError: the host has neither the symbol nor the hook, or does not import.
        """
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            raise RuntimeError(
                f"{self.module} of megatron-core {host_version()} cannot be imported: {error}"
            ) from error
        for attribute in (self.hook, self.name):
            if hasattr(module, attribute):
                return attribute
        raise RuntimeError(
            f"{self.module}.{self.name} does not exist in megatron-core {host_version()}; this "
            "version is not one that megatron_residuals was tested with"
        )

    @property
    def path(self) -> str:
        """Dotted path of the name that this host looks up; of the symbol if there is none."""
        try:
            return f"{self.module}.{self.attribute}"
        except RuntimeError:
            return f"{self.module}.{self.name}"

    @property
    def state(self) -> State:
        """What the host finds there now."""
        if self not in _former:
            return "stock"
        attribute, _ = _former[self]
        return "native" if attribute == self.hook else "replaced"


SEAMS = (
    Seam(
        "megatron.core.models.gpt.gpt_model",
        "TransformerBlock",
        "transformer_block_factory",
        "builds blocks that carry a residual state",
        _block_factory,
    ),
    Seam(
        "megatron.core.pipeline_parallel.schedules",
        "P2PCommunicator",
        "p2p_communicator_factory",
        "sends payloads of exact width",
        _communicator,
    ),
    Seam(
        "megatron.core.pipeline_parallel.schedules",
        "get_schedule_table",
        "schedule_table_factory",
        "tells the communicator the order of an interleaved schedule",
        _announcing_table,
    ),
)

_former: dict[Seam, tuple[str, Any]] = {}  # the name we took, and what stood there before


def install() -> None:
    """Come in at every seam: through the host's hook where it has one. Twice is once.

    Raises:
        RuntimeError: the host's version is outside the tested window, a symbol is missing, or
            another plugin has taken one. Then nothing has changed.
    """
    check_host_version()
    made: dict[Seam, tuple[str, Any, Any]] = {}
    for seam in SEAMS:
        if seam not in _former:
            attribute = seam.attribute
            former = getattr(importlib.import_module(seam.module), attribute)
            made[seam] = (attribute, former, seam.make(former))
    for seam, (attribute, former, ours) in made.items():
        _former[seam] = (attribute, former)
        setattr(importlib.import_module(seam.module), attribute, ours)
    if made and dist.is_initialized() and dist.get_rank() == 0:
        # Before there are ranks, whoever calls this knows best who prints the report.
        logger.info("\n%s", report())


def uninstall() -> None:
    """Leave every seam as it was before."""
    for seam, (attribute, former) in _former.items():
        setattr(importlib.import_module(seam.module), attribute, former)
    _former.clear()


def is_installed() -> bool:
    """Whether we are in at every seam."""
    return all(seam in _former for seam in SEAMS)


def report() -> str:
    """The seams and their state, one line each."""
    lines = [f"megatron_residuals on megatron-core {host_version()}"]
    lines += [f"  {seam.state:<8}  {seam.path}: {seam.purpose}" for seam in SEAMS]
    return "\n".join(lines)
