# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Libraries that may compute a mechanism: on explicit wish only, and where their result is ours.

Whether it is, is found out at first use, once for each dtype, device and size: random numbers go
through the library and through the reference in float64, values and all gradients.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from megatron_residuals.functional.precision import wide_dtype

# How far a result may be from the reference, relative to its norm.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
TOKENS = 8
MAX_OFFSET = 2**31  # Liger's kernels address with 32 bits

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Library(NamedTuple):
    """The name that is imported, and the one that is installed."""

    package: str
    distribution: str


LIBRARIES = {
    "fla": Library("fla", "flash-linear-attention"),
    "liger": Library("liger_kernel", "liger-kernel"),
}


def fault(choice: str, dtype: torch.dtype) -> str | None:
    """Why a library cannot be used for activations of a dtype, as far as is known without a try."""
    if not is_installed(choice):
        distribution = LIBRARIES[choice].distribution
        return f"{distribution} is not installed; install it, or use kernels='auto'"
    if dtype not in BOUNDS:
        return f"it takes float32, bfloat16 and float16 tensors, not {dtype}; use kernels='auto'"
    return None


def is_installed(choice: str) -> bool:
    """Whether there is such a package, whatever its version; it is not imported."""
    return importlib.util.find_spec(LIBRARIES[choice].package) is not None


def check_dtypes(choice: str, activation: Tensor, *others: Tensor) -> None:
    """Refuse what the libraries have no kernels for, or would round.

    Raises:
        ValueError: the activation is none of float32, bfloat16, float16, or another tensor is wider
            than float32.
    """
    dtype = wide_dtype(activation, *others)
    if activation.dtype not in BOUNDS or dtype != torch.float32:
        wrong = activation.dtype if activation.dtype not in BOUNDS else dtype
        raise ValueError(
            f"kernels={choice!r} takes float32, bfloat16 and float16 tensors, not {wrong}; use "
            "kernels='auto'"
        )


def outside_graphs(function: FunctionT) -> FunctionT:
    """The function, which a compiler calls and does not trace: there are launches in it."""
    if torch.compiler.is_compiling():
        return cast(FunctionT, torch.compiler.disable(function))
    return function


def imported(choice: str, name: str, what: str, load: Callable[[], Any]) -> Any:
    """What ``load`` gives: a function of a library, called ``name`` in messages.

    Raises:
        RuntimeError: it gives nothing.
    """
    try:
        return load()
    except Exception as error:  # an installation that does not fit the machine raises anything
        raise RuntimeError(
            f"kernels={choice!r} was requested for {what}, but {name} cannot be used "
            f"({type(error).__name__}: {error}); install a {LIBRARIES[choice].distribution} that "
            "has it, or use kernels='auto'"
        ) from error


def compare(
    choice: str,
    what: str,
    theirs: Callable[..., Sequence[Tensor]],
    reference: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
) -> None:
    """Values and the gradients of all inputs; the first input is an activation.

    Raises:
        RuntimeError: theirs raises, or differs from the reference in float64.
    """
    dtype, device = inputs[0].dtype, inputs[0].device
    try:
        values, found = _with_gradients(theirs, inputs, ())
    except Exception as error:  # a compiler raises anything
        raise RuntimeError(
            f"kernels={choice!r} was requested, but {what} of this installation fails for {dtype} "
            f"on {device} ({type(error).__name__}: {error}); use kernels='auto'"
        ) from error
    _, exact = _with_gradients(reference, [each.double() for each in inputs], values)
    for mine, right in zip(found, exact, strict=True):
        distance = float((mine.double() - right).norm() / right.norm())
        if not distance <= BOUNDS[dtype]:
            raise RuntimeError(
                f"kernels={choice!r} was requested, but {what} of this installation differs from "
                f"the reference by {distance:.1e} ({dtype} on {device}, {BOUNDS[dtype]:.0e} is "
                "allowed); use kernels='auto'"
            )


def _with_gradients(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], like: Sequence[Tensor]
) -> tuple[Sequence[Tensor], list[Tensor]]:
    """Values; and values and gradients. The cotangents have the dtypes of ``like``, if given."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    with torch.enable_grad():
        values = function(*leaves)
    draw = Draw(values[0].device)
    pairs = zip(values, like or values, strict=True)
    cotangents = [draw(*value.shape).to(given.dtype).to(value.dtype) for value, given in pairs]
    gradients = torch.autograd.grad(values, leaves, cotangents)
    return values, [*[value.detach() for value in values], *gradients]


class Draw:
    """Random numbers in float32, the same on every device and in every process."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._generator = device, torch.Generator().manual_seed(17)

    def __call__(self, *shape: int) -> Tensor:
        """The next of a shape."""
        return torch.randn(shape, generator=self._generator).to(self._device)
