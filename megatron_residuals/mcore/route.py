# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What the stages of one model share on a rank: the plan, the wire, and the step under way."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import create_group
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.modules.packing import slots_of
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.messages import Message
from megatron_residuals.pipeline.payload import payload_length, sequence_of
from megatron_residuals.pipeline.plan import Boundary, TransferPlan
from megatron_residuals.transport.message_order import MessageOrder, ScheduleTable, Walk
from megatron_residuals.transport.preflight import Agreement
from megatron_residuals.transport.step import PipelineStep
from megatron_residuals.transport.wire import Lane, Parcel, Wire, open_wire, world

# Where the schedules, which know a model's config object alone, find the route of the model.
ATTRIBUTE = "_megatron_residuals_route"
# Routes whose model exists: a chunk with a config of its own looks here for that of its model. By
# the group of the world: what an attempt to train leaves behind, its traceback say, is not of the
# next one.
_live: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[Route]]
_live = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class Route:
    """The path of a micro-batch through the pipeline, as seen from one rank.

    Attributes:
        wire: None on one pipeline rank.
        serial: which model of this process with a wire it is; the same number on all ranks.
        step: what is under way; before the first step, and without a wire, an empty one.
        attended: whether the schedules' communicator is ours.
        monitor: what records the steps of the model, if anything does.
    """

    residual: ResidualConfig
    plan: TransferPlan
    rank: int
    wire: Wire | None
    serial: int = 0
    blocks: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    attended: bool = False
    monitor: object = None
    agreement: Agreement = field(init=False)
    step: PipelineStep = field(init=False)

    def __post_init__(self) -> None:
        wire = "" if self.wire is None else self.wire.name
        self.agreement = Agreement(self.residual, self.plan, f"{wire}/{self.serial}")
        self.step = self._new_step(Walk(0, 0, False), ())

    def _new_step(self, walk: Walk, table: ScheduleTable) -> PipelineStep:
        return PipelineStep(walk, MessageOrder(self.plan.layout, self.rank, table))

    def connect(self, *, batched: bool) -> None:
        """Exchange a number over every hop of this rank, posted as the messages of a step will be.

        Communicators of NCCL are made, and their buffers allocated, by the first message.

        Raises:
            RuntimeError: a neighbour did not come.
        """
        assert self.wire is not None, "one pipeline rank has no neighbour"
        hops = self.plan.boundaries
        ahead = next((hop for hop in hops if hop.sender_rank == self.rank), None)
        behind = next((hop for hop in hops if hop.receiver_rank == self.rank), None)

        def parcel(lane: Lane, hop: Boundary | None) -> Parcel | None:
            number = torch.zeros(1, device=torch.cuda.current_device())
            return None if hop is None else Parcel(Message(lane.direction, hop.stage, 0), number)

        forward, backward = self.wire.forward, self.wire.backward
        for lane, to, source in ((forward, ahead, behind), (backward, behind, ahead)):
            due = lane.exchange(parcel(lane, to), parcel(lane, source), batched=batched)
            for delivery in filter(None, due):
                delivery.wait()

    def begin_step(self, walk: Walk, table: ScheduleTable) -> None:
        """Start a step, whose passes have the order of the table, with nothing of the last one."""
        self.end_step()  # of one that raised, something may still be on its way
        self.step = self._new_step(walk, table)

    def end_step(self) -> None:
        """Wait until everything that was sent has arrived."""
        self.step.outbox.drain()

    def payload_length(self, stage: int, row_shape: Sequence[int], dtype: torch.dtype) -> int:
        """Length of the payload into a stage, of rows [s, b, h]."""
        sequence, *_, hidden = row_shape
        return payload_length(*self._counts(stage), sequence, hidden, slots_of(dtype))

    def sequence_of(self, stage: int, payload: Tensor) -> int | None:
        """s of a payload into a stage; None if it cannot be what the plan announces."""
        length, *_, hidden = payload.shape
        return sequence_of(length, *self._counts(stage), hidden, slots_of(payload.dtype))

    def _counts(self, stage: int) -> tuple[int, int]:
        numbers = self.residual.entry.numbers(self.residual) if self.plan.receives(stage) else 0
        return self.plan.rows_in(stage), numbers

    def next_micro_batch(self, stage: int) -> int:
        """Index, within the step, of the micro-batch that enters a stage.

        Raises:
            RuntimeError: the schedule that runs the stages does not communicate through us.
        """
        if self.wire is not None and not self.attended:
            raise RuntimeError(
                "the pipeline runs without ResidualP2PCommunicator, so payloads would be cut to "
                "one row. Leave p2p_communicator= to the schedules, or pass a "
                "ResidualP2PCommunicator; and import megatron_residuals.specs before the first step"
            )
        return self.step.next_micro_batch(stage)

    def __deepcopy__(self, memo: dict[int, Any]) -> Route:
        """Itself: the host deep-copies configs for some layers, and a route is not a setting."""
        return self


def route_for(
    residual: ResidualConfig,
    layout: StageLayout,
    config: Any,
    pp_group: dist.ProcessGroup,
    chunk: int = 0,
) -> Route:
    """The route of the model that ``config`` belongs to, made by its first block.

    Collective over all ranks the first time, when there is more than one pipeline rank. With one
    there is one block, and no schedule that would look for its route: models may share a config.

    Args:
        layout: the stages of the whole model.
        chunk: virtual chunk of the block on its rank.

    Raises:
        ValueError: another block of this model was built with a different residual configuration.
    """
    num_ranks = pp_group.size()
    wire = open_wire(pp_group, create_group) if num_ranks > 1 else None
    route = None if wire is None else route_of(config) or _route_without(chunk, wire)
    if route is None or route.residual != residual:
        if route is not None and len(route.blocks) > 0:
            raise ValueError(
                f"one model, two residual configurations: {route.residual} and {residual}; "
                "give every chunk the same spec, and another model a TransformerConfig of its own "
                "(dataclasses.replace(config) makes one, a copy does not)"
            )
        serial = 0 if wire is None else next(wire.serials)
        plan = TransferPlan.for_residual(residual, layout)
        route = Route(residual, plan, pp_group.rank(), wire, serial)
        _of_this_world().add(route)
        if wire is not None and residual.connect_early:
            route.connect(batched=config.batch_p2p_comm)
    setattr(config, ATTRIBUTE, route)
    return route


def _route_without(chunk: int, wire: Wire | None) -> Route | None:
    """The newest route whose model has been built up to this chunk.

    The training loop of hosts up to 0.18 gives every chunk a config object of its own.
    """
    if chunk == 0:
        return None
    chunks = set(range(chunk))
    begun = [
        route
        for route in _of_this_world()
        if route.wire is wire and {block.vp_stage or 0 for block in route.blocks} == chunks
    ]
    return max(begun, key=lambda route: route.serial, default=None)


def route_of(config: Any) -> Route | None:
    """The route of a host config, or None for a model with its stock residual."""
    return getattr(config, ATTRIBUTE, None)


def live_routes() -> list[Route]:
    """Routes of the models that exist in this process, since torch.distributed was started last."""
    return list(_of_this_world()) if dist.is_initialized() else []


def _of_this_world() -> weakref.WeakSet[Route]:
    return _live.setdefault(world(), weakref.WeakSet())
