# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The AttnRes kernels in Triton's interpreter: parity, determinism, and operators for compilers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")

from megatron_residuals import kernels
from megatron_residuals.kernels.depth_attention import pytorch, triton
from megatron_residuals.kernels.depth_attention.triton import launches, operators
from megatron_residuals.kernels.depth_attention.triton.table import addresses
from tests.functional.loops import random_tensors
from tests.kernels.depth_attention.block import EPS, Block, gradients
from tests.kernels.launch_spy import LaunchSpy, poison_new_memory

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
Blocks = Callable[..., list[Tensor]]
PATHS: dict[str, Blocks] = {
    "one-phase": lambda block, **options: block.one_phase(kernels, **options),
    "two-phase": lambda block, **options: block.two_phase(**options),
}
# sources, readers, tokens, hidden size
SHAPES = [(1, 1, 3, 100), (2, 3, 3, 40), (5, 2, 4, 72)]
LARGE = [(33, 1, 2, 100), (2, 1, 1, 2880), (2, 1, 1, 5120), (1, 1, 1, 7168)]

every_path = pytest.mark.parametrize("path", PATHS)
every_dtype = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


KERNELS = {
    "read_sources_kernel": "one-phase",
    "read_sources_backward_kernel": "one-phase",
    "merge_kernel": "two-phase",
    "merge_backward_kernel": "two-phase",
    "scores_kernel": "two-phase",
    "mix_kernel": "two-phase",
    "source_products_kernel": "two-phase",
    "accumulate_kernel": "two-phase",
}


@pytest.fixture(autouse=True)
def spy(monkeypatch: pytest.MonkeyPatch) -> LaunchSpy:
    """Memory that nobody has written to is NaN, and launches are counted."""
    poison_new_memory(monkeypatch)
    spy = LaunchSpy()
    spy.watch(monkeypatch, launches, *KERNELS)
    return spy


def errors(path: str, block: Block, backend: str) -> list[float]:
    """Relative errors of all values and gradients against float64 with the same inputs."""
    exact = block.to(torch.float64)
    graph = exact.one_phase()
    expected = [each.detach() for each in graph]
    actual = PATHS[path](block, backend=backend)
    found = zip(gradients(actual, block.leaves), gradients(graph, exact.leaves), strict=True)
    return [
        float((mine.detach().double() - theirs).norm() / theirs.norm().clamp_min(1e-9))
        for mine, theirs in [*zip(actual, expected, strict=True), *found]
    ]


@every_path
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_float64_as_closely_as_plain_pytorch_s(
    path: str, dtype: torch.dtype, shape: tuple[int, ...], spy: LaunchSpy
) -> None:
    """Where tokens are few, the gradient of a direction is a sum of few rounded products."""
    sources, readers, tokens, d = shape
    block = Block.random(sources, readers, dtype, tokens, d=d)
    mine, torchs = errors(path, block, "triton"), errors(path, block, "torch")
    for error, other in zip(mine, torchs, strict=True):
        assert error <= max(BOUNDS[dtype], 1.1 * other)
    assert set(spy.launches) == {name for name, of in KERNELS.items() if of == path}


@every_path
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_many_sources_and_wide_models(path: str, shape: tuple[int, ...]) -> None:
    sources, readers, tokens, d = shape
    block = Block.random(sources, readers, torch.float32, tokens, d=d)
    assert max(errors(path, block, "triton")) <= BOUNDS[torch.float32]


def test_more_readers_and_tokens_than_one_program_takes() -> None:
    """Phase 1 alone, with a reader that nobody used and a source that is frozen."""
    draw, tokens, d = random_tensors(6), 70, 24
    sources = [draw(tokens, d) for _ in range(3)]
    directions, d_lses = draw(17, d), [draw(tokens) for _ in range(17)]
    given = [None if s == 2 else draw(tokens, d) for s in range(17)]
    found = []
    for backend, dtype in ((triton, torch.float32), (pytorch, torch.float64)):
        own, rows = [each.to(dtype) for each in sources], directions.to(dtype)
        values, lses, scores = backend.read_closed(own, rows, EPS)
        sums = [torch.ones_like(own[0]), torch.zeros_like(own[1]), None]
        d_directions = backend.read_closed_backward(
            [None if each is None else each.to(dtype) for each in given],
            [each.to(dtype) for each in d_lses],
            own,
            rows,
            scores,
            sums,
        )
        found.append([*values, lses, d_directions, *sums[:2]])
    for mine, exact in zip(*found, strict=True):
        assert float((mine.double() - exact).norm() / exact.norm()) <= BOUNDS[torch.float32]


