# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of optimizers whose groups hold float32 parameters beside 16-bit ones.

Parameters of a mechanism stay float32 in a model of 16 bit. Both optimizers of the host train such
models; both mix up, or refuse, their state when they save it to a distributed checkpoint. Groups of
one precision pass through these wrappers as they were.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


def is_16_bit(parameter: Any) -> bool:
    """Whether a parameter has a float32 copy that the optimizer updates."""
    return bool(parameter.dtype.itemsize < 4)


def ordered_by_precision(stock: Any) -> Any:
    """``DistributedOptimizer._build_optimizer_group_ranges`` with the order that is kept later.

    A class method from a class method.

    A rank's shard of a group is stored with the float32 parameters in front of the 16-bit ones,
    while the host numbers both in one sequence, so one would save and load the state of another.
    """

    @functools.wraps(stock.__func__)
    def build_optimizer_group_ranges(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        places, ranges = stock.__func__(*args, **kwargs)
        for index, group in enumerate(ranges):
            group["params"].sort(key=is_16_bit)
            for order, parameter in enumerate(group["params"]):
                places[parameter] = (index, order)
        return places, ranges

    return classmethod(build_optimizer_group_ranges)


def saves_whole_groups(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``Float16OptimizerWithFloat16Params.sharded_state_dict`` with the float32 parameters in it.

    The host counts 16-bit parameters alone and takes the count for the place in the optimizer.
    """

    @functools.wraps(stock)
    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _whole_groups(self):
            return stock(self, *args, **kwargs)

    return sharded_state_dict


def loads_whole_groups(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``load_state_dict`` of the same class, for what the above saves and for plain state dicts."""

    @functools.wraps(stock)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        saved = state_dict.get("fp32_from_fp16_params", ())
        whole = [len(group["params"]) for group in self.optimizer.param_groups]
        with _whole_groups(self) if [*map(len, saved)] == whole else contextlib.nullcontext():
            return stock(self, state_dict)

    return load_state_dict


@contextlib.contextmanager
def _whole_groups(optimizer: Any) -> Iterator[None]:
    """Inside, the groups of 16-bit parameters and of their copies hold the float32 ones as well."""
    model, main = optimizer.float16_groups, optimizer.fp32_from_float16_groups
    of_main = {
        id(copy): parameter
        for parameters, copies in zip(model, main, strict=True)
        for parameter, copy in zip(parameters, copies, strict=True)
    }
    groups = [list(group["params"]) for group in optimizer.optimizer.param_groups]
    optimizer.fp32_from_float16_groups = groups
    optimizer.float16_groups = [
        [of_main.get(id(parameter), parameter) for parameter in group] for group in groups
    ]
    try:
        yield
    finally:
        optimizer.float16_groups, optimizer.fp32_from_float16_groups = model, main
