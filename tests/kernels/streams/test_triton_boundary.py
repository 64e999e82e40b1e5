# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of mHC compute what the specification says, and all of its gradients."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from megatron_residuals.functional import StreamUpdate  # noqa: E402
from megatron_residuals.kernels.common.triton import Tile  # noqa: E402
from megatron_residuals.kernels.streams.triton import boundary, launches, tiles  # noqa: E402
from tests.kernels.launch_spy import DEVICE, LaunchSpy, poison_new_memory  # noqa: E402
from tests.kernels.streams.boundary_case import BoundaryCase, errors  # noqa: E402

KERNELS = (
    "write_and_mix_kernel",
    "halves_kernel",
    "coefficients_kernel",
    "read_streams_kernel",
    "stream_products_kernel",
    "coefficients_backward_kernel",
    "streams_backward_kernel",
)

# three tiles in two groups, the last of each not full; the interpreter runs them one by one
MANY = (37,)
CASES = [
    BoundaryCase(n, 20, (2, 3), convention, updates)
    for n, convention, updates in (
        (1, "paper", True),
        (2, "dsv4", True),
        (3, "paper", True),
        (3, "dsv4", False),
        (4, "paper", True),
        (4, "dsv4", True),
        (4, "paper", False),
        (6, "paper", True),
        (8, "dsv4", False),
    )
]
CASES += [BoundaryCase(16, 20, (3,)), BoundaryCase(4, 100, MANY), BoundaryCase(4, 20, (3, 0))]
CASES += [BoundaryCase(4, 20, (2,), convention, iterations=1) for convention in ("paper", "dsv4")]
CASES += [BoundaryCase(n, 20, (2, 3), "identity", gate_eps=1e-3) for n in (4, 6)]
CASES += [BoundaryCase(3, 20, (2, 3), "identity", False)]
CASES += [
    BoundaryCase(4, 20, (2, 3), "permutations"),
    BoundaryCase(4, 20, (3,), "kronecker", False),
]
CASES += [BoundaryCase(n, 20, (2, 3), "dsv4", reads=True) for n in (4, 6)]
CASES += [BoundaryCase(3, 20, (2, 3), updates=False, reads=True)]
WIDE = [BoundaryCase(4, d, (1,), updates=d != 5120) for d in (2880, 5120, 7168)]
# of each path of the kernels one
SOME = [BoundaryCase(4, 20, (2, 3)), BoundaryCase(3, 20, (2, 3), "dsv4", False)]
SOME += [BoundaryCase(6, 20, (2, 3)), BoundaryCase(4, 100, MANY), BoundaryCase(4, 2880, (1,))]
SOME += [BoundaryCase(4, 20, (3, 0)), BoundaryCase(4, 20, (2, 3), "identity")]

every_case = pytest.mark.parametrize("case", CASES + WIDE, ids=str)
# what the interpreter takes time for is steps, whatever their size; 512 does not divide 2880
INTERPRETED_TILE = Tile(16, 512, 4)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> LaunchSpy:
    """Watched launches into poisoned memory, with groups of few tokens and wide steps."""
    poison_new_memory(monkeypatch)
    monkeypatch.setattr(tiles, "GROUP_STEPS", 2)
    monkeypatch.setattr(tiles, "COEFFICIENT_TOKENS", 32)
    if DEVICE == "cpu":
        for name in ("WRITE", "MIX", "BACKWARD", "BACKWARD_FEW"):
            monkeypatch.setattr(tiles, name, INTERPRETED_TILE)
    spy = LaunchSpy()
    spy.watch(monkeypatch, launches, *KERNELS)
    return spy


