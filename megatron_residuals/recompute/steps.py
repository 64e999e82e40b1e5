# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""How one sublayer is run: everything kept, or its input and the streams given up and replayed.

A step is called for every sublayer of a stage in order, with the residual module, the state and the
bare sublayer F. Giving up a tensor means emptying its storage once its consumers have run; the
tensor objects, and what autograd saved of them, stay. A hook on the gradient of a later tensor
fills the storages again, in the order in which they were computed, before one is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from megatron_residuals.modules import ResidualState, StreamState, SublayerResidual

Sublayer = Callable[[Tensor], Tensor]


class Step(Protocol):
    """Runs one sublayer on a state."""

    def __call__(
        self, residual: SublayerResidual[Any, Any], state: Any, sublayer: Sublayer
    ) -> ResidualState:
        """The state after the sublayer."""


def plain_step(
    residual: SublayerResidual[Any, Any], state: Any, sublayer: Sublayer
) -> ResidualState:
    """Read, run, write; autograd keeps what it wants."""
    x, pending = residual.read(state)
    written: ResidualState = residual.write(pending, sublayer(x))
    return written


class Replay:
    """Tensors whose memory is given up, and how to compute them again."""

    def __init__(self) -> None:
        self._steps: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def remember(self, tensor: Tensor, compute: Callable[[], Tensor]) -> None:
        """Note how a tensor was computed; in the order of computation."""
        self._steps.append((tensor, compute))

    @staticmethod
    def empty(tensor: Tensor) -> None:
        """Give up the memory of a remembered tensor, whose consumers have run."""
        tensor.untyped_storage().resize_(0)

    def arm(self, tensor: Tensor) -> None:
        """Replay when the gradient of a later tensor is there; at once if it will have none."""
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self._fire())
        else:
            self._fire()

    @torch.no_grad()
    def _fire(self) -> None:
        steps, self._steps = self._steps, []
        for tensor, compute in steps:
            storage, again = tensor.untyped_storage(), compute().untyped_storage()
            if storage.size() == 0:
                storage.resize_(again.size())
                storage.copy_(again)


class MixStep:
    """Gives up the input of every sublayer; attention and MLP are never run again."""

    def __call__(
        self, residual: SublayerResidual[Any, Any], state: Any, sublayer: Sublayer
    ) -> ResidualState:
        """Read, run, forget what was read, write."""
        if not torch.is_grad_enabled():
            return plain_step(residual, state, sublayer)
        replay = Replay()
        x, pending = residual.read(state)
        replay.remember(x, residual.rereader(pending))
        # a tensor of our own: the host hooks the recomputation of its norm, which reads x, to what
        # the sublayer returns, and of two hooks on one tensor the host's would run first
        output = sublayer(x)
        output = output.view_as(output)
        replay.empty(x)
        replay.arm(output)
        written: ResidualState = residual.write(pending, output)
        return written


class GroupStep:
    """Keeps the streams once for every group of sublayers, and each sublayer's output.

    Inside a group the streams and the sublayers' inputs are given up; the replay mixes them again
    from the streams at the group's start and the kept outputs (mHC, section 4.3.2).

        sublayer        0        1        2     |  3   …      r = 3
        streams in    kept    given up given up | kept
        x            given up given up given up |
        y              kept     kept     kept   |
    """

    def __init__(self, length: int, num_sublayers: int) -> None:
        self._length, self._left, self._position = length, num_sublayers, 0
        self._replay, self._finished = Replay(), Replay()
        self._behind: Callable[[], Tensor] | None = None
        self._used: list[Tensor] = []

    def __call__(
        self, residual: SublayerResidual[Any, Any], state: StreamState, sublayer: Sublayer
    ) -> ResidualState:
        """Read, run, write; forget inside the group, arm its replay behind it."""
        if not torch.is_grad_enabled():
            return plain_step(residual, state, sublayer)
        x, pending = residual.read(state)
        self._arrive(pending.streams)
        replay = self._replay
        replay.remember(x, residual.rereader(pending))
        output = sublayer(x)
        replay.empty(x)
        written: StreamState = residual.write(pending, output)
        self._behind = lambda: residual.write(pending, output).settled().streams
        self._position += 1
        self._left -= 1
        if self._left == 0:
            written = written.settled()
            self._finish()
            self._arrive(written.streams)
        elif self._position == self._length:
            self._finish()
        return written

    def _arrive(self, streams: Tensor) -> None:
        """Streams are there, so those in front of the previous sublayer have been used."""
        for used in self._used:
            Replay.empty(used)
        self._used = []
        if self._position == 0:
            self._finished.arm(streams)
        else:
            assert self._behind is not None, "set by the sublayer in front"
            self._replay.remember(streams, self._behind)
            self._used.append(streams)

    def _finish(self) -> None:
        self._finished, self._replay, self._position = self._replay, Replay(), 0


class NarrowStep:
    """A step whose sublayers compute in another dtype than the state has: 16 bit in float32."""

    def __init__(self, step: Step, dtype: torch.dtype) -> None:
        self._step, self._dtype = step, dtype

    def __call__(
        self, residual: SublayerResidual[Any, Any], state: Any, sublayer: Sublayer
    ) -> ResidualState:
        """The step on inputs of that dtype, which are what is kept or given up."""
        return self._step(cast(Any, _Narrow(residual, self._dtype)), state, sublayer)


class _Narrow:
    """A residual module that is read in one dtype and written in that of the state."""

    def __init__(self, residual: SublayerResidual[Any, Any], dtype: torch.dtype) -> None:
        self._residual, self._dtype, self._wide = residual, dtype, dtype

    def read(self, state: Any) -> tuple[Tensor, Any]:
        x, pending = self._residual.read(state)
        self._wide = x.dtype
        return x.to(self._dtype), pending

    def rereader(self, pending: Any) -> Callable[[], Tensor]:
        reread, dtype = self._residual.rereader(pending), self._dtype
        return lambda: reread().to(dtype)

    def write(self, pending: Any, output: Tensor) -> Any:
        return self._residual.write(pending, output.to(self._wide))
