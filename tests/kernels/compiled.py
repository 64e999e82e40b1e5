# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Is what ``torch.compile`` makes of every kernel one graph, and equal to the kernel?

    python -m tests.kernels.compiled

In a process of its own, since the CPU host of the tests makes ``torch.compile`` do nothing. Prints
the cases that hold.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_residuals import kernels
from megatron_residuals.functional import MhcOptions, StreamUpdate
from megatron_residuals.mechanisms.sources.module import DepthAttention, open_reads
from megatron_residuals.mechanisms.streams.module import ManifoldHyperConnection
from megatron_residuals.modules import SourceState, StreamState
from tests.functional.loops import random_tensors
from tests.kernels.streams.boundary_case import BoundaryCase

Function = Callable[..., Sequence[Tensor]]
EPS = 1e-2
COMPILERS = ("eager", "aot_eager")
"""Of graphs: one runs them as they are, one takes them apart first."""


def main() -> None:
    """Every case with every compiler."""
    backends = ["torch"]
    if importlib.util.find_spec("triton") is not None:
        from tests.kernels.interpreter import repair

        repair()
        backends.append("triton")
    for backend in backends:
        for name, function, leaves in cases(backend):
            check(f"{backend} {name}", function, leaves)
            print(backend, name)


def cases(backend: str) -> Iterator[tuple[str, Function, list[Tensor]]]:
    """Functions of leaves, with asymmetric numbers in float32."""
    # of backend, convention and whether there is a write every two meet
    for convention in ("paper", "dsv4"):
        updates = (convention == "paper") == (backend == "triton")
        yield boundary(BoundaryCase(4, 20, (2, 3), convention, updates), backend)
    yield "streams", *streams(backend)
    yield "reads", *reads(backend)
    yield "mHC modules", *stream_modules(backend)
    yield "AttnRes modules", *source_modules(backend)


def boundary(case: BoundaryCase, backend: str) -> tuple[str, Function, list[Tensor]]:
    """All that has a gradient."""

    def run(*tensors: Tensor) -> list[Tensor]:
        found = case.run(*tensors, backend=backend)
        return [found.streams, found.x, found.h_post, found.h_res]

    return str(case), run, case.tensors(torch.float32)


def streams(backend: str) -> tuple[Function, list[Tensor]]:
    """A write and a read, as HC has them."""
    draw = random_tensors(5)
    shapes = ((6, 3, 20), (6, 3), (6, 3, 3), (6, 20), (6, 3))

    def run(x: Tensor, post: Tensor, res: Tensor, output: Tensor, pre: Tensor) -> list[Tensor]:
        written = kernels.write_streams(StreamUpdate(x, output, post, res), backend=backend)
        return [written, kernels.read_streams(written, pre, backend=backend)]

    return run, [draw(*shape).float() for shape in shapes]


def reads(backend: str) -> tuple[Function, list[Tensor]]:
    """Two readers in two phases and one by itself."""
    draw, rows = random_tensors(4), (3, 2, 24)
    gain = torch.linspace(0.5, 1.5, 24)

    def run(
        first: Tensor, second: Tensor, directions: Tensor, partial: Tensor, output: Tensor
    ) -> list[Tensor]:
        sources, options = [first, second], {"eps": EPS, "backend": backend}
        one, two = kernels.read_closed(sources, directions, **options)
        x, total = kernels.merge_running(one, partial, **options)
        other, total = kernels.merge_running(two, total, output, **options)
        last = kernels.read_sources([*sources, total], directions[0], gain, **options)
        return [x, other, total, last]

    return run, [draw(*shape).float() for shape in (rows, rows, (2, 24), rows, rows)]


def stream_modules(backend: str) -> tuple[Function, list[Tensor]]:
    """Two sublayers of mHC."""
    draw = random_tensors(8)
    layers = [
        ManifoldHyperConnection(
            20,
            num_streams=4,
            home_stream=index,
            options=MhcOptions("paper", 5, EPS),
            alpha_init=0.5,
            initialisation="a6",
            kernels=backend,
        )
        for index in range(2)
    ]
    for layer in layers:
        torch.nn.init.normal_(layer.mapping_weight, std=0.1)

    def run(entering: Tensor, *_: Tensor) -> list[Tensor]:
        state = StreamState(entering)
        for layer in layers:
            x, pending = layer.read(state)
            state = layer.write(pending, torch.tanh(x))
        return [state.settled().streams]

    return run, [draw(3, 2, 4, 20).float(), *(p for layer in layers for p in layer.parameters())]


def source_modules(backend: str) -> tuple[Function, list[Tensor]]:
    """A block of two sublayers of AttnRes."""
    draw = random_tensors(9)
    layers = [DepthAttention(24, opens_block=False, eps=EPS, kernels=backend) for _ in range(2)]
    for layer in layers:
        torch.nn.init.normal_(layer.query, std=0.3)

    def run(first: Tensor, second: Tensor, partial: Tensor, *_: Tensor) -> list[Tensor]:
        state = open_reads(SourceState.of([first, second], partial), layers)
        for layer in layers:
            x, pending = layer.read(state)
            state = layer.write(pending, torch.tanh(x))
        return [state.partial]

    rows = [draw(3, 2, 24).float() for _ in range(3)]
    return run, [*rows, *(p for layer in layers for p in layer.parameters())]


def check(name: str, function: Function, leaves: list[Tensor]) -> None:
    """Values and gradients of all leaves, and that one graph was made, for all compilers."""
    graphs: list[Any] = []
    compiler = ""

    def every(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        made = {name: torch._dynamo.lookup_backend(name)(graph, inputs) for name in COMPILERS}
        return lambda *tensors: made[compiler](*tensors)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=every)
    expected = outcome(function, leaves)
    for compiler in COMPILERS:  # noqa: B007, the graph reads it
        for mine, theirs in zip(outcome(compiled, leaves), expected, strict=True):
            assert (mine is None) == (theirs is None), name
            if mine is None:
                continue
            torch.testing.assert_close(
                mine, theirs, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}"
            )
    assert len(graphs) == 1, f"{name}: {len(graphs)} graphs"


def outcome(function: Function, leaves: list[Tensor]) -> list[Tensor | None]:
    """Values, then gradients for random cotangents; None of a leaf that is not used."""
    leaves = [leaf.requires_grad_() for leaf in leaves]
    values, draw = function(*leaves), random_tensors(7)
    cotangents = [draw(*value.shape).float() for value in values]
    return [*values, *torch.autograd.grad(values, leaves, cotangents, allow_unused=True)]


if __name__ == "__main__":
    main()
