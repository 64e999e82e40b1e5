# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that autograd keeps between a forward and its backward.

    with RetainedBytes(exclude=model.parameters()) as retained:
        loss = model(batch)
        print(retained.measure())
        loss.backward()
        assert retained.measure().bytes == 0

Every tensor that an operation saves, built in or of a ``torch.autograd.Function``, passes through
``saved_tensors_hooks``. It goes on living in a holder, and holders are watched weakly: one that
autograd has dropped is no longer counted, one whose storage was emptied counts nothing.

What it cannot see: tensors kept for backward outside of autograd (attributes of a ``ctx``,
closures, the arguments of ``torch.utils.checkpoint`` without reentrance). `reachable_bytes` finds
those, together with everything else that is alive.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

import torch
from torch import Tensor

Shape: TypeAlias = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Retained:
    """What is kept at one moment, each storage once.

    Attributes:
        bytes: size of the storages.
        num_storages: storages that are not empty.
        by_shape: bytes by shape and dtype of the largest tensor seen on a storage.
    """

    bytes: int
    num_storages: int
    by_shape: dict[Shape, int]

    def __str__(self) -> str:
        """The shapes, the largest first, one line each."""
        lines = [f"{self.bytes} bytes in {self.num_storages} storages"]
        for (shape, dtype), size in sorted(self.by_shape.items(), key=lambda item: -item[1]):
            lines.append(f"  {size:>12}  {list(shape)} {str(dtype).removeprefix('torch.')}")
        return "\n".join(lines)


class _Saved:
    """The holder of one saved tensor; it lives as long as autograd may ask for the tensor."""

    __slots__ = ("__weakref__", "key", "storage", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        # Without its history: an operation that saves its own output would keep itself alive.
        self.tensor = tensor.detach()
        self.storage = tensor.untyped_storage()
        self.key = self.storage._cdata


class RetainedBytes:
    """Watches, for the length of a ``with`` block, what this thread's operations save.

    Nested replays are seen like everything else, and so is a backward on another thread that the
    autograd engine runs for this one. Inside other saved-tensor hooks, those apply instead.

    Args:
        exclude: tensors whose storages are never counted, as parameters.
        beside: gives tensors that are kept beside autograd and count as well, as those in a cache.
        sample_backward: take a sample whenever a backward fetches a saved tensor, as at the height
            of a replay. Slow.

    Attributes:
        peak: the largest number of bytes of any `sample`.
    """

    def __init__(
        self,
        *,
        exclude: Iterable[Tensor] = (),
        beside: Callable[[], Iterable[Tensor]] = tuple,
        sample_backward: bool = False,
    ) -> None:
        self.peak = 0
        self._beside = beside
        self._excluded: dict[int, Tensor] = {}
        self._sample_backward = sample_backward
        self.exclude(*exclude)
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> RetainedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def exclude(self, *tensors: Tensor) -> None:
        """Never count the storages of these from now on."""
        # the tensors too: the key of one that has died may come back
        self._excluded.update((_key(tensor), tensor) for tensor in tensors)

    def measure(self) -> Retained:
        """What is kept now."""
        saved = [holder.tensor for holder in self._saved]
        return _count([*saved, *self._beside()], self._excluded)

    def sample(self) -> int:
        """Bytes kept now, which also count for the `peak`."""
        storages = {saved.key: saved.storage for saved in self._saved}
        for tensor in self._beside():
            storages[_key(tensor)] = tensor.untyped_storage()
        now = sum(
            storage.nbytes() for key, storage in storages.items() if key not in self._excluded
        )
        self.peak = max(self.peak, now)
        return now

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved.add(saved)
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        if self._sample_backward:
            self.sample()
        return saved.tensor


def reachable_bytes(exclude: Iterable[Tensor] = ()) -> Retained:
    """Every tensor that Python can reach, kept for backward or not; slow.

    Tensors saved by built-in operations live outside of Python, unless a `RetainedBytes` watches.
    """
    gc.collect()
    # type, not isinstance: that would wake up lazy objects of other libraries
    tensors = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
    return _count(tensors, {_key(tensor) for tensor in exclude})


def _count(tensors: Iterable[Tensor], excluded: Container[int]) -> Retained:
    largest: dict[int, Tensor] = {}
    for tensor in tensors:
        key = _key(tensor)
        if key in excluded or tensor.untyped_storage().nbytes() == 0:
            continue
        if key not in largest or _rank(tensor) > _rank(largest[key]):
            largest[key] = tensor
    by_shape: dict[Shape, int] = {}
    for tensor in largest.values():
        shape = (tuple(tensor.shape), tensor.dtype)
        by_shape[shape] = by_shape.get(shape, 0) + tensor.untyped_storage().nbytes()
    return Retained(sum(by_shape.values()), len(largest), by_shape)


def _rank(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.numel(), tuple(tensor.shape)


def _key(tensor: Tensor) -> int:
    # the storage object, not its memory: an emptied storage has no address
    return int(tensor.untyped_storage()._cdata)