@every_dtype
@pytest.mark.parametrize("parts", [(1, 1, 1), (1, 2)], ids=str)
def test_nothing_depends_to_the_last_bit_on_who_shares_a_pass(
    dtype: torch.dtype, parts: tuple[int, ...]
) -> None:
    block = Block.random(2, 3, dtype, 3, d=40)
    together, apart = (block.two_phase(parts=each, backend="triton") for each in ((), parts))
    assert all(map(torch.equal, together, apart))
    found = [gradients(each, block.leaves) for each in (together, apart)]
    assert all(map(torch.equal, *found))


@every_path
def test_frozen_sources_and_strided_ones(path: str) -> None:
    block = Block.random(3, 2, torch.float32, 4, d=24)
    full = gradients(PATHS[path](block, backend="triton"), block.leaves)
    block.sources[1].requires_grad_(False)
    rest = [leaf for leaf in block.leaves if leaf.requires_grad]
    expected = [each for i, each in enumerate(full) if i != 1]
    found = gradients(PATHS[path](block, backend="triton"), rest)
    assert all(map(torch.equal, found, expected))
    strided = Block(
        [torch.stack((each, each), -1)[..., 0] for each in block.sources],
        block.directions,
        block.partial,
        block.outputs,
    )
    assert not strided.sources[0].is_contiguous()
    values = PATHS[path](strided, backend="triton")
    assert all(map(torch.equal, values, PATHS[path](block, backend="triton")))


@every_path
def test_no_token_is_no_problem(path: str) -> None:
    block = Block.random(2, 2, torch.float32, 0, d=24)
    outputs = PATHS[path](block, backend="triton")
    assert all(each.shape == (0, 24) for each in outputs)
    assert not gradients(outputs, block.leaves)[2].any()


@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_a_table_holds_the_address_of_every_tensor_and_zero_for_none(count: int) -> None:
    tensors = [None if i % 5 == 3 else torch.zeros(3) for i in range(count)]
    table = addresses(tensors, torch.zeros(1))
    assert table.tolist() == [0 if each is None else each.data_ptr() for each in tensors]


def test_operators_keep_what_they_promise_to_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemas, fakes, and what they change in place, as torch.library.opcheck knows them."""
    monkeypatch.undo()
    draw = random_tensors(4)
    first, second, partial, output, gradient = (draw(3, 24).float() for _ in range(5))
    sources, directions, lse = [first, second], draw(2, 24).float(), draw(3).float()
    direction, check = directions[0].clone(), torch.library.opcheck
    x, *scores = operators.read_sources(sources, direction, EPS)
    check(operators.read_sources, (sources, direction, EPS))
    changed = [torch.zeros(3, 24)], [1], [torch.empty(3, 24)], [0]
    check(operators.read_sources_backward, (gradient, sources, direction, scores, *changed))
    *_, dots, rstd = operators.read_closed(sources, directions, EPS)
    check(operators.read_closed, (sources, directions, EPS))
    given = [gradient, None], [None, lse], sources, directions, [dots, rstd]
    check(operators.read_closed_backward, (*given, [torch.zeros(3, 24)], [1]))
    for added, later in ((output, gradient), (None, None)):
        arguments = ([first, lse, direction], partial, added, EPS)
        check(operators.merge_running, arguments)
        merged = operators.merge_running(*arguments)
        merged[1] = partial if added is None else merged[1]
        check(operators.merge_running_backward, (gradient, later, direction, merged))


@every_path
@pytest.mark.parametrize("size", [1e18, 1e20])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's
def test_sources_with_squares_beyond_float32_are_read_as_by_plain_pytorch(
    path: str, size: float
) -> None:
    block = Block.random(2, 2, torch.float32, 2, d=40)
    with torch.no_grad():
        for source in block.sources:
            source *= size
    for mine, other in zip(
        *(PATHS[path](block, backend=b) for b in ("triton", "torch")), strict=True
    ):
        torch.testing.assert_close(mine / size, other / size, rtol=1e-5, atol=1e-5)
        assert mine.isfinite().all()
