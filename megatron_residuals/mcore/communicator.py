# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The host's point-to-point communicator with payloads of exact width.

The schedules stay the host's. They ask one method for every message; here it allocates what the
plan says will arrive, instead of one fixed shape, and keeps the two directions of travel apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from megatron_residuals.mcore.route import Route, route_of
from megatron_residuals.transport import preflight
from megatron_residuals.transport.late import Message
from megatron_residuals.transport.wire import Direction


class ResidualP2PCommunicator(P2PCommunicator):
    """``P2PCommunicator`` for models with a route; models without one keep the host's behaviour."""

    def __init__(self, pp_group: dist.ProcessGroup, config: Any) -> None:
        super().__init__(pp_group, config)
        self._route = route_of(config)
        if self._route is None:
            return
        self._route.attended = True
        if self._route.plan.layout.num_chunks == 1:  # an interleaved schedule announces its step
            self._route.begin_step()

    def _communicate(
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
            return super()._communicate(
                tensor_send_next=tensor_send_next,
                tensor_send_prev=tensor_send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
            )
        route.begin_announced_step()
        if not route.agreed:
            self._agree(tensor_send_next, tensor_shape)
        handles: dict[str, Any] = {}
        from_prev, handles["send_next"], handles["recv_prev"] = self._exchange(
            route.wire.forward, tensor_send_next, recv_prev, tensor_shape
        )
        from_next, handles["send_prev"], handles["recv_next"] = self._exchange(
            route.wire.backward, tensor_send_prev, recv_next, tensor_shape
        )
        handles = {name: handle for name, handle in handles.items() if handle is not None}
        if not wait_on_reqs:
            return from_prev, from_next, handles
        # receives first: a receive that starts by reading a header lets the peer's send complete
        for name in sorted(handles):
            handles[name].wait()
        route.outbox.drain()
        if self.config.batch_p2p_comm and self.config.batch_p2p_sync:
            torch.cuda.synchronize()  # what the host does after batched point-to-point calls
        return from_prev, from_next, None

    def _agree(self, first_payload: Tensor | None, tensor_shape: Any) -> None:
        """Pre-flight: the first call of every rank, before anything is on the wire."""
        route = self._route
        row_shape = tuple(tensor_shape or ()) or None
        if self.config.variable_seq_lengths:
            row_shape = None
        elif row_shape is None and first_payload is not None:
            rows = route.plan.rows_out(route.rank)
            row_shape = (first_payload.shape[0] // rows, *first_payload.shape[1:])
        terms = preflight.terms(route.residual, route.plan, row_shape, self.config.pipeline_dtype)
        preflight.agree(self.pp_group, route.serial, terms)
        route.agreed = True

    def _exchange(
        self, direction: Direction, send: Tensor | None, receive: bool, tensor_shape: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """Start one direction: the tensor to be filled, and the handles of send and receive."""
        leaving = self._next_message(direction.name, "send") if send is not None else None
        arriving = self._next_message(direction.name, "receive") if receive else None
        if send is not None:
            # hosts up to 0.17 empty an output that is still being sent: hold its memory
            send = send.detach().contiguous()
        if self.config.variable_seq_lengths or self._route.residual.check_messages:
            return self._exchange_late(direction, leaving, send, arriving)
        buffer = None
        if arriving is not None:
            rows = self._route.plan.rows_in(arriving.boundary)
            buffer = self._empty((rows * tensor_shape[0], *tensor_shape[1:]))
            self._route.count(arriving, buffer)
        sent, received = direction.exchange(send, buffer, batched=self.config.batch_p2p_comm)
        return buffer, sent, received

    def _exchange_late(
        self,
        direction: Direction,
        leaving: Message | None,
        send: Tensor | None,
        arriving: Message | None,
    ) -> tuple[Tensor | None, Any, Any]:
        sent, late = None, None
        if leaving is not None:
            self._route.outbox.send(direction, leaving, send)
            sent = FinalWait(self._route)
        if arriving is not None:
            late = self._route.inbox.expect(
                direction, arriving, self._empty((0,)), self._route.count
            )
        return (late.tensor if late else None), sent, late

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(
            tuple(shape),
            requires_grad=True,
            device=torch.cuda.current_device(),
            dtype=self.config.pipeline_dtype,
        )

    def _next_message(self, direction: str, verb: str) -> Message:
        if self._route.order is None:
            raise RuntimeError(
                "an interleaved schedule communicated before megatron.core.pipeline_parallel."
                "schedules.get_schedule_table told its order: this Megatron-Core is not one that "
                "megatron_residuals was tested with, or its seams were taken out in mid-step"
            )
        return self._route.order.next(direction, verb)


class FinalWait:
    """Handle of a send that is waited for only when the rank has nothing left to receive."""

    def __init__(self, route: Route) -> None:
        self._route = route

    def wait(self) -> None:
        """Drain the outbox at the end of a step; before, do nothing."""
        if self._route.order is not None and self._route.order.has_received_all:
            self._route.outbox.drain()
