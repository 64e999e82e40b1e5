# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The kernels of streams exactly as they are launched, recorded instead of run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_residuals.kernels.coefficients import MhcWeights
from megatron_residuals.kernels.planes import Update
from megatron_residuals.kernels.planes_backward import Cotangents, Kept
from megatron_residuals.kernels.sinkhorn import MhcOptions
from megatron_residuals.kernels.triton import launches, projected
from megatron_residuals.kernels.triton.common import AotCase, element

KERNELS = [name for name in vars(launches) if name.endswith("_kernel")]
TOKENS = 3  # of no account: no kernel is compiled for a number of tokens


class _Recorder:
    """Stands for a kernel and notes how it is launched."""

    def __init__(self, kernel: Any, label: str, found: list[AotCase]) -> None:
        self._kernel, self._label, self._found = kernel, label, found

    def __getitem__(self, grid: object) -> Any:
        return self._launch

    def _launch(self, *args: Any, num_warps: int, num_stages: int = 1, **constants: Any) -> None:
        types: dict[str, str] = {}
        for name, value in zip(self._kernel.arg_names, args, strict=False):
            if isinstance(value, Tensor):
                types[name] = element(value)
            elif value is None:
                constants[name] = None
            else:
                types[name] = "i32"
        name = f"{self._kernel.fn.__name__.removesuffix('_kernel')} {self._label}"
        self._found.append(AotCase(name, self._kernel, types, constants, num_warps, num_stages))


@contextlib.contextmanager
def recording(label: str, found: list[AotCase]) -> Iterator[None]:
    """Within it, launches of streams are appended to a list."""
    stock = {name: getattr(launches, name) for name in KERNELS}
    for name, kernel in stock.items():
        setattr(launches, name, _Recorder(kernel, label, found))
    try:
        yield
    finally:
        for name, kernel in stock.items():
            setattr(launches, name, kernel)


def boundary_cases(
    n: int, d: int, dtype: torch.dtype, convention: str = "paper", *, updates: bool = True
) -> list[AotCase]:
    """Every launch of one boundary, forward and backward."""
    found: list[AotCase] = []
    columns, small = 2 * n + n * n, torch.zeros(TOKENS, n)
    streams, row = torch.zeros(TOKENS, n, d, dtype=dtype), torch.zeros(TOKENS, d, dtype=dtype)
    matrices = torch.zeros(TOKENS, n, n)
    weights = MhcWeights(torch.zeros(columns, n * d), torch.zeros(columns), torch.zeros(3))
    options = MhcOptions(convention, 20, 1e-6)
    update = Update(streams, row, small, matrices) if updates else None
    label = f"{'' if updates else 'first '}n={n} d={d} {str(dtype).removeprefix('torch.')}"
    with recording(f"{label} {convention}", found):
        mixes = projected.forward(update or streams, weights, options)[-1]
        cotangents = Cotangents(streams, row, small, matrices)
        kept = Kept(streams, small, mixes)
        projected.backward(cotangents, kept, weights, options, update)
    return found


def cases() -> list[AotCase]:
    """The sizes that are trained, both conventions, every dtype, fused and not; each once."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    found = boundary_cases(4, 7168, bf16)
    found += boundary_cases(4, 7168, bf16, "dsv4", updates=False)
    for n, d, dtype in ((4, 7168, fp32), (4, 7168, fp16), (4, 2880, bf16), (4, 100, bf16)):
        found += boundary_cases(n, d, dtype)
    for n in (1, 2, 3, 8, 16):
        found += boundary_cases(n, 4096, bf16)
    found += boundary_cases(2, 4096, bf16, updates=False)
    once: dict[tuple[object, ...], AotCase] = {}
    for case in found:
        once.setdefault(_identity(case), case)
    return list(once.values())


def _identity(case: AotCase) -> tuple[object, ...]:
    constants = tuple(sorted(case.constants.items(), key=str))
    return (id(case.kernel), tuple(case.types.items()), constants, case.num_warps)
