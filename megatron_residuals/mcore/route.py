# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What the stages of one model share on a rank: the plan, the wire, and the count of bytes."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mcore.compat import stage_layout
from megatron_residuals.pipeline.plan import TransferPlan
from megatron_residuals.transport.late import Inbox, Message, Outbox
from megatron_residuals.transport.message_order import MessageOrder, ScheduleTable
from megatron_residuals.transport.source_cache import SourceCache
from megatron_residuals.transport.wire import Wire, open_wire

# Where the schedules, which know a model's config object alone, find the route of the model.
ATTRIBUTE = "_megatron_residuals_route"
_live: weakref.WeakSet[Route] = weakref.WeakSet()


@dataclass(eq=False)
class Route:
    """The path of a micro-batch through the pipeline, as seen from one rank.

    received_bytes counts what arrived in this step by (direction, boundary), direction being
    "forward" or "backward" and the boundary the stage behind the hop. order is that of the
    messages of this step, announced the table of an interleaved step that is about to begin.
    """

    residual: ResidualConfig
    plan: TransferPlan
    rank: int
    wire: Wire | None
    received_bytes: Counter[tuple[str, int]] = field(default_factory=Counter)
    blocks: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    cache: SourceCache = field(default_factory=SourceCache)
    outbox: Outbox = field(default_factory=Outbox)
    inbox: Inbox = field(default_factory=Inbox)
    _last_training_bytes: Counter[tuple[str, int]] = field(default_factory=Counter)
    attended: bool = False
    agreed: bool = False
    serial: int = 0
    order: MessageOrder | None = None
    announced: ScheduleTable | None = None
    _forwards: Counter[int] = field(default_factory=Counter)

    def begin_step(self, table: ScheduleTable | None = None) -> None:
        """Start a step with nothing of the last one, which may have raised or only run forward."""
        self.order = MessageOrder(self.plan.layout, self.rank, table)
        self.announced = None
        self.outbox.drain()
        self.inbox.clear()
        self.cache.clear()
        self._forwards.clear()
        self._last_training_bytes = self.training_bytes
        self.received_bytes = Counter()

    def begin_announced_step(self) -> None:
        """Start the interleaved step whose first pass or message is due; in its midst do nothing.

        A table that was announced for another model stays until this one's next is announced.
        """
        if self.announced is not None and self.plan.layout.num_chunks > 1:
            self.begin_step(self.announced)

    def count(self, message: Message, payload: Tensor) -> None:
        """Count the bytes of a payload that arrived, or is about to."""
        size = payload.numel() * payload.element_size()
        self.received_bytes[message.direction, message.boundary] += size

    @property
    def training_bytes(self) -> Counter[tuple[str, int]]:
        """received_bytes of the last step that had a backward pass."""
        trained = any(direction == "backward" for direction, _ in self.received_bytes)
        return self.received_bytes if trained else self._last_training_bytes

    def next_micro_batch(self, stage: int) -> int:
        """Index, within the step, of the micro-batch that enters a stage.

        Every stage sees the micro-batches of a step in the same order, whatever the schedule.

        Raises:
            RuntimeError: the schedule that runs the stages does not communicate through us.
        """
        if self.wire is not None and not self.attended:
            raise RuntimeError(
                "the pipeline runs without ResidualP2PCommunicator, so payloads would be cut to "
                "one row. Leave p2p_communicator= to the schedules, or pass a "
                "ResidualP2PCommunicator; and import megatron_residuals.specs before the first step"
            )
        self.begin_announced_step()
        self._forwards[stage] += 1
        return self._forwards[stage] - 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Route:
        """Itself: the host deep-copies configs for some layers, and a route is not a setting."""
        return self


def plan_transfer(residual: ResidualConfig, config: Any, num_ranks: int) -> TransferPlan:
    """The transfer plan of a model with the given host config over ``num_ranks`` pipeline ranks."""
    return TransferPlan.for_residual(residual, stage_layout(config, num_ranks))


def route_for(
    residual: ResidualConfig, config: Any, pp_group: dist.ProcessGroup, chunk: int = 0
) -> Route:
    """The route of the model that ``config`` belongs to, made by its first block.

    Collective over all ranks the first time, when there is more than one pipeline rank. With one
    there is one block, and no schedule that would look for its route: models may share a config.

    Args:
        chunk: virtual chunk of the block on its rank.

    Raises:
        ValueError: another block of this model was built with a different residual configuration.
    """
    num_ranks = pp_group.size()
    wire = open_wire(pp_group) if num_ranks > 1 else None
    route = None if wire is None else route_of(config) or _route_without(chunk, wire)
    if route is None or route.residual != residual:
        if route is not None and len(route.blocks) > 0:
            raise ValueError(
                f"one model, two residual configurations: {route.residual} and {residual}; "
                "give every chunk the same spec, and another model a TransformerConfig of its own "
                "(dataclasses.replace(config) makes one, a copy does not)"
            )
        route = Route(residual, plan_transfer(residual, config, num_ranks), pp_group.rank(), wire)
        if wire is not None:
            route.serial = next(wire.serials)
        _live.add(route)
    setattr(config, ATTRIBUTE, route)
    return route


def _route_without(chunk: int, wire: Wire | None) -> Route | None:
    """The newest route whose model has been built up to this chunk.

    The training loop of hosts up to 0.18 gives every chunk a config object of its own.
    """
    if chunk == 0:
        return None
    chunks = set(range(chunk))
    begun = [r for r in _live if r.wire is wire and {b.vp_stage or 0 for b in r.blocks} == chunks]
    return max(begun, key=lambda route: route.serial, default=None)


def route_of(config: Any) -> Route | None:
    """The route of a host config, or None for a model with its stock residual."""
    return getattr(config, ATTRIBUTE, None)


def announce(table: ScheduleTable) -> None:
    """Tell in which order the interleaved step that begins now runs its passes.

    The schedule does not say to whom it belongs: to the model that makes the next pass.
    """
    for route in _live:
        route.announced = table


def live_routes() -> list[Route]:
    """Routes of the models that exist in this process."""
    return list(_live)
