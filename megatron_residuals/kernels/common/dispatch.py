# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="untyped-decorator"
"""Which implementation computes a mechanism: the one place where that is decided.

A choice is ``auto``, ``torch``, ``triton`` or the name of a library, which does not come this way
(``libraries``). ``auto`` may fall back; an explicit choice that cannot be met raises.
Nothing here imports Triton before it is wanted.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Literal

import torch
from torch import Tensor

from megatron_residuals.versions import is_too_old, requirement

Backend = Literal["torch", "triton"]

CHOICES = ("auto", "torch", "triton")
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def resolve(
    choice: str,
    tensor: Tensor,
    *,
    what: str = "this kernel",
    supported: bool = True,
    libraries: tuple[str, ...] = (),
) -> Backend:
    """The implementation for an activation tensor.

    Args:
        choice: ``auto`` takes Triton for 16- and 32-bit tensors on a GPU where it can be imported,
            plain PyTorch otherwise.
        what: the operation, for messages.
        supported: whether a Triton kernel exists for its shape at all.
        libraries: those that have this operation as well, for messages.

    Raises:
        ValueError: the choice is none of auto, torch, triton; or triton does not have this
            operation for the tensor's dtype or shape.
        RuntimeError: triton was asked for and cannot run here.
    """
    if check_choice(choice, what, libraries) == "torch":
        return "torch"
    usable = supported and tensor.dtype in TRITON_DTYPES
    if choice == "auto":
        return "triton" if usable and is_on_gpu(tensor) and triton_fault() is None else "torch"
    if not usable:
        kind = f"{tensor.dtype} tensors" if supported else f"shape {tuple(tensor.shape)}"
        raise ValueError(
            f"kernels='triton' has no {what} for {kind} (it takes float32, bfloat16 and float16); "
            "use kernels='auto' to fall back to plain PyTorch"
        )
    if not is_on_gpu(tensor) and not interpreting():
        raise RuntimeError(
            f"kernels='triton' was requested for {what}, but the tensor is on "
            f"{tensor.device}; move the model to a GPU, use kernels='auto', or set "
            "TRITON_INTERPRET=1 before the start to run the kernels on a CPU, slowly"
        )
    if (fault := triton_fault()) is not None:
        raise RuntimeError(
            f"kernels='triton' was requested for {what}, but {fault}; install one that is "
            f"tested (pip install '{requirement('triton')}') or use kernels='auto'"
        )
    return "triton"


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether kernels for a GPU take a tensor; a rehearsal of one says so of its own."""
    return tensor.is_cuda


def check_choice(choice: str, what: str, libraries: tuple[str, ...] = ()) -> str:
    """The choice; ``libraries`` are those that have this as well.

    Raises:
        ValueError: it is none of auto, torch, triton, and of the libraries.
    """
    allowed = (*CHOICES, *libraries)
    if choice not in allowed:
        raise ValueError(f"kernels is {choice!r} for {what}; allowed: {', '.join(allowed)}")
    return choice


@torch.compiler.assume_constant_result
def interpreting() -> bool:
    """Whether Triton kernels are interpreted, so that they also run on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@torch.compiler.assume_constant_result
def triton_fault() -> str | None:
    """Why Triton cannot be used; None if it can."""
    return _triton_fault()


@functools.cache
def _triton_fault() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        importlib.import_module("triton.language")
    except Exception as error:  # a broken build raises anything
        return f"importing triton raised {type(error).__name__}: {error}"
    version = importlib.import_module("triton").__version__
    if is_too_old("triton", version):
        return f"triton {version} is too old"
    return None
