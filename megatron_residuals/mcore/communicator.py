# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The host's point-to-point communicator with payloads of exact width.

The schedules stay the host's. They ask one method for every message; here it allocates what the
plan says will arrive, instead of one fixed shape, and keeps the two directions of travel apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from megatron_residuals.mcore.route import Route, route_of
from megatron_residuals.mcore.wire import Direction

ScheduleTable = Sequence[tuple[int, int]]  # (micro-batch, chunk) in the order of forward passes
HEADER_LENGTH = 3  # payloads have three dimensions


class ResidualP2PCommunicator(P2PCommunicator):
    """``P2PCommunicator`` for models with a route; models without one keep the host's behaviour."""

    _latest: weakref.ref[ResidualP2PCommunicator] | None = None

    def __init__(self, pp_group: dist.ProcessGroup, config: Any) -> None:
        super().__init__(pp_group, config)
        self._route = route_of(config)
        self._arrivals: dict[str, Iterator[int]] | None = None
        if self._route is not None and self._route.plan.layout.num_chunks == 1:
            self._route.begin_step()
        ResidualP2PCommunicator._latest = weakref.ref(self)

    @classmethod
    def announce(cls, table: ScheduleTable) -> None:
        """Tell the communicator of the current step in which order its messages will come.

        An interleaved schedule makes its communicator, then this table, then the first message.
        """
        latest = cls._latest() if cls._latest is not None else None
        if latest is not None and latest._route is not None:
            latest._route.begin_step()
            latest._arrivals = arrivals(latest._route, table)

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
        handles: dict[str, Any] = {}
        from_prev = self._exchange(
            route.wire.forward, tensor_send_next, recv_prev, tensor_shape, handles
        )
        from_next = self._exchange(
            route.wire.backward, tensor_send_prev, recv_next, tensor_shape, handles
        )
        if not wait_on_reqs:
            return from_prev, from_next, handles
        for handle in handles.values():
            handle.wait()
        if self.config.batch_p2p_comm and self.config.batch_p2p_sync:
            torch.cuda.synchronize()  # what the host does after batched point-to-point calls
        return from_prev, from_next, None

    def _exchange(
        self,
        direction: Direction,
        send: Tensor | None,
        receive: bool,
        tensor_shape: Any,
        handles: dict[str, Any],
    ) -> Tensor | None:
        if send is not None and not send.is_contiguous():
            send = send.contiguous()
        send_name, receive_name = (
            ("send_next", "recv_prev") if direction.name == "forward" else ("send_prev", "recv_next")
        )
        boundary = self._next_boundary(direction.name) if receive else None
        if self.config.variable_seq_lengths:
            work, late = self._exchange_unknown(direction, send, boundary)
            if work is not None:
                handles[send_name] = work
            if late is not None:
                handles[receive_name] = late
            return late.tensor if late is not None else None
        buffer = None
        if boundary is not None:
            rows = self._route.plan.rows_in(boundary)
            buffer = self._empty((rows * tensor_shape[0], *tensor_shape[1:]))
            self._count(direction, boundary, buffer)
        sent, received = direction.exchange(send, buffer, batched=self.config.batch_p2p_comm)
        if sent is not None:
            handles[send_name] = sent
        if received is not None:
            handles[receive_name] = received
        return buffer

    def _exchange_unknown(
        self, direction: Direction, send: Tensor | None, boundary: int | None
    ) -> tuple[Any, LateTensor | None]:
        """Exchange payloads whose length the receiver cannot know: a header goes ahead of each."""
        header = None
        if send is not None:
            header = torch.tensor(send.shape, device=send.device, dtype=torch.int64)
        batched = self.config.batch_p2p_comm
        incoming = None
        if boundary is not None:
            incoming = torch.empty(
                HEADER_LENGTH, device=torch.cuda.current_device(), dtype=torch.int64
            )
        header_sent, header_received = direction.exchange(header, incoming, batched=batched)
        sent, _ = direction.exchange(send, None, batched=batched)
        work = None if sent is None else Sent((header_sent, sent), (header, send))
        if boundary is None:
            return work, None
        return work, LateTensor(self, direction, boundary, incoming, header_received)

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(
            tuple(shape),
            requires_grad=True,
            device=torch.cuda.current_device(),
            dtype=self.config.pipeline_dtype,
        )

    def _count(self, direction: Direction, boundary: int, payload: Tensor) -> None:
        size = payload.numel() * payload.element_size()
        self._route.received_bytes[direction.name, boundary] += size

    def _next_boundary(self, direction: str) -> int:
        """The boundary (stage behind the hop) that the next message in a direction crosses."""
        route = self._route
        if route.plan.layout.num_chunks == 1:
            return route.rank if direction == "forward" else route.rank + 1
        if self._arrivals is None:
            raise RuntimeError(
                "an interleaved schedule received before megatron.core.pipeline_parallel.schedules."
                "get_schedule_table told its order: this Megatron-Core is not one that "
                "megatron_residuals was tested with, or its seams were taken out in mid-step"
            )
        return next(self._arrivals[direction])


class Sent:
    """Handle of a payload and its header on their way; keeps both alive until they are gone."""

    def __init__(self, works: tuple[Any, Any], tensors: tuple[Any, Any]) -> None:
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        """Wait for both messages."""
        for work in self._works:
            work.wait()
        self._tensors = ()


class LateTensor:
    """Handle of a payload whose shape is still on its way.

    The schedule gets an empty tensor at once; ``wait`` reads the header, receives the payload and
    gives it to that tensor. Nothing blocks before the schedule itself would.
    """

    def __init__(
        self,
        communicator: ResidualP2PCommunicator,
        direction: Direction,
        boundary: int,
        header: Tensor,
        header_received: Any,
    ) -> None:
        self.tensor = communicator._empty((0,))
        self._communicator, self._direction, self._boundary = communicator, direction, boundary
        self._header, self._header_received = header, header_received

    def wait(self) -> None:
        """Receive the payload (once)."""
        if self._header_received is None:
            return
        self._header_received.wait()
        self._header_received = None
        buffer = torch.empty(
            self._header.tolist(), device=self._header.device, dtype=self.tensor.dtype
        )
        _, received = self._direction.exchange(
            None, buffer, batched=self._communicator.config.batch_p2p_comm
        )
        received.wait()
        self.tensor.data = buffer
        self._communicator._count(self._direction, self._boundary, buffer)


def arrivals(route: Route, table: ScheduleTable) -> dict[str, Iterator[int]]:
    """Boundaries of the messages that reach a rank, in order, for each direction.

    Every rank walks the same table, so the k-th forward message belongs to the k-th forward pass
    that has an input; backward passes take the chunks in reverse.
    """
    layout, rank = route.plan.layout, route.rank
    forward = (layout.stage(rank, chunk) for _, chunk in table)
    backward = (layout.stage(rank, layout.num_chunks - 1 - chunk) + 1 for _, chunk in table)
    return {
        "forward": (stage for stage in forward if stage > 0),
        "backward": (boundary for boundary in backward if boundary < layout.num_stages),
    }
