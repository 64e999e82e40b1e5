# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Writes down what the host's schedules really do, in the vocabulary of the simulator.

Nothing is derived from the order that is to be checked: a pass is known by the arguments of the
host's own forward step, everything else by identity. A sent tensor is the output, or the gradient,
of a pass; a received one is what a later pass is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from megatron.core.pipeline_parallel import schedules

from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.messages import Message
from megatron_residuals.pipeline.schedule import Pass
from megatron_residuals.planner.simulate.steps import Call, Program, Wait


class _Handle:
    """A request of the host's that notes when it is waited for."""

    def __init__(self, recorder: Recorder, verb: str, tensor: Any, request: Any) -> None:
        self._recorder, self._what, self._request = recorder, (verb, tensor), request

    def wait(self) -> None:
        self._recorder.events.append(("wait", *self._what))
        self._request.wait()


class Recorder:
    """The events of one step on one rank; `program` names them when the step is over."""

    def __init__(self, layout: StageLayout, rank: int) -> None:
        self.events: list[tuple[Any, ...]] = []
        self._layout, self._rank = layout, rank
        self._passes: dict[int, Pass] = {}  # by the object that a forward returned
        self._roles: dict[int, Message | None] = {}
        self._alive: list[Any] = []  # an id means something only as long as its object is there
        self._bytes: dict[int, int] = {}

    def _name(self, value: Any, direction: str, boundary: int, micro_batch: int) -> None:
        for tensor in value if isinstance(value, list) else [value]:
            self._alive.append(tensor)
            self._roles[id(tensor)] = Message(direction, boundary, micro_batch)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Note everything that the host's schedules do."""
        communicator = schedules.P2PCommunicator
        with (
            mock.patch.object(schedules, "forward_step", self._forward(schedules.forward_step)),
            mock.patch.object(schedules, "backward_step", self._backward(schedules.backward_step)),
            mock.patch.object(communicator, "_communicate", self._call(communicator._communicate)),
        ):
            yield self

    def _forward(self, forward_step: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            stage = self._layout.stage(self._rank, kwargs.get("vp_stage") or 0)
            micro_batch = kwargs["current_microbatch"]
            done = Pass(True, micro_batch, stage)
            self.events.append(("pass", done))
            self._name(args[4], "forward", stage, micro_batch)  # its input tensor
            output, num_tokens = forward_step(*args, **kwargs)
            self._name(output, "forward", stage + 1, micro_batch)
            (tensor,) = output if isinstance(output, list) else [output]
            self._passes[id(tensor)] = done
            return output, num_tokens

        return forward

    def _backward(self, backward_step: Any) -> Any:
        def backward(input_tensor: Any, output: Any, output_grad: Any, *rest: Any) -> Any:
            (tensor,) = output if isinstance(output, list) else [output]
            done = self._passes[id(tensor)]._replace(forward=False)
            self.events.append(("pass", done))
            self._name(output_grad, "backward", done.stage + 1, done.micro_batch)
            grad = backward_step(input_tensor, output, output_grad, *rest)
            self._name(grad, "backward", done.stage, done.micro_batch)
            return grad

        return backward

    def _call(self, communicate: Any) -> Any:
        def call(communicator: Any, **kwargs: Any) -> Any:
            blocking = kwargs.get("wait_on_reqs", True)
            sends = [kwargs[f"tensor_send_{to}"] for to in ("next", "prev")]
            from_prev, from_next, requests = communicate(communicator, **kwargs)
            received = [from_prev, from_next]
            self._alive += [*sends, *received]
            self.events.append(("call", sends, received, blocking))
            self._bytes |= {id(t): t.nbytes for t in received if t is not None}
            if not blocking:
                names = ("send_next", "send_prev", "recv_prev", "recv_next")
                tensors = dict(zip(names, (*sends, *received), strict=True))
                requests = {
                    name: _Handle(self, name.split("_")[0], tensors[name], request)
                    for name, request in requests.items()
                }
            return from_prev, from_next, requests

        return call

    def program(self) -> Program:
        """The events as steps; calls that move nothing left out."""
        verbs = {"send": "send", "recv": "receive"}
        found: Program = []
        for kind, *what in self.events:
            if kind == "pass":
                found.append(what[0])
            elif kind == "wait":
                found.append(Wait(verbs[what[0]], self._message(what[1])))
            else:
                sends, received = (
                    tuple(self._message(t) for t in tensors if t is not None)
                    for tensors in what[:2]
                )
                if sends or received:
                    found.append(Call(sends, received, what[2]))
        return found

    def received_bytes(self) -> dict[Message, int]:
        """Bytes of every received message."""
        return {self._message_of(key): size for key, size in self._bytes.items()}

    def _message(self, tensor: Any) -> Message:
        return self._message_of(id(tensor))

    def _message_of(self, key: int) -> Message:
        message = self._roles[key]
        assert message is not None
        return message
