# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of streams by Triton, alone as HC and the stages' ends use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from megatron_residuals import functional, kernels  # noqa: E402
from megatron_residuals.kernels.triton import launches, operators, tiles  # noqa: E402
from tests.functional.loops import random_tensors  # noqa: E402
from tests.kernels.boundary_case import BoundaryCase, errors  # noqa: E402
from tests.kernels.triton.launch_spy import DEVICE, LaunchSpy, poison_new_memory  # noqa: E402

SHAPES = [(n, 20, (2, 3)) for n in (1, 3, 5, 16)] + [(4, 100, (70,)), (2, 7168, (1,))]
SHAPES += [(4, 20, (2, 0))]


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> LaunchSpy:
    poison_new_memory(monkeypatch)
    monkeypatch.setattr(tiles, "GROUP_STEPS", 2)
    if DEVICE == "cpu":
        # what the interpreter takes time for is steps, whatever their size
        for name in ("POST_CANDIDATES", "PLANE_CANDIDATES"):
            monkeypatch.setattr(tiles, name, (tiles.Tile(16, 512, 4),) * 2)
    spy = LaunchSpy()
    kernels_of_streams = ("post_and_mix_kernel", "read_kernel", "products_kernel")
    spy.watch(monkeypatch, launches, *kernels_of_streams, "planes_backward_kernel")
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
    tensors = [streams, h_post] if verb == "read" else [streams, h_post, h_res, output]
    tensors = [tensor.to(DEVICE) for tensor in tensors]
    lean, full = (getattr(each, f"{verb}_streams") for each in (kernels, functional))
    exact = run(full, [tensor.double() for tensor in tensors])
    mine = errors(run(lean, tensors, backend="triton"), exact)
    assert len(spy.launches) == (0 if 0 in lead else 3 if verb == "read" else 2)
    plain = errors(run(lean, tensors, backend="torch"), exact)
    if dtype == torch.float32:
        assert max(mine) <= 1e-5
    for my_error, their_error in zip(mine, plain, strict=True):
        assert my_error <= max(1.1 * their_error, 1e-5)


@pytest.mark.usefixtures("spy")
@pytest.mark.parametrize(("n", "updates"), [(4, True), (4, False), (5, True)])
def test_the_operators_keep_their_promises_to_compilers(n: int, updates: bool) -> None:
    """Schemas, shapes of the fakes, no aliases."""
    case = BoundaryCase(n, 20, (6,), updates=updates)
    streams, *others = (tensor.to(DEVICE) for tensor in case.tensors(torch.float32))
    update = others[:3] if updates else [None] * 3
    options = ("paper", 3, 1e-6)
    arguments = (streams, *update, *others[3:], *options)
    check = ("test_schema", "test_faketensor")
    torch.library.opcheck(operators.mhc_boundary, arguments, test_utils=check)
    written, read, h_pre, h_post, h_res, mixes = operators.mhc_boundary(*arguments)
    kept = (written if updates else streams, h_pre, mixes)
    before = (streams, *update) if updates else (None,) * 4
    backward = (streams, read, h_post, h_res, *kept, *before, *others[3:], *options)
    torch.library.opcheck(operators.mhc_boundary_backward, backward, test_utils=check)
    output, h_post, h_res = others[:3]
    torch.library.opcheck(operators.streams_read, (streams, h_post), test_utils=check)
    torch.library.opcheck(
        operators.streams_read_backward, (read, streams, h_post), test_utils=check
    )
    write = (streams, output, h_post, h_res)
    torch.library.opcheck(operators.streams_write, write, test_utils=check)
    torch.library.opcheck(operators.streams_write_backward, (streams, *write), test_utils=check)


def test_a_choice_that_cannot_be_met_is_refused() -> None:
    streams, _, h_post, *_ = BoundaryCase(4, 20, (6,)).tensors(torch.float64)
    with pytest.raises(ValueError, match=r"no read_streams for torch.float64"):
        kernels.read_streams(streams, h_post, backend="triton")
