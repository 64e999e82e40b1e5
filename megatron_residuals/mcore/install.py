# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The named seams: where we come into the host at run time, and out of it again.

Two places of the host are touched. Its GPT model builds its block by name, so the name is given a
function that builds ours for specs with a residual; its schedules make their communicator by name
and, when interleaved, ask by name for the order of their passes. Models without a residual run
through the seams exactly as before.

Some places around training are wrapped as well: loading a checkpoint compares settings first, the
optimizers save groups of mixed precision, and their configuration takes our multipliers.

A host whose sources carry one of ``patches/`` has a hook of its own for each seam. There we
register at the hook, and its symbols stay as they are.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from megatron_residuals.mcore.compat import check_host_version, host_version

State: TypeAlias = Literal["stock", "replaced", "native"]
"""A seam without us; ours in place of a host symbol; ours at the hook of a patched host."""


def _taken(what: str, stock: Any) -> RuntimeError:
    name = f"{stock.__module__}.{stock.__qualname__}" if isinstance(stock, type) else stock
    return RuntimeError(
        f"{what} is already {name}, not the host's own; another plugin replaced it, and one of the "
        "two has to go"
    )


def _block_factory(stock: Any) -> Any:
    from megatron.core.transformer.transformer_block import TransformerBlock

    from megatron_residuals.mcore.block import ResidualTransformerBlock
    from megatron_residuals.mcore.spec import residual_of
    from megatron_residuals.mcore.training import monitor

    if stock is not TransformerBlock:
        raise _taken("the GPT model's block", stock)
    monitor.attach()

    @functools.wraps(stock, updated=())
    def build_block(*args: Any, **kwargs: Any) -> Any:
        spec = kwargs["spec"] if "spec" in kwargs else args[1]
        block = ResidualTransformerBlock if residual_of(spec) else stock
        return block(*args, **kwargs)

    return build_block


def _communicator(stock: Any) -> Any:
    from megatron_residuals.mcore.communicator import ResidualP2PCommunicator

    if not isinstance(stock, type) or not issubclass(ResidualP2PCommunicator, stock):
        raise _taken("the schedules' communicator", stock)
    return ResidualP2PCommunicator


def _announcing_table(stock: Any) -> Any:
    from megatron_residuals.mcore.route import announce

    @functools.wraps(stock)
    def get_schedule_table(*args: Any, **kwargs: Any) -> Any:
        table = stock(*args, **kwargs)
        announce(table)
        return table

    return get_schedule_table


def _checked_load(stock: Any) -> Any:
    from megatron_residuals.mcore.training.checkpoint import checked_load
    from megatron_residuals.mcore.training.warm_start import warm_start_load

    return warm_start_load(checked_load(stock))


def _optimizer_config(stock: Any) -> Any:
    from megatron_residuals.mcore.training.optimizer import with_residual_overrides

    return with_residual_overrides(stock)


def _ordered_groups(stock: Any) -> Any:
    from megatron_residuals.mcore.training.mixed_precision import ordered_by_precision

    return classmethod(ordered_by_precision(stock.__func__))


def _saves_whole_groups(stock: Any) -> Any:
    from megatron_residuals.mcore.training.mixed_precision import saves_whole_groups

    return saves_whole_groups(stock)


def _loads_whole_groups(stock: Any) -> Any:
    from megatron_residuals.mcore.training.mixed_precision import loads_whole_groups

    return loads_whole_groups(stock)


@dataclass(frozen=True)
class Seam:
    """One place where we come in: a module of the host (or a class in one) and a name in it."""

    module: str
    name: str
    """The symbol of a stock host."""
    hook: str
    """The name that a host patched with one of ``patches/`` looks up instead; "" for none."""
    purpose: str
    make: Callable[[Any], Any]
    """What goes under the name, from what stands there."""

    @property
    def owner(self) -> Any:
        """The module, or the class in one, whose attribute the name is."""
        module, _, last = self.module.rpartition(".")
        if last[:1].isupper():
            return getattr(importlib.import_module(module), last)
        return importlib.import_module(self.module)

    @property
    def attribute(self) -> str:
        """The name that this host looks up.

        Raises:
            RuntimeError: the host has neither the symbol nor the hook, or does not import.
        """
        try:
            owner = self.owner
        except ImportError as error:
            raise RuntimeError(
                f"{self.module} of megatron-core {host_version()} cannot be imported: {error}"
            ) from error
        for attribute in (self.hook, self.name):
            if hasattr(owner, attribute):
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

# Wrapped around training, in patched hosts as well; what their modules lack is left out.
LOADING = Seam(
    "megatron.core.dist_checkpointing",
    "load",
    "",
    "compares the settings of a checkpoint with the model's",
    _checked_load,
)
_MIXED = "a group may hold float32 and 16-bit parameters"
_FLOAT16 = "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params"
MIXED_PRECISION = (
    Seam(
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
        "_build_optimizer_group_ranges",
        "",
        _MIXED,
        _ordered_groups,
    ),
    Seam(_FLOAT16, "sharded_state_dict", "", _MIXED, _saves_whole_groups),
    Seam(_FLOAT16, "load_state_dict", "", _MIXED, _loads_whole_groups),
)
OPTIMIZER = Seam(
    "megatron.training.training",
    "get_megatron_optimizer_config",
    "",
    "takes learning-rate and weight-decay multipliers",
    _optimizer_config,
)

_former: dict[Seam, tuple[str, Any]] = {}  # the name we took, and what stood there before


def seams() -> tuple[Seam, ...]:
    """The seams of this host: all that a residual needs, and those around training that it has."""
    training = sys.modules.get(OPTIMIZER.module)
    around = (LOADING, *MIXED_PRECISION)
    return (*SEAMS, *around, *([OPTIMIZER] if hasattr(training, OPTIMIZER.name) else []))


def install() -> None:
    """Come in at every seam: through the host's hook where it has one. Twice is once.

    A seam whose module was not imported the first time is taken when this is called again.

    Raises:
        RuntimeError: the host's version is outside the tested window, a symbol is missing, or
            another plugin has taken one. Then nothing has changed.
    """
    check_host_version()
    made: dict[Seam, tuple[str, Any, Any]] = {}
    for seam in seams():
        if seam not in _former:
            attribute = seam.attribute
            former = inspect.getattr_static(seam.owner, attribute)
            made[seam] = (attribute, former, seam.make(former))
    for seam, (attribute, former, ours) in made.items():
        _former[seam] = (attribute, former)
        setattr(seam.owner, attribute, ours)


def uninstall() -> None:
    """Leave every seam as it was before."""
    for seam, (attribute, former) in _former.items():
        setattr(seam.owner, attribute, former)
    _former.clear()
    monitor = sys.modules.get("megatron_residuals.mcore.training.monitor")
    if monitor is not None:
        monitor.detach()


def is_installed() -> bool:
    """Whether we are in at every seam."""
    return all(seam in _former for seam in SEAMS)


def report() -> str:
    """The seams and their state, one line each."""
    lines = [f"megatron_residuals on megatron-core {host_version()}"]
    lines += [f"  {seam.state:<8}  {seam.path}: {seam.purpose}" for seam in seams()]
    return "\n".join(lines)
