# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The named seams: where we come into the host at run time, and out of it again.

Whatever of the host is replaced or wrapped is a ``Seam`` of one of the tables below, and says which
function of ours makes what goes there. Two places carry a model: the GPT model builds its block by
name, so the name is given a function that builds ours for specs with a residual; the schedules are
looked up and make their communicator by name. Models without a residual run through the seams
exactly as before. The others surround training.

A host whose sources carry one of ``patches/`` has a hook of its own for each seam of ``SEAMS``.
There we register at the hook, and its symbols stay as they are.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from megatron_residuals.mcore.compat import HYBRID_MODEL, check_host_version, host_version

State: TypeAlias = Literal["stock", "replaced", "native"]
"""A seam without us; ours in place of a host symbol; ours at the hook of a patched host."""


@dataclass(frozen=True)
class Seam:
    """One place where we come in: a module of the host (or a class in one) and a name in it."""

    module: str
    name: str
    """The symbol of a stock host."""
    hook: str
    """The name that a host patched with one of ``patches/`` looks up instead; "" for none."""
    purpose: str
    maker: str
    """``room.function`` below this package: from what stands under the name to what goes there.

    By name, so that a host that lacks what the room needs is still told its version first.
    """

    def make(self, stock: Any) -> Any:
        """What goes under the name, from what stands there."""
        room, _, function = self.maker.rpartition(".")
        return getattr(importlib.import_module(f"{__package__}.{room}"), function)(stock)

    @property
    def is_imported(self) -> bool:
        """Whether the host has the symbol and has imported its module; looking imports nothing."""
        return hasattr(sys.modules.get(self.module), self.name)

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


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_STEPS = "begins and ends the steps of a model"
SEAMS = (
    Seam(
        "megatron.core.models.gpt.gpt_model",
        "TransformerBlock",
        "transformer_block_factory",
        "builds blocks that carry a residual state",
        "compose.block_factory",
    ),
    Seam(
        _SCHEDULES,
        "P2PCommunicator",
        "p2p_communicator_factory",
        "sends payloads of exact width",
        "communicator.residual_communicator",
    ),
    Seam(
        _SCHEDULES,
        "forward_backward_pipelining_without_interleaving",
        "schedule_without_interleaving",
        _STEPS,
        "communicator.with_steps",
    ),
    Seam(
        _SCHEDULES,
        "forward_backward_pipelining_with_interleaving",
        "schedule_with_interleaving",
        _STEPS,
        "communicator.with_steps",
    ),
)
"""What every residual needs."""

_MIXED = "a group may hold float32 and 16-bit parameters"
_FLOAT16 = "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params"
_WRAPPER = (
    "megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper"
    ".AbstractModelInferenceWrapper"
)
AROUND = (
    Seam(
        HYBRID_MODEL,
        "__init__",
        "",
        "builds stacks that carry a residual state",
        "compose.hybrid_model",
    ),
    Seam(
        "megatron.core.dist_checkpointing",
        "load",
        "",
        "compares the settings of a checkpoint with the model's",
        "training.warm_start.guarded_load",
    ),
    Seam(
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
        "_build_optimizer_group_ranges",
        "",
        _MIXED,
        "training.mixed_precision.ordered_by_precision",
    ),
    Seam(_FLOAT16, "sharded_state_dict", "", _MIXED, "training.mixed_precision.saves_whole_groups"),
    Seam(_FLOAT16, "load_state_dict", "", _MIXED, "training.mixed_precision.loads_whole_groups"),
    Seam(
        _WRAPPER,
        "__init__",
        "",
        "refuses what cannot generate",
        "inference.checks_contexts",
    ),
    Seam(
        _WRAPPER,
        "_allocate_recv_buffer",
        "",
        "receives payloads of exact width where a model generates",
        "inference.receives_payloads",
    ),
)
"""Wrapped around training and generation, in patched hosts as well."""

_LOOP = "megatron.training.training"
OPTIMIZER = Seam(
    _LOOP,
    "get_megatron_optimizer_config",
    "",
    "takes learning-rate and weight-decay multipliers",
    "training.optimizer.with_residual_overrides",
)
"""Taken where Megatron's training loop has been imported."""
LOGGING = Seam(
    _LOOP,
    "training_log",
    "",
    "tells when a step is over, for --residual-log-interval",
    "training.monitor.ends_steps",
)
"""Taken there as well, when a model that records its steps is built."""
SCRIPT = (
    Seam(
        "megatron.training.arguments",
        "add_megatron_arguments",
        "",
        "adds our flags",
        "training.script.with_residual_flags",
    ),
    Seam(
        _LOOP,
        "setup_model_and_optimizer",
        "",
        "sees that the model has its residual",
        "training.script.with_a_residual",
    ),
)
"""Taken by ``python -m megatron_residuals.run``."""

# What stood under the names that we took: modules of the host are one for the process, so is this.
_former: dict[Seam, tuple[str, Any]] = {}


def seams() -> tuple[Seam, ...]:
    """The seams of this host: all that a residual needs, and those around training that it has."""
    loop = (OPTIMIZER,) if OPTIMIZER.is_imported else ()
    return tuple(dict.fromkeys((*SEAMS, *AROUND, *loop, *_former)))


def install(more: Iterable[Seam] = ()) -> None:
    """Come in at every seam: through the host's hook where it has one. Twice is once.

    A seam of the training loop is taken when this is called after the loop was imported.

    Args:
        more: seams to take beside those of ``seams()``.

    Raises:
        RuntimeError: the host's version is outside the tested window, a symbol is missing, or
            another plugin has taken one. Then nothing has changed.
    """
    check_host_version()
    made: dict[Seam, tuple[str, Any, Any]] = {}
    for seam in (*seams(), *more):
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


def is_installed() -> bool:
    """Whether we are in at every seam that a residual needs."""
    return all(seam in _former for seam in SEAMS)


def taken(what: str, stock: Any) -> RuntimeError:
    """The error where another plugin stands in a place that we need."""
    name = f"{stock.__module__}.{stock.__qualname__}" if isinstance(stock, type) else stock
    return RuntimeError(
        f"{what} is already {name}, not the host's own; another plugin replaced it, and one of the "
        "two has to go"
    )


def report() -> str:
    """The seams and their state, one line each."""
    lines = [f"megatron_residuals on megatron-core {host_version()}"]
    lines += [f"  {seam.state:<8}  {seam.path}: {seam.purpose}" for seam in seams()]
    return "\n".join(lines)
