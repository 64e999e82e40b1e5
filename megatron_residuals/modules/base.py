# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The four verbs of a residual mechanism: open, read, write, close.

    embedding --open--> state --read--> x --sublayer--> y --write--> state ... --close--> hidden

``SublayerResidual`` (read, write) stands at every attention and MLP, ``ResidualHead`` (close) once,
in front of the final norm. No mechanism has parameters at the start, so open is a plain function
of the mechanism's entry (``Mechanism.open``).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

StateT = TypeVar("StateT")
PendingT = TypeVar("PendingT")


class Float32Module(nn.Module):
    """A module whose float32 parameters stay float32 when the model around it is cast to 16 bit.

    The coefficients of a mechanism are few and sensitive; Megatron's Float16Module casts everything
    it wraps, so the cast is undone here, where every version of the host comes through.

    Parameters born on the meta device get their initial values with their memory, whichever of
    ``to_empty`` and the host's ``to_empty_if_meta_device`` gives it to them.
    """

    def reset_parameters(self) -> None:
        """Set the parameters to their initial values."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float32Module:
        def keep_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.is_floating_point() and moved.dtype.itemsize < 4:
                return tensor.to(moved.device, torch.promote_types(tensor.dtype, torch.float32))
            return moved

        before = dict(self.named_parameters(recurse=recurse))
        super()._apply(keep_float32, recurse)  # type: ignore[no-untyped-call]
        born = {
            n: p for n, p in self.named_parameters(recurse=recurse) if leaves_meta(before[n], p)
        }
        for name, parameter in born.items():
            # torch makes a new one there, without the tags of the old, such as sequence_parallel
            vars(parameter).update(vars(before[name]))
        if born:
            self.reset_parameters()
        return self


def new_parameter(*shape: int, device: torch.device | None) -> nn.Parameter:
    """One without values, in float32, or float64 where that is torch's default dtype."""
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


def leaves_meta(before: Tensor, after: Tensor) -> bool:
    """Whether a tensor without memory has been given some."""
    return before.is_meta and not after.is_meta


class SublayerResidual(Float32Module, ABC, Generic[StateT, PendingT]):
    """What one sublayer reads from the residual state and how it writes its output back.

    ``read``, then ``write``. Parameters are used inside ``forward`` alone, which reading calls as
    a module, so that hooks of wrappers fire that gather parameters on a call. By default
    ``forward`` is the read.
    """

    def begin(self, readers: Sequence[SublayerResidual[StateT, PendingT]], state: StateT) -> StateT:
        """What consecutive sublayers do together in front of the first of them, which is asked."""
        return state

    def read(self, state: StateT) -> tuple[Tensor, PendingT]:
        """Input of the sublayer x [..., d], and what ``write`` needs besides its output."""
        x: Tensor
        x, pending = self(state)
        return x, pending

    @abstractmethod
    def reread(self, pending: PendingT) -> Tensor:
        """What ``read`` returned, computed again from what it left."""

    def rereader(self, pending: PendingT) -> Callable[[], Tensor]:
        """``reread`` as a call without arguments, which may hold less than the pending write."""
        return functools.partial(self.reread, pending)

    @abstractmethod
    def write(self, pending: PendingT, output: Tensor) -> StateT:
        """The state after the sublayer returned output [..., d] (no residual inside)."""


class ResidualHead(Float32Module, ABC, Generic[StateT]):
    """How the final state becomes one hidden state.

    Call the module to close (so that hooks of data-parallel wrappers fire).
    """

    def forward(self, state: StateT) -> Tensor:
        """``close``."""
        return self.close(state)

    @abstractmethod
    def close(self, state: StateT) -> Tensor:
        """The hidden state [..., d] in front of the final norm."""
