# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Every launch as on a GPU, up to the GPU: Triton binds the arguments and compiles for sm_90.

    python -m tests.kernels.jit

In a process of its own, without the interpreter. Nothing is computed, so all numbers are garbage;
what is seen is that no launch fails, and that no other number of tokens compiles a kernel again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megatron_residuals import kernels
from megatron_residuals.functional import StreamUpdate
from megatron_residuals.kernels.common import dispatch
from tests.kernels.streams.boundary_case import BoundaryCase

TOKENS = (1, 3, 16, 17, 1000)
Step = Callable[[int], None]


class Driver:
    """As much of a driver as binding and compiling ask for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def main() -> None:
    """Run all steps with every number of tokens; print what each compiles."""
    driver.set_active(Driver())
    stock, compiled = JITFunction.run, set()

    def run(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object):  # type: ignore[no-untyped-def]
        kernel = stock(self, *args, grid=grid, warmup=True, **options)
        compiled.add((self.fn.__name__, kernel.hash))
        return kernel

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(dispatch, "interpreting", lambda: True),
    ):
        for name, step in steps():
            step(TOKENS[-1])
            before = set(compiled)
            for tokens in TOKENS:
                step(tokens)
            again = sorted(kernel for kernel, _ in compiled - before)
            assert not again, f"{name}: another number of tokens compiled {again}"
            print(f"{name}: {len(before)} kernels so far")


def steps() -> Iterator[tuple[str, Step]]:
    """Forward and backward of everything that has kernels."""
    for case in ((4, torch.bfloat16, True), (4, torch.float32, False), (5, torch.bfloat16, True)):
        yield f"boundary {case}", lambda tokens, case=case: boundary(tokens, *case)
    yield "streams", streams
    yield "reads", lambda tokens: reads(tokens, torch.bfloat16, 64)
    # rows of 132 bytes, no other of which begins at a multiple of 16
    yield "reads of odd rows", lambda tokens: reads(tokens, torch.float32, 33)


def boundary(tokens: int, n: int, dtype: torch.dtype, updates: bool) -> None:
    case = BoundaryCase(n, 64, (tokens,), updates=updates)
    case.gradients(lambda *leaves: case.run(*leaves, backend="triton"), case.tensors(dtype), dtype)


def streams(tokens: int) -> None:
    x, output, post, res, pre = drawn(
        *((tokens, 3, 64), (tokens, 64), (tokens, 3), (tokens, 3, 3), (tokens, 3))
    )
    written = kernels.write_streams(StreamUpdate(x, output, post, res), backend="triton")
    backward(written, kernels.read_streams(written, pre, backend="triton"))


def reads(tokens: int, dtype: torch.dtype, d: int) -> None:
    """Two readers in two phases and one by itself, with and without an output to be added."""
    rows = drawn(*[(tokens, d)] * 4, dtype=dtype)
    directions, query, gain = drawn((2, d), (d,), (d,))
    *sources, partial, output = rows
    options = {"eps": 1e-6, "backend": "triton"}
    one, two = kernels.read_closed(sources, directions, **options)
    x, total = kernels.merge_running(one, partial, **options)
    other, total = kernels.merge_running(two, total, output, **options)
    backward(x, other, kernels.read_sources([*sources, total], query, gain, **options))


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def backward(*values: Tensor) -> None:
    torch.autograd.backward(values, [torch.randn_like(value) for value in values])


if __name__ == "__main__":
    main()
