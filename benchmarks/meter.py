# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the transport's own work from outside: CPU time by kind of work, and copied rows.

The product knows nothing of this. `Meter.install` wraps the functions at the edge of a stage; what
runs inside them is charged to the innermost one, and what only waits for the wire to none.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_residuals.mcore.communicator import ResidualP2PCommunicator
from megatron_residuals.mcore.route import Route
from megatron_residuals.mcore.stage_io import StageIO, _Pack
from megatron_residuals.transport.late import LateTensor, Outbox
from megatron_residuals.transport.source_cache import SourceCache
from megatron_residuals.transport.wire import Delivery, Lane

OWN_WORK = ("pack", "unpack", "cache", "bookkeeping")
WIRE = "wire"
TARGETS: tuple[tuple[type, str, str], ...] = (
    (StageIO, "exit", "pack"),
    (_Pack, "forward", "pack"),
    (_Pack, "backward", "pack"),
    (StageIO, "begin", "unpack"),
    (StageIO, "hidden_row", "unpack"),
    (StageIO, "enter", "unpack"),
    (SourceCache, "stash", "cache"),
    (SourceCache, "fetch", "cache"),
    (SourceCache, "_deposit", "cache"),
    (SourceCache, "collect", "cache"),
    (Route, "begin_step", "bookkeeping"),
    (ResidualP2PCommunicator, "_communicate", "bookkeeping"),
    (LateTensor, "wait", WIRE),
    (Outbox, "drain", WIRE),
    (Lane, "exchange", WIRE),
    (Lane, "start", WIRE),
    (Delivery, "wait", WIRE),
)
# Operations whose result is new memory without anything copied into it.
ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


class Meter:
    """CPU seconds of this thread by kind of work, each moment charged to the innermost kind.

    Attributes:
        seconds: by the kinds of `OWN_WORK` and `WIRE`.
        current: the kind of work that is going on, or None outside the transport.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._kinds: list[str] = []
        self._since = 0.0
        self._clock_s = min(_clock_cost() for _ in range(100))

    @property
    def current(self) -> str | None:
        return self._kinds[-1] if self._kinds else None

    def charged(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """The function, its time charged to a kind of work."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._charge()
            self._kinds.append(kind)
            try:
                return function(*args, **kwargs)
            finally:
                self._charge()
                self._kinds.pop()

        return timed

    def _charge(self) -> None:
        # Thread time, not wall time: a core that others use too is no work of the transport.
        now = time.thread_time()
        if self._kinds:
            self.seconds[self._kinds[-1]] += now - self._since - self._clock_s
        self._since = now

    @contextmanager
    def install(self) -> Iterator[Meter]:
        """Wrap the transport's functions in this process for the length of a ``with`` block."""
        stock = [(owner, name, vars(owner)[name]) for owner, name, _ in TARGETS]
        try:
            for owner, name, kind in TARGETS:
                self._wrap(owner, name, kind)
            yield self
        finally:
            for owner, name, function in stock:
                setattr(owner, name, function)

    def _wrap(self, owner: type, name: str, kind: str) -> None:
        function = vars(owner)[name]
        if isinstance(function, staticmethod):
            setattr(owner, name, staticmethod(self.charged(function.__func__, kind)))
            return
        setattr(owner, name, self.charged(function, kind))


class CopyCounter(TorchDispatchMode):
    """Elements that the transport's own work writes to new memory, and rows that backward joins.

    Attributes:
        written: elements by kind of work, forward and backward together.
        joined_by_autograd: elements of gradients [k * s, b, h] that splitting a payload joins again
            in its backward; found by the payload's trailing dimensions [b, h].
    """

    def __init__(self, meter: Meter, row_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.written: Counter[str] = Counter()
        self.joined_by_autograd = 0
        self._meter, self._row_shape = meter, row_shape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        kind = self._meter.current
        if kind in OWN_WORK and name not in ALLOCATIONS:
            # a result in the memory of an argument is a view, or was changed where it is
            known = set() if name == "copy_" else {_memory(t) for t in _tensors((args, kwargs))}
            self.written[kind] += sum(
                t.numel() for t in _tensors(result) if _memory(t) not in known
            )
        elif kind is None and name == "cat" and self._is_payload(result):
            self.joined_by_autograd += result.numel()
        return result

    def _is_payload(self, tensor: torch.Tensor) -> bool:
        sequence, *rest = self._row_shape
        return list(tensor.shape[1:]) == rest and tensor.shape[0] % sequence == 0


def _clock_cost() -> float:
    """Seconds that lie between two readings with nothing in between."""
    first = time.thread_time()
    return time.thread_time() - first


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
