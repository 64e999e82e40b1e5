# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The host's pipelined schedules, and their communicator with payloads of exact width.

The schedules stay the host's. Each tells the route of its model when a step begins and ends. They
ask one method for every message; here it allocates what the plan says will arrive, instead of one
fixed shape, and keeps the two directions of travel apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_residuals.mcore.install import taken
from megatron_residuals.mcore.route import Route, route_of
from megatron_residuals.pipeline.messages import RECEIVE, SEND, Message
from megatron_residuals.transport.late import LateTensor
from megatron_residuals.transport.message_order import Walk
from megatron_residuals.transport.preflight import Payloads
from megatron_residuals.transport.step import PipelineStep
from megatron_residuals.transport.wire import Delivery, Lane, Parcel

Handle = Delivery | LateTensor


def residual_communicator(stock: Any) -> type[P2PCommunicator]:
    """The class that the schedules make their communicator of, in place of the host's."""
    if not isinstance(stock, type) or not issubclass(ResidualP2PCommunicator, stock):
        raise taken("the schedules' communicator", stock)
    return ResidualP2PCommunicator


def with_steps(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A pipelined schedule that begins and ends the steps of models with a route."""

    @functools.wraps(stock)
    def schedule(*args: Any, **arguments: Any) -> Any:
        model = arguments["model"]
        config = get_model_config(model[0] if isinstance(model, list) else model)
        route = route_of(config)
        if route is None:
            return stock(*args, **arguments)
        _begin_step(route, config, **arguments)
        returned = stock(*args, **arguments)
        route.end_step()
        return returned

    return schedule


def _begin_step(
    route: Route, config: Any, *, num_microbatches: int, forward_only: bool = False, **_: Any
) -> None:
    chunks = route.plan.layout.num_chunks
    group = config.microbatch_group_size_per_vp_stage if chunks > 1 else num_microbatches
    table = schedules.get_schedule_table(num_microbatches, chunks, group)
    route.begin_step(Walk(num_microbatches, group, forward_only), table)


class ResidualP2PCommunicator(P2PCommunicator):
    """``P2PCommunicator`` for models with a route; models without one keep the host's behaviour."""

    def __init__(self, pp_group: dist.ProcessGroup, config: Any) -> None:
        super().__init__(pp_group, config)
        self._route = route_of(config)
        if self._route is not None:
            self._route.attended = True

    def _communicate(  # type: ignore[override]  # the host annotates two of the three
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, Any]:
        """Send and receive forward payloads (next, prev) and their gradients (prev, next)."""
        route = self._route
        if route is None or route.wire is None:
            return super()._communicate(  # type: ignore[return-value]
                tensor_send_next=tensor_send_next,
                tensor_send_prev=tensor_send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
            )
        self._agree(route, tensor_send_next, tensor_shape)
        handles: dict[str, Handle | None] = {}
        from_prev, handles["send_next"], handles["recv_prev"] = self._exchange(
            route, route.wire.forward, tensor_send_next, recv_prev, tensor_shape
        )
        from_next, handles["send_prev"], handles["recv_next"] = self._exchange(
            route, route.wire.backward, tensor_send_prev, recv_next, tensor_shape
        )
        due = {name: handle for name, handle in handles.items() if handle is not None}
        if not wait_on_reqs:
            return from_prev, from_next, due
        # receives first: a receive that starts by reading a header lets the peer's send complete
        for name in sorted(due):
            due[name].wait()
        route.step.outbox.drain()
        if self.config.batch_p2p_comm and self.config.batch_p2p_sync:
            torch.cuda.synchronize()  # what the host does after batched point-to-point calls
        return from_prev, from_next, None

    def _agree(self, route: Route, first_payload: Tensor | None, tensor_shape: Any) -> None:
        """Pre-flight, in the first call of a step on every rank: nothing is on the wire yet."""
        if route.step.agreed:
            return
        row_shape = tuple(tensor_shape or ()) or None
        if self.config.variable_seq_lengths:
            row_shape = None
        elif row_shape is None and first_payload is not None:
            sequence = route.sequence_of(route.rank + 1, first_payload)
            row_shape = (sequence, *first_payload.shape[1:])
        dtype = str(self.config.pipeline_dtype)
        payloads = Payloads(dtype, row_shape, self.config.batch_p2p_comm)
        route.agreement.renew(self.pp_group, route.step.walk, payloads)
        route.step.agreed = True

    def _exchange(
        self, route: Route, lane: Lane, send: Tensor | None, receive: bool, tensor_shape: Any
    ) -> tuple[Tensor | None, Handle | None, Handle | None]:
        """Start one direction: the tensor to be filled, and the handles of send and receive."""
        step = route.step
        leaving, arriving = None, None
        if send is not None:
            # The schedules empty an output that is still being sent (hosts up to 0.17; all of them
            # where it leaves with a header): a tensor of our own holds its memory.
            leaving = Parcel(step.order.next(lane.direction, SEND), send.detach())
        if receive:
            arriving = step.order.next(lane.direction, RECEIVE)
        if self.config.variable_seq_lengths or route.residual.check_messages:
            return self._exchange_late(step, lane, leaving, arriving)
        expected = None
        if arriving is not None:
            length = route.payload_length(
                arriving.boundary, tensor_shape, self.config.pipeline_dtype
            )
            buffer = self._empty((length, *tensor_shape[1:]))
            expected = Parcel(arriving, buffer)
            step.count(*expected)
        handles = lane.exchange(leaving, expected, batched=self.config.batch_p2p_comm)
        return (None if expected is None else expected.tensor), *handles

    def _exchange_late(
        self, step: PipelineStep, lane: Lane, leaving: Parcel | None, arriving: Message | None
    ) -> tuple[Tensor | None, None, LateTensor | None]:
        late = None
        if leaving is not None:
            step.outbox.send(lane, *leaving)
        if arriving is not None:
            late = step.inbox.expect(lane, arriving, self._empty((0,)), step.count)
        return (late.tensor if late else None), None, late

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(
            tuple(shape),
            requires_grad=True,
            device=torch.cuda.current_device(),
            dtype=self.config.pipeline_dtype,
        )