def on_device(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def assert_launched(spy: LaunchSpy, case: BoundaryCase, dtype: torch.dtype) -> None:
    fused = boundary.is_fused(case.n, case.options)
    expected = {"stream_products_kernel", "streams_backward_kernel"}
    if not (fused and case.reads):
        expected.add("read_streams_kernel")
    if fused or case.updates:
        expected.add("write_and_mix_kernel")
    if fused:
        expected |= {"coefficients_kernel", "coefficients_backward_kernel"}
        expected |= {"halves_kernel"} if dtype == torch.bfloat16 else set()
    assert set(spy.launches) == (expected if 0 not in case.lead else set())


@every_case
def test_float32_values_and_gradients_are_those_of_the_specification(
    case: BoundaryCase, spy: LaunchSpy
) -> None:
    tensors = on_device(case.tensors(torch.float32))
    run = functools.partial(case.run, backend="triton")
    values, gradients = case.gradients(run, tensors, torch.float32)
    assert_launched(spy, case, torch.float32)
    wide = [tensor.double() for tensor in tensors]
    expected, expected_gradients = case.gradients(case.reference, wide, torch.float32)
    assert {value.dtype for value in values} == {torch.float32}
    assert max(errors(list(values), list(expected))) <= 1e-5
    assert max(errors(gradients, expected_gradients), default=0.0) <= 1e-5


@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_is_as_close_to_float64_as_plain_pytorch_is(
    case: BoundaryCase, dtype: torch.dtype, spy: LaunchSpy
) -> None:
    if dtype == torch.float16 and case.n > 3:
        pytest.skip("the paths of float16 are those of float32")
    tensors = on_device(case.tensors(dtype))
    run = functools.partial(case.run, backend="triton")
    values, gradients = case.gradients(run, tensors, dtype)
    assert_launched(spy, case, dtype)
    plain_values, plain_gradients = case.gradients(case.run, tensors, dtype)
    wide = [tensor.double() for tensor in tensors]
    exact = case.gradients(case.reference, wide, dtype)
    mine = errors([*values, *gradients], [*exact[0], *exact[1]])
    theirs = errors([*plain_values, *plain_gradients], [*exact[0], *exact[1]])
    bound = {torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for my_error, their_error in zip(mine, theirs, strict=True):
        assert my_error <= max(1.1 * their_error, bound / 100)
    assert max(mine) <= max(bound, 1.1 * max(theirs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_token_gets_does_not_depend_on_the_others(
    dtype: torch.dtype, spy: LaunchSpy
) -> None:
    """Bit for bit: tiles are chosen by the hidden size, never by the number of tokens."""
    many = BoundaryCase(4, 20, MANY)
    tensors = many.tensors(dtype)
    few = [t[:3] if i < 4 else t for i, t in enumerate(tensors)]
    whole, part = many.run(*tensors, backend="triton"), many.run(*few, backend="triton")
    for mine, theirs in zip(part, whole, strict=True):
        assert torch.equal(mine, theirs[:3])
    assert spy.launches["write_and_mix_kernel"] == 2


@pytest.mark.parametrize("updates", [True, False])
def test_running_twice_gives_the_same_bits(updates: bool, spy: LaunchSpy) -> None:
    case = BoundaryCase(4, 20, MANY, updates=updates)
    tensors = on_device(case.tensors(torch.bfloat16))
    run = functools.partial(case.run, backend="triton")
    first, second = (case.gradients(run, tensors, torch.bfloat16) for _ in range(2))
    for mine, theirs in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_write_or_a_read_alone_gives_the_bits_of_the_boundary(dtype: torch.dtype) -> None:
    """What a replay computes again is what was given up."""
    from megatron_residuals.kernels import read_streams, write_streams

    case = BoundaryCase(4, 20, (70,))
    tensors = on_device(case.tensors(dtype))
    found = case.run(*tensors, backend="triton")
    written = write_streams(StreamUpdate(*tensors[:4]), backend="triton")
    assert torch.equal(written, found.streams)
    assert torch.equal(read_streams(written, found.h_pre, backend="triton"), found.x)
    case = BoundaryCase(case.n, case.d, case.lead, reads=True)
    tensors = on_device(case.tensors(dtype))
    again = read_streams(written, tensors[-1], backend="triton")
    assert torch.equal(again, case.run(*tensors, backend="triton").x)
