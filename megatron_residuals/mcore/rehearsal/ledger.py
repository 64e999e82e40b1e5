# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The storages of a step, each once, from the operation that makes it until the last reference.

A storage that is emptied and filled again, as norms that are recomputed, comes and goes with its
bytes. What lives on when the step is over (weights, gradients, states of the optimizer) counts from
the start, since the next step begins with it.
"""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_residuals.mcore.rehearsal.places import Places
from megatron_residuals.mcore.rehearsal.values import tensors_in

PAYLOADS = "payloads"


@dataclass(frozen=True)
class Peak:
    """The moment of a step with most bytes.

    Attributes:
        bytes: by what they are; what lives through the step first.
        place: what was at work.
    """

    bytes: Mapping[str, int]
    place: str

    @property
    def total(self) -> int:
        """Of all kinds."""
        return sum(self.bytes.values())


class Ledger(TorchDispatchMode):
    """Writes down, for the length of a ``with`` block, every storage that an operation makes."""

    def __init__(self, places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = places
        self._serials: dict[int, int] = {}  # of storages that exist, by their address
        self._sizes: list[int] = []
        self._kinds: list[str] = []
        self._events = array("q")  # serial, bytes more or fewer, place; one behind the other
        self.messages: Counter[str] = Counter()
        self.message_bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a look at the device or the layout
            return found
        for tensor in tensors_in(found):
            self._meet(tensor, func)
        if func.namespace == "c10d":
            self._communicated(func, args)
        return found

    def _meet(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._serials:
            self.look_again(storage)
            return
        serial = len(self._sizes)
        self._serials[storage._cdata] = serial
        self._sizes.append(0)
        self._kinds.append(self._places.kind(tensor, func.namespace))
        self._write(serial, storage.nbytes())
        weakref.finalize(storage, self._forget, storage._cdata)

    def _write(self, serial: int, size: int) -> None:
        if size != self._sizes[serial]:
            self._events.extend((serial, size - self._sizes[serial], self._places.number))
            self._sizes[serial] = size

    def _forget(self, address: int) -> None:
        self._write(self._serials.pop(address), 0)

    def look_again(self, storage: torch.UntypedStorage) -> None:
        """A storage may have another size now."""
        serial = self._serials.get(storage._cdata)
        if serial is not None:
            self._write(serial, storage.nbytes())

    def _communicated(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func.__name__.partition(".")[0].strip("_")
        self.messages[name] += 1
        tensors = list(tensors_in(args))
        self.message_bytes[name] += sum(tensor.nbytes for tensor in tensors)
        if name in ("send", "recv"):
            for tensor in tensors:
                serial = self._serials.get(tensor.untyped_storage()._cdata)
                if serial is not None:
                    self._kinds[serial] = PAYLOADS

    def serials(self, tensors: Iterable[Tensor]) -> set[int]:
        """The storages of tensors, by number; those made elsewhere are left out."""
        found = (self._serials.get(each.untyped_storage()._cdata) for each in tensors)
        return {serial for serial in found if serial is not None}

    def peak(self, lasting: Mapping[str, set[int]]) -> Peak:
        """The fullest moment.

        Args:
            lasting: storages that live through the step, by what they are.
        """
        kept = {name: sum(self._sizes[i] for i in found) for name, found in lasting.items()}
        skipped = set().union(*lasting.values())
        at = self._fullest(skipped)
        now: Counter[str] = Counter()
        for serial, change, _ in _by_three(self._events[: at + 3]):
            if serial not in skipped:
                now[self._kinds[serial]] += change
        place = self._events[at + 2] if self._events else 0
        return Peak({**kept, **{name: n for name, n in now.items() if n}}, self._places.text(place))

    def _fullest(self, skipped: set[int]) -> int:
        """Index of the event behind which there is most."""
        total = most = at = 0
        for index, (serial, change, _) in enumerate(_by_three(self._events)):
            if serial not in skipped:
                total += change
                if total > most:
                    most, at = total, 3 * index
        return at


def _by_three(events: array[int]) -> Iterator[tuple[int, int, int]]:
    each = iter(events)
    return zip(each, each, each, strict=True)


@contextmanager
def ledger(places: Places) -> Iterator[Ledger]:
    """A ledger that also hears of storages that are emptied and filled again."""
    stock = torch.UntypedStorage.resize_
    with Ledger(places) as book:

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resized = stock(storage, size)
            book.look_again(storage)
            return resized

        with mock.patch.object(torch.UntypedStorage, "resize_", resize):
            yield book
