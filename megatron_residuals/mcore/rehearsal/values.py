# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fake tensors have no values, but some values decide shapes: how many tokens an expert gets.

Whatever is computed from integers, masks and single numbers that are known is computed for real
beside the fake operation, and asked for where the host reads a number out of a tensor. Known are
constants, what the data loader gives, and where tokens are routed: evenly, each to the experts
behind those of the last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

MOST = 1 << 22  # elements: more decide no shape
_ATEN = torch.ops.aten
_NUMBERS = (_ATEN.item.default, _ATEN._local_scalar_dense.default, _ATEN.is_nonzero.default)
_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


class KnownValues(TorchDispatchMode):
    """Computes known integers and masks for real. A number that nobody knows is 0, a mask False."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._real: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def know(self, fake: Tensor, real: Tensor) -> None:
        """From now on the values of a fake tensor are those of a real one."""
        self._real[fake] = real

    def of(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor, if they are known."""
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.numel() <= MOST else None
        return self._real.get(tensor)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a look at the device or the layout
            return func(*args, **kwargs)
        if func in _NUMBERS:
            return self.number(args[0], func is _ATEN.is_nonzero.default)
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        real = self._really(func, args, kwargs)
        if func in (_ATEN.masked_select.default, _ATEN.nonzero.default, _ATEN.index.Tensor):
            found = self._of_unknown_length(func, args, kwargs, real)
        else:
            found = func(*args, **kwargs)
        if isinstance(real, Tensor) and isinstance(found, FakeTensor):
            self._real[found] = real
        elif isinstance(real, list | tuple):
            for fake, value in zip(found, real, strict=True):
                self._real[fake] = value
        return found

    def number(self, tensor: Tensor, as_bool: bool) -> bool | int | float | complex:
        """The number in a tensor."""
        real = self.of(tensor)
        with _outside_modes():
            number = (torch.zeros((), dtype=tensor.dtype) if real is None else real).item()
        return bool(number) if as_bool else number

    def _really(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """The result on known values; None where it is not known."""
        leaves = list(tensors_in((args, tuple(kwargs.values()))))
        if any(self.of(leaf) is None for leaf in leaves) or not _is_wanted(func, leaves, kwargs):
            self._forget(func, args)
            return None
        with _outside_modes():
            args, kwargs = tree_map_only(Tensor, self.of, (args, kwargs))
            real = func(*args, **kwargs)
        return real if _is_discrete(real) else None

    def _forget(self, func: Any, args: tuple[Any, ...]) -> None:
        if func._schema.is_mutable and args and isinstance(args[0], FakeTensor):
            self._real.pop(args[0], None)

    def _of_unknown_length(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, real: Tensor | None
    ) -> Tensor:
        if real is not None:
            return torch.empty(real.shape, dtype=real.dtype)
        if func is _ATEN.masked_select.default and (mask := self.of(args[1])) is not None:
            return args[0].new_empty(_count(mask) * (args[0].numel() // mask.numel()))
        if func is _ATEN.index.Tensor:
            return func(args[0], [self._index(index) for index in args[1]], **kwargs)
        return func(*args, **kwargs)

    def _index(self, index: Tensor | None) -> Tensor | None:
        """A mask of one dimension as the positions in it, whose number is known."""
        mask = None if index is None or index.dtype != torch.bool else self.of(index)
        if mask is None or mask.ndim != 1:
            return index
        return torch.empty(_count(mask), dtype=torch.int64)

    def _communicate(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Every rank has what this one has."""
        if "_coalesced_" in func.__name__:  # torch has no fake form of these
            return _done(next(each for each in args if isinstance(each, torch.ScriptObject)))
        found = func(*args, **kwargs)
        if func.__name__.startswith(("_allgather_base_", "alltoall_base_")):
            self._spread(args[0], args[1])
        elif func.__name__.startswith("allgather_"):
            for gathered, mine in zip(args[0], args[1], strict=True):
                for each in gathered:
                    self._spread(each, mine)
        return found

    def _spread(self, gathered: Tensor, mine: Tensor) -> None:
        real = self.of(mine)
        if real is not None and _is_discrete(real) and gathered.numel() <= MOST:
            times = gathered.numel() // max(real.numel(), 1)
            with _outside_modes():
                self._real[gathered] = real.reshape(-1).repeat(times).reshape(gathered.shape)


class _Readable(TorchFunctionMode):
    """``tolist``, ``numpy`` and ``torch.tensor`` of fake tensors, which torch refuses."""

    def __init__(self, values: KnownValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _READS and isinstance(args[0], FakeTensor):
            real = self._values.of(args[0])
            with _outside_modes():
                if real is None:
                    real = torch.zeros(args[0].shape, dtype=args[0].dtype)
                return func(real, *args[1:], **(kwargs or {}))
        if func is torch.tensor:
            number = self._values.number
            args = tree_map_only(FakeTensor, lambda each: number(each, False), args)
        return func(*args, **(kwargs or {}))


def _done(group: torch.ScriptObject) -> torch.ScriptObject:
    """The handle of a collective that is over."""
    with _outside_modes():
        _, work = torch.ops.c10d.broadcast_([torch.zeros(1)], group, 0, 0, False, -1)
    handle: torch.ScriptObject = work
    return handle


def _is_wanted(func: Any, known: list[Tensor], kwargs: Any) -> bool:
    """Whether an operation on known values is worth doing, and says something."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if known:
        return all(map(_is_discrete, known))
    made = kwargs.get("dtype") in (torch.int64, torch.int32, torch.bool)
    return made and "empty" not in func.__name__


def _count(mask: Tensor) -> int:
    """How much of a mask that is known is True."""
    with _outside_modes():
        return int(mask.sum())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments, or in what an operation returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def _is_discrete(value: Any) -> bool:
    """Whether it is integers, a mask or a single number, or several of these."""
    tensors = value if isinstance(value, list | tuple) else (value,)
    return all(
        isinstance(each, Tensor)
        and each.numel() <= (1 if each.is_floating_point() or each.is_complex() else MOST)
        for each in tensors
    )


@contextmanager
def _outside_modes() -> Iterator[None]:
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def known_values() -> Iterator[KnownValues]:
    """Integers that decide shapes are known, and experts evenly loaded, inside a fake mode."""
    with (
        KnownValues() as values,
        _Readable(values),
        evenly_routed(values.know),
        mock.patch.object(nn.Module, "_apply", _apply_in_place),
        # torch would keep every storage that it copies as a key of its cache of fake operations
        mock.patch.object(torch.UntypedStorage, "copy_", lambda storage, *_, **__: storage),
    ):
        yield values


def _apply_in_place(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """``Module._apply`` as for tensors that are no fakes: parameters stay the objects they are."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    for tensor in (*self.parameters(recurse=False), *self.buffers(recurse=False)):
        with torch.no_grad():
            tensor.data = fn(tensor).detach()
    return self


@contextmanager
def evenly_routed(know: Callable[[Tensor, Tensor], object]) -> Iterator[None]:
    """Every router of the host sends token t to the experts t k ... t k + k - 1, in turn.

    Args:
        know: is told the routing map that a router has returned, and what it is to be.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    stock = TopKRouter.routing

    @functools.wraps(stock)
    def routing(self: Any, *args: Any, **kwargs: Any) -> Any:
        probabilities, chosen, *rest = stock(self, *args, **kwargs)
        tokens, experts = chosen.shape
        know(chosen, _even_map(tokens, experts, self.topk))
        return (probabilities, chosen, *rest)

    with mock.patch.object(TopKRouter, "routing", routing):
        yield


def _even_map(tokens: int, experts: int, topk: int) -> Tensor:
    """[tokens, experts], True where a token goes."""
    with _outside_modes():
        found = torch.zeros(tokens, experts, dtype=torch.bool)
        first = torch.arange(tokens) * topk
        for i in range(topk):
            found[torch.arange(tokens), (first + i) % experts] = True
        return found
