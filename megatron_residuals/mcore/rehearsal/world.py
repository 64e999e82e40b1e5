# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A rank of a world of any size in one process: torch's fake process group, and an echo as store.

Collectives return at once and move nothing. What a rank asks of another is answered with what it
has said itself, so that agreements are reached and their terms can be looked at.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend "fake")
from torch.distributed.distributed_c10d import Store

FAKE = "fake"


class EchoStore(Store):
    """A key-value store in which every rank says what this one says.

    A key that ends in the number of a rank has the last value given to the same key of any rank.

    Attributes:
        said: the values by key, for ranks without the rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.said: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Keep a value."""
        self.said[_of_any_rank(key)] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        """What this rank has said; nothing where it has said nothing."""
        return self.said.get(_of_any_rank(key), b"")

    def add(self, key: str, amount: int) -> int:
        """The sum of what this rank has added."""
        total = int(self.get(key) or b"0") + amount
        self.set(key, str(total))
        return total

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Nobody has to be waited for."""

    def check(self, keys: list[str]) -> bool:
        """Everything is there."""
        return True

    def delete_key(self, key: str) -> bool:
        """Kept all the same, to be looked at."""
        return True


def _of_any_rank(key: str) -> str:
    before, _, last = key.rpartition("/")
    return before if last.isdecimal() else key


@contextlib.contextmanager
def as_rank(rank: int, size: int) -> Iterator[EchoStore]:
    """This process is one rank of a world, and every process group made in it is fake."""
    environment = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(size)}
    store, new_group = EchoStore(), dist.new_group

    def new_fake_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.update(backend=FAKE, timeout=None, pg_options=None)
        return new_group(*args[:1], **kwargs)

    def all_gather_object(gathered: list[Any], mine: Any, group: Any = None) -> None:
        gathered[:] = [mine] * len(gathered)

    def leave_as_it_is(*args: Any, **kwargs: Any) -> None:
        return None

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        for name, value in (
            ("new_group", new_fake_group),
            ("all_gather_object", all_gather_object),
            ("broadcast_object_list", leave_as_it_is),
        ):
            stack.enter_context(mock.patch.object(dist, name, value))
        dist.init_process_group(FAKE, store=store, rank=rank, world_size=size)
        try:
            yield store
        finally:
            dist.destroy_process_group()
