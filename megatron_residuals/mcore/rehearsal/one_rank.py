# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A user's script from its first line to the end of one training step, as one rank of a launch."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_residuals.mcore.rehearsal import devices
from megatron_residuals.mcore.rehearsal.ledger import Ledger, ledger
from megatron_residuals.mcore.rehearsal.loop import LoopStep, StepIsOver, loop_of_one_step
from megatron_residuals.mcore.rehearsal.places import Places
from megatron_residuals.mcore.rehearsal.values import known_values
from megatron_residuals.mcore.rehearsal.world import EchoStore, as_rank
from megatron_residuals.mcore.route import live_routes

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer states"
LOST = """\
the script has ended without a training step of Megatron's loop (megatron.training.pretrain)"""


@dataclass(frozen=True)
class Hop:
    """What arrived over one boundary in one direction, in a step, beside the plan."""

    direction: str
    boundary: int
    bytes: int
    planned_bytes: int


@dataclass(frozen=True)
class Rehearsed:
    """What one rank has shown.

    Attributes:
        bytes: at the fullest moment, by what they are.
        place: what was at work then.
        groups: process groups that the rank has joined with another.
        messages: collectives and messages, by name.
        terms: what neighbours would compare.
    """

    rank: int
    bytes: dict[str, int]
    place: str
    hops: list[Hop]
    groups: int
    messages: dict[str, int]
    message_bytes: dict[str, int]
    terms: list[str]

    @property
    def total_bytes(self) -> int:
        """At the fullest moment."""
        return sum(self.bytes.values())


class RehearsalError(RuntimeError):
    """A step ended in an error; says where."""


def rehearse(
    script: Path, argv: Sequence[str], rank: int, size: int, *, on_gpu: bool = True
) -> Rehearsed:
    """One step of a script as one rank, on fake tensors. For a process of its own.

    Args:
        argv: arguments of the script.
        size: ranks of the launch.
        on_gpu: dispatch as on a GPU; otherwise as on the CPU host.

    Raises:
        RehearsalError: something raised; the message says where in the step.
    """
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(as_rank(rank, size))
        if on_gpu:
            stack.enter_context(devices.as_on_gpu())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(known_values())
        return run_one_step(script, argv, rank, store, on_gpu=on_gpu)


def run_one_step(
    script: Path, argv: Sequence[str], rank: int, store: EchoStore | None, *, on_gpu: bool
) -> Rehearsed:
    """One step of a script in the process group and on the tensors that there are.

    Raises:
        RehearsalError: something raised; the message says where in the step.
    """
    places, step = Places(), LoopStep()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", [str(script), *argv]))
        stack.enter_context(places.watched())
        stack.enter_context(loop_of_one_step(step, places, on_gpu=on_gpu))
        book = stack.enter_context(ledger(places))
        with _named(places, rank), contextlib.suppress(StepIsOver):
            runpy.run_path(str(script), run_name="__main__")
        if not step.is_over:
            raise RehearsalError(LOST)
        return _seen(rank, step, book, store)


@contextlib.contextmanager
def _named(places: Places, rank: int) -> Iterator[None]:
    """Errors say where in the step they were raised."""
    try:
        yield
    except Exception as error:
        raise RehearsalError(
            f"rank {rank}, {places.now}{places.given}: {type(error).__name__}: {error}"
        ) from error


def _seen(rank: int, step: LoopStep, book: Ledger, store: EchoStore | None) -> Rehearsed:
    said = [] if store is None else store.said.values()
    peak = book.peak(lasting(step.model, step.optimizer, book))
    routes = [route for route in live_routes() if route.wire is not None]
    return Rehearsed(
        rank,
        dict(peak.bytes),
        peak.place,
        [hop for route in routes for hop in _hops(route)],
        sum(dist.get_world_size(group) > 1 for group in dist.distributed_c10d._world.pg_map),
        dict(book.messages),
        dict(book.message_bytes),
        sorted(value.decode() for value in said if value[:1] == b"{"),
    )


def _hops(route: Any) -> list[Hop]:
    row = _row_bytes() * route.step.walk.num_microbatches
    rows = {boundary.stage: boundary.rows for boundary in route.plan.boundaries}
    return [
        Hop(direction, boundary, count, rows[boundary] * row)
        for (direction, boundary), count in sorted(route.step.received.items())
    ]


def _row_bytes() -> int:
    """A row [s, b, h] as it is sent."""
    from megatron.training import get_args

    args = get_args()
    cut = args.context_parallel_size
    cut *= args.tensor_model_parallel_size if args.sequence_parallel else 1
    dtype: torch.dtype = args.params_dtype
    tokens = args.seq_length // cut * args.micro_batch_size
    return int(tokens * args.hidden_size * dtype.itemsize)


def lasting(model: Sequence[nn.Module], optimizer: Any, book: Ledger) -> dict[str, set[int]]:
    """The storages that live through every step, by what they are."""
    parameters = [each for chunk in model for each in chunk.parameters()]
    # by the class: the host's wrapper has a list of that name
    buffers = [each for chunk in model for each in nn.Module.buffers(chunk)]
    weights = book.serials([*parameters, *buffers])
    gradients = book.serials(_gradients(parameters)) - weights
    states = book.serials(_states(optimizer)) - weights - gradients
    return {WEIGHTS: weights, GRADIENTS: gradients, OPTIMIZER: states}


def _gradients(parameters: Sequence[nn.Parameter]) -> Iterator[Tensor]:
    for parameter in parameters:
        for each in (getattr(parameter, "main_grad", None), parameter.grad):
            if each is not None:
                yield each


def _states(optimizer: Any) -> Iterator[Tensor]:
    """Main parameters and what the optimizer remembers of them."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
