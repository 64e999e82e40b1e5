# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The kernels of both operators exactly as they are launched, recorded instead of run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_residuals.functional.depth_attention import ClosedRead
from megatron_residuals.functional.streams import MhcOptions, MhcWeights, StreamRead, StreamUpdate
from megatron_residuals.kernels.depth_attention.triton import launches as depth
from megatron_residuals.kernels.depth_attention.triton import table
from megatron_residuals.kernels.streams.contract import Kept
from megatron_residuals.kernels.streams.triton import boundary
from megatron_residuals.kernels.streams.triton import launches as streams

LAUNCHERS = (streams, depth, table)
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
}
TOKENS = 3  # of no account: no kernel is compiled for a number of tokens
SOURCES, READERS = 9, 8
EPS = 1e-6


class AotCase(NamedTuple):
    """One kernel to be compiled without a GPU.

    Attributes:
        types: Triton's type of every argument that is not a constant, by name.
        constants: values of the constants by name, None for a pointer that is left out.
        options: as it is launched: num_warps, and num_stages where it is given.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, object]
    options: Mapping[str, int]

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for what compiles to the same."""
        parts = (self.types, self.constants, self.options)
        return (id(self.kernel), *[tuple(sorted(part.items(), key=str)) for part in parts])


class _Recorder:
    """Stands for a kernel and notes how it is launched."""

    def __init__(self, kernel: Any, label: str, found: list[AotCase]) -> None:
        self._kernel, self._label, self._found = kernel, label, found

    def __getitem__(self, grid: object) -> Any:
        return self._launch

    def _launch(self, *args: Any, **constants: Any) -> None:
        names = [name for name in ("num_warps", "num_stages") if name in constants]
        options = {name: constants.pop(name) for name in names}
        types: dict[str, str] = {}
        for name, value in zip(self._kernel.arg_names, args, strict=False):
            if isinstance(value, Tensor):
                types[name] = POINTERS[value.dtype]
            elif value is None:
                constants[name] = None
            else:
                types[name] = "fp32" if isinstance(value, float) else "i32"
        name = f"{self._kernel.fn.__name__.removesuffix('_kernel')} {self._label}"
        self._found.append(AotCase(name, self._kernel, types, constants, options))


def _kernels(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name.endswith("_kernel")}


@contextlib.contextmanager
def recording(label: str, found: list[AotCase]) -> Iterator[None]:
    """Within it, launches are appended to a list."""
    stock = [(module, _kernels(module)) for module in LAUNCHERS]
    for module, kernels in stock:
        for name, kernel in kernels.items():
            setattr(module, name, _Recorder(kernel, label, found))
    try:
        yield
    finally:
        for module, kernels in stock:
            for name, kernel in kernels.items():
                setattr(module, name, kernel)


def boundary_cases(
    n: int,
    d: int,
    dtype: torch.dtype,
    convention: str = "paper",
    *,
    updates: bool = True,
    reads: bool = False,
) -> list[AotCase]:
    """Every launch of one boundary of mHC, or of iHC or Single-Pass mHC, forward and backward."""
    found: list[AotCase] = []
    options = MhcOptions(convention, 20, EPS)
    sizes, small = options.sizes(n), torch.zeros(TOKENS, n)
    columns = sum(sizes)
    planes, row = torch.zeros(TOKENS, n, d, dtype=dtype), torch.zeros(TOKENS, d, dtype=dtype)
    matrices = torch.zeros(TOKENS, n, n) if options.mixes else None
    alpha = torch.zeros(len(sizes))
    weights = MhcWeights(torch.zeros(columns, n * d), torch.zeros(columns), alpha)
    update = StreamUpdate(planes, row, small, matrices) if updates else None
    kind = f"{'single-pass ' * reads}{'' if updates else 'first '}"
    label = f"{kind}n={n} d={d} {str(dtype).removeprefix('torch.')}"
    with recording(f"{label} {convention}", found):
        given = small if reads else None
        _, mixes = boundary.update_and_read(update or planes, weights, options, given)
        gradients = StreamRead(planes, row, small, small, matrices)
        kept = Kept(planes, small, mixes)
        boundary.update_and_read_backward(gradients, kept, update, weights, options, reads=reads)
    return found


def reads_cases(d: int, dtype: torch.dtype) -> list[AotCase]:
    """Every launch of a single read and of both phases, forward and backward."""
    found: list[AotCase] = []
    sources = [torch.zeros(TOKENS, d, dtype=dtype) for _ in range(SOURCES)]
    directions, row, lse = torch.zeros(READERS, d), sources[0], torch.zeros(TOKENS)
    sums = [torch.zeros(TOKENS, d) for _ in sources]
    nothing = [None] * SOURCES
    with recording(f"d={d} {str(dtype).removeprefix('torch.')}", found):
        _, scores = depth.read(sources, directions[0], EPS)
        depth.read_backward(row, sources, directions[0], scores, sums, nothing)
        _, _, scores = depth.closed(sources, directions, EPS)
        gradients, d_lses = [row] * READERS, [lse] * READERS
        depth.closed_backward(gradients, d_lses, sources, directions, scores, sums)
        merged = depth.merge(ClosedRead(row, lse, directions[0]), row, row, EPS)
        depth.merge_backward(row, row, directions[0], merged)
    return found


def cases() -> list[AotCase]:
    """The sizes that are trained, every convention and dtype, fused and not; each once."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    found = boundary_cases(4, 7168, bf16)
    found += boundary_cases(4, 7168, bf16, "dsv4", updates=False)
    for n, d, dtype in ((4, 7168, fp32), (4, 7168, fp16), (4, 2880, bf16), (4, 100, bf16)):
        found += boundary_cases(n, d, dtype)
    for n in (1, 2, 3, 8, 16):
        found += boundary_cases(n, 4096, bf16)
    found += boundary_cases(2, 4096, bf16, updates=False)
    found += boundary_cases(4, 7168, bf16, "identity")
    found += boundary_cases(4, 7168, bf16, "dsv4", reads=True)
    for d in (7168, 2880):
        for dtype in (bf16, fp32):
            found += reads_cases(d, dtype)
    once: dict[tuple[object, ...], AotCase] = {}
    for case in found:
        once.setdefault(case.identity, case)
    return list(once.values())
