# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of streams by Triton, alone as HC and the stages' ends use them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from megatron_residuals import functional, kernels  # noqa: E402
from megatron_residuals.functional import StreamUpdate  # noqa: E402
from megatron_residuals.kernels.common.triton import Tile  # noqa: E402
from megatron_residuals.kernels.streams.triton import (  # noqa: E402
    launches,
    operators,
    tiles,
)
from tests.functional.loops import random_tensors  # noqa: E402
from tests.kernels.launch_spy import DEVICE, LaunchSpy, poison_new_memory  # noqa: E402
from tests.kernels.streams.boundary_case import BoundaryCase, errors  # noqa: E402

SHAPES = [(n, 20, (2, 3)) for n in (1, 3, 5, 16)] + [(4, 100, (70,)), (2, 7168, (1,))]
SHAPES += [(4, 20, (2, 0))]


VERBS: dict[str, Callable[[Any], Callable[..., Tensor]]] = {
    "read": lambda package: package.read_streams,
    "write": lambda package: (
        lambda *update, **options: package.write_streams(StreamUpdate(*update), **options)
    ),
}


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> LaunchSpy:
    poison_new_memory(monkeypatch)
    monkeypatch.setattr(tiles, "GROUP_STEPS", 2)
    if DEVICE == "cpu":
        # what the interpreter takes time for is steps, whatever their size
        for name in ("WRITE", "BACKWARD", "BACKWARD_FEW"):
            monkeypatch.setattr(tiles, name, Tile(16, 512, 4))
    spy = LaunchSpy()
    spy.watch(monkeypatch, launches, "write_and_mix_kernel", "read_streams_kernel")
    spy.watch(monkeypatch, launches, "stream_products_kernel", "streams_backward_kernel")
    return spy


def run(
    function: Callable[..., Tensor], tensors: list[Tensor], **options: Any
) -> list[Tensor | None]:
    """The value, and the gradients for a random cotangent of the first tensor's dtype."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    value = function(*leaves, **options)
    value.backward(random_tensors(5)(*value.shape).to(torch.bfloat16).to(value))
    return [value.detach(), *[leaf.grad for leaf in leaves]]


@pytest.mark.parametrize(("n", "d", "lead"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("verb", ["read", "write"])
def test_values_and_gradients_are_those_of_the_specification(
    verb: str, n: int, d: int, lead: tuple[int, ...], dtype: torch.dtype, spy: LaunchSpy
) -> None:
    streams, output, h_post, h_res, *_ = BoundaryCase(n, d, lead).tensors(dtype)
    tensors = [streams, h_post] if verb == "read" else [streams, output, h_post, h_res]
    tensors = [tensor.to(DEVICE) for tensor in tensors]
    lean, full = (VERBS[verb](package) for package in (kernels, functional))
    exact = run(full, [tensor.double() for tensor in tensors])
    mine = errors(run(lean, tensors, backend="triton"), exact)
    assert len(spy.launches) == (0 if 0 in lead else 3 if verb == "read" else 2)
    plain = errors(run(lean, tensors, backend="torch"), exact)
    if dtype == torch.float32:
        assert max(mine) <= 1e-5
    for my_error, their_error in zip(mine, plain, strict=True):
        assert my_error <= max(1.1 * their_error, 1e-5)


@pytest.mark.usefixtures("spy")
@pytest.mark.parametrize("shifted", [False, True], ids=["mhc", "single-pass"])
@pytest.mark.parametrize(("n", "updates"), [(4, True), (4, False), (5, True)])
def test_the_operators_keep_their_promises_to_compilers(
    n: int, updates: bool, shifted: bool
) -> None:
    """Schemas, shapes of the fakes, no aliases."""
    case = BoundaryCase(n, 20, (6,), updates=updates)
    streams, *others = (tensor.to(DEVICE) for tensor in case.tensors(torch.float32))
    output, h_post, h_res, *weights = others
    update, options = [streams, output, h_post, h_res], ("paper", 3, 1e-6, None)
    check = functools.partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    before = update if updates else [streams]
    arguments = (before, weights, h_post if shifted else None, *options)
    check(operators.update_and_read, arguments)
    *written, x, h_pre, new_post, new_res, mixes = operators.update_and_read(*arguments)
    gradients, kept = [streams, x, h_pre, new_post, new_res], [*written, h_pre, mixes]
    before = update if updates else []
    kept = kept if updates else [streams, *kept]
    arguments = (gradients, kept, before, weights, shifted, *options)
    check(operators.update_and_read_backward, arguments)
    check(operators.read_streams, (streams, h_post))
    check(operators.read_streams_backward, (x, streams, h_post))
    check(operators.write_streams, (update,))
    check(operators.write_streams_backward, (streams, update))


def test_a_choice_that_cannot_be_met_is_refused() -> None:
    streams, _, h_post, *_ = BoundaryCase(4, 20, (6,)).tensors(torch.float64)
    with pytest.raises(ValueError, match=r"no read_streams for torch.float64"):
        kernels.read_streams(streams, h_post, backend="triton")
