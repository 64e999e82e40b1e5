# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Messages with a header ahead: for payloads whose length only the sender knows, and for checking.

The receiver's schedule wants a tensor at once, long before the header is there. It gets an empty
one, which is filled when the schedule waits for it; so nothing blocks earlier than without headers,
and no length has to be agreed on in advance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_residuals.pipeline.messages import DIRECTIONS, RECEIVE, SEND, Direction, Message
from megatron_residuals.transport.wire import Delivery, Lane, Parcel

HEADER_LENGTH = 6  # direction, boundary, micro-batch, then the payload's [rows * s, b, h]


class LateTensor:
    """A tensor to be filled, and the handle that fills it; made by an inbox."""

    def __init__(
        self,
        inbox: Inbox,
        lane: Lane,
        message: Message,
        tensor: Tensor,
        on_arrival: Callable[[Message, Tensor], None],
    ) -> None:
        self.tensor, self.message = tensor, message
        self._inbox, self._lane, self._on_arrival = inbox, lane, on_arrival
        self._header: tuple[Tensor, Delivery] | None = None

    def listen(self) -> None:
        """Start receiving the header; the second time does nothing."""
        if self._header is None:
            header = torch.empty(HEADER_LENGTH, device=self.tensor.device, dtype=torch.int64)
            received = self._lane.start(RECEIVE, Parcel(self.message, header))
            self._header = header, received

    def wait(self) -> None:
        """Receive the payload, behind those that were asked for earlier; twice is once.

        Raises:
            RuntimeError: another message arrived than the one that is due.
        """
        self._inbox.receive_through(self)

    def receive(self) -> None:
        """Receive the header and then the payload; for the inbox, in the order of messages."""
        self.listen()
        assert self._header is not None, "listen posts it"
        header, received = self._header
        received.wait()
        direction, boundary, micro_batch, *shape = header.tolist()
        arrived = Message(DIRECTIONS[direction], boundary, micro_batch)
        if arrived != self.message:
            raise RuntimeError(
                f"pipeline messages out of order: due is the {self.message}; arrived is the "
                f"{arrived}. Nothing was computed with it. The neighbours walk different "
                "schedules, or the transport mixes up messages between the same two ranks"
            )
        payload = torch.empty(shape, device=self.tensor.device, dtype=self.tensor.dtype)
        self._lane.start(RECEIVE, Parcel(self.message, payload)).wait()
        self.tensor.data = payload
        self._on_arrival(self.message, payload)


class Inbox:
    """Tensors that schedules asked for and did not wait for yet, oldest first, by direction.

    Only the oldest has a receive posted. A header and its payload follow each other on one process
    group, which gives them to receives in the order of posting; with the header of the second
    posted before the payload of the first, each would get what is meant for the other. Interleaved
    schedules ask for several at a time when their micro-batch groups are larger than the pipeline.
    """

    def __init__(self) -> None:
        self._due: dict[Direction, deque[LateTensor]] = {name: deque() for name in DIRECTIONS}

    def __len__(self) -> int:
        return sum(map(len, self._due.values()))

    def expect(
        self,
        lane: Lane,
        message: Message,
        tensor: Tensor,
        on_arrival: Callable[[Message, Tensor], None],
    ) -> LateTensor:
        """A late tensor for the next message of a direction."""
        late = LateTensor(self, lane, message, tensor, on_arrival)
        due = self._due[message.direction]
        due.append(late)
        due[0].listen()
        return late

    def receive_through(self, late: LateTensor) -> None:
        """Receive everything up to one late tensor, then listen for the one behind it."""
        due = self._due[late.message.direction]
        while late in due:
            due[0].receive()
            due.popleft()
            if due:
                due[0].listen()


class Outbox:
    """Payloads on their way to a receiver that fetches each only when its schedule gets there.

    Waiting for such a send would make two neighbours wait for each other, so an overlapping
    schedule gets no handle of it: the payloads are kept alive here, and waited for at the end of
    the step.
    """

    def __init__(self) -> None:
        self._items: list[tuple[list[Delivery], tuple[Tensor, Tensor]]] = []

    def __len__(self) -> int:
        return len(self._items)

    def send(self, lane: Lane, message: Message, payload: Tensor) -> None:
        """Start sending a header and its payload."""
        header = torch.tensor(
            (DIRECTIONS.index(message.direction), *message[1:], *payload.shape),
            device=payload.device,
            dtype=torch.int64,
        )
        sent = [lane.start(SEND, Parcel(message, item)) for item in (header, payload)]
        self._items = [item for item in self._items if not all(d.is_completed() for d in item[0])]
        self._items.append((sent, (header, payload)))

    def drain(self) -> None:
        """Wait until everything has arrived."""
        while self._items:
            deliveries, _ = self._items.pop(0)
            for delivery in deliveries:
                delivery.wait()
