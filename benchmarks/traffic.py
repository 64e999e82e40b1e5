# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that operations read and write, in planes: bf16 tensors of tokens x hidden.

PyTorch operations are seen by a dispatch mode and counted by their tensors: arguments read once,
results written once, views cost nothing. Triton kernels are counted where they are launched, by the
tensors behind their pointers, each once: the traffic of a kernel that goes over its data once. Of a
table of addresses the tensors in it count, twice where the kernel adds to them. What these figures
are for the kernels of this package, `megatron_residuals.pipeline.traffic` says in advance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

OURS = "megatron_residuals"
ADDRESSES = "address_kernel"  # writes a table: its arguments are read by the kernels that get it
ADDS_TO = {"read_sources_backward_kernel": 1, "accumulate_kernel": 1}  # which argument of a kernel
FREE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach"}


class TrafficMeter(TorchDispatchMode):
    """Bytes by operation: ``read``, ``written`` and, for Triton, ``launched``."""

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()
        self._tables: dict[int, list[Tensor]] = {}

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(sum(kind.values()) for kind in (self.read, self.written, self.launched))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.namespace != OURS and name not in FREE and not func.is_view:
            inputs, outputs = _tensors((args, kwargs)), _tensors(result)
            if name == "copy_" or name.startswith("fill"):
                inputs = inputs[1:]
            elif name.endswith("_like") or name.startswith("new_"):
                inputs = []  # an example of the shape
            memory = {_memory(tensor) for tensor in _tensors((args, kwargs))}
            changed = func._schema.is_mutable
            aliases = all(_memory(tensor) in memory for tensor in outputs) and not changed
            if not aliases:
                self.read[name] += sum(touched(tensor) for tensor in inputs)
                self.written[name] += sum(touched(tensor) for tensor in outputs)
        return result

    @contextmanager
    def running(self) -> Iterator[TrafficMeter]:
        """Count what runs inside, Triton's launches included."""
        with self, _launches(self._launch):
            yield self

    def _launch(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = _tensors((args, kwargs))
        if name == ADDRESSES:
            table, *listed = tensors
            first, present = args[len(tensors) :]
            known = self._tables.get(table.data_ptr(), []) if first else []
            there = [each for i, each in enumerate(listed) if present >> i & 1]
            self._tables[table.data_ptr()] = known + there
            return
        for table in list(tensors):
            tensors += self._tables.get(table.data_ptr(), []) if table.dtype == torch.int64 else []
        distinct = {(_memory(t), t.data_ptr(), t.numel()): t for t in tensors}
        if name in ADDS_TO:
            added = self._tables[args[ADDS_TO[name]].data_ptr()]
            self.launched[name] += sum(map(touched, added))
        self.launched[name] += sum(touched(tensor) for tensor in distinct.values())


def planes(num_bytes: float, tokens: int, hidden: int) -> float:
    """Bytes in bf16 tensors of [tokens, hidden]."""
    return num_bytes / (2 * tokens * hidden)


def touched(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor, each once, however often a view repeats it."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride != 0 or size == 0 else 1
    return elements * tensor.element_size()


@contextmanager
def _launches(seen: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return

    def spying(owner: Any) -> Any:
        stock = owner.run

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            name = getattr(self, "__name__", None) or self.fn.__name__
            seen(name, args, kwargs)
            # an interpreter copies its arguments, which a launch does not
            with _disable_current_modes():
                return stock(self, *args, **kwargs)

        return mock.patch.object(owner, "run", run)

    with spying(JITFunction), spying(InterpretedFunction):
        yield


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
