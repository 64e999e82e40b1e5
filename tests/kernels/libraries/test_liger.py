# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Liger's own kernels, in Triton's interpreter, compute what we compute: values and gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_residuals import functional, kernels
from megatron_residuals.kernels.common import libraries
from megatron_residuals.kernels.common.dispatch import interpreting
from megatron_residuals.mechanisms.streams.module import ManifoldHyperConnection
from megatron_residuals.modules.state import StreamState
from megatron_residuals.recompute.steps import GroupStep, MixStep, Step, plain_step
from megatron_residuals.testing import assert_close
from tests.functional.loops import random_tensors
from tests.kernels.depth_attention.block import Block, gradients
from tests.kernels.streams.boundary_case import BoundaryCase, errors

LIBRARY = "liger_kernel.transformers.functional"
# rows of a tile that lie behind the last token are divided 0 / 0 and then dropped
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of Liger's functions, in the order of their calls."""
    pytest.importorskip("liger_kernel", reason="Liger is not installed (pip install liger-kernel)")
    if not interpreting():
        pytest.skip("these tensors are on a CPU, where Liger runs in Triton's interpreter only")
    library, names = importlib.import_module(LIBRARY), list[str]()

    def spy(name: str) -> Callable[..., Any]:
        function = getattr(library, name)

        def call(*args: Any, **options: Any) -> Any:
            names.append(name.removeprefix("liger_"))
            return function(*args, **options)

        return call

    for name in ("liger_attn_res", "liger_mhc_coeffs", "liger_mhc_pre", "liger_mhc_post_res"):
        monkeypatch.setattr(library, name, spy(name))
    return names


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison of the first use, which a test that compares can do without."""
    monkeypatch.setattr(libraries, "compare", lambda *_: None)


def detached(tensors: list[Tensor]) -> list[Tensor | None]:
    return [tensor.detach() for tensor in tensors]


@pytest.mark.parametrize(
    ("sources", "dtype", "bound"),
    [(1, torch.float32, 2e-5), (4, torch.bfloat16, 2e-2), (9, torch.float32, 2e-5)],
)
def test_reads_of_sources_equal_the_reference_in_float64(
    sources: int, dtype: torch.dtype, bound: float, called: list[str], unchecked: None
) -> None:
    block = Block.random(sources, 2, dtype, 3, 2)
    actual = block.one_phase(kernels, backend="liger")
    assert called == ["attn_res"] * 2
    exact = block.to(torch.float64)
    expected = exact.one_phase(functional)
    assert max(errors(detached(actual), detached(expected))) < bound
    found = gradients(actual, block.leaves)
    assert [each.dtype for each in found] == [each.dtype for each in block.leaves]
    assert max(errors(list(found), list(gradients(expected, exact.leaves)))) < bound


BOUNDARIES = [
    (BoundaryCase(4, 20, (3, 2), "dsv4"), torch.float32, 2e-5),
    (BoundaryCase(4, 20, (3, 2), "dsv4"), torch.bfloat16, 2e-2),
    (BoundaryCase(2, 100, (5,), "dsv4", False, iterations=20, eps=1e-6), torch.float32, 2e-5),
    (BoundaryCase(1, 12, (), "dsv4", iterations=1), torch.float32, 2e-5),
    (BoundaryCase(8, 9, (2,), "dsv4"), torch.float16, 5e-3),
]


@pytest.mark.parametrize(("case", "dtype", "bound"), BOUNDARIES, ids=str)
def test_a_boundary_of_mhc_equals_the_reference_in_float64(
    case: BoundaryCase, dtype: torch.dtype, bound: float, called: list[str], unchecked: None
) -> None:
    tensors = case.tensors(dtype)

    def liger(*inputs: Tensor) -> functional.StreamRead:
        return case.run(*inputs, backend="liger")

    values, found = case.gradients(liger, tensors, dtype)
    assert called == ["mhc_post_res"] * case.updates + ["mhc_coeffs", "mhc_pre"]
    exact = [tensor.double() for tensor in tensors]
    expected, wanted = case.gradients(case.rounding_reference(dtype), exact, dtype)
    assert [value.dtype for value in values[:2]] == [dtype] * 2
    assert max(errors(list(values), list(expected))) < bound
    assert [None if g is None else g.dtype for g in found[:2]] == [
        None if g is None else dtype for g in wanted[:2]
    ]
    assert max(errors(found, wanted)) < bound


def mhc_layers(kernels: str, count: int, d: int) -> list[ManifoldHyperConnection]:
    draw, layers = random_tensors(3), []
    for index in range(count):
        layer = ManifoldHyperConnection(
            d,
            num_streams=2,
            home_stream=index % 2,
            options=functional.MhcOptions("dsv4", 4, 1e-6),
            alpha_init=0.5,
            initialisation="a6",
            kernels=kernels,
        )
        with torch.no_grad():
            layer.mapping_weight += draw(*layer.mapping_weight.shape) / d**0.5
        layers.append(layer)
    return layers


def chain(step: Step, kernels: str) -> list[Tensor]:
    """The streams behind three sublayers, and all gradients."""
    layers, draw = mhc_layers(kernels, 3, 12), random_tensors(8)
    entering, weights = draw(4, 2, 12).float().requires_grad_(), draw(3, 12, 12).float() / 3
    state = StreamState(entering)
    for layer, weight in zip(layers, weights, strict=True):
        state = step(layer, state, lambda x, weight=weight: torch.tanh(x @ weight))
    streams = state.settled().streams
    leaves = [entering, *[p for layer in layers for p in layer.parameters()]]
    cotangent = draw(4, 2, 12).float()
    return [streams.detach().clone(), *torch.autograd.grad(streams, leaves, cotangent)]


def test_sublayers_of_mhc_train_with_liger_as_with_ours_and_recompute_changes_nothing(
    called: list[str],
) -> None:
    plain = chain(plain_step, "liger")
    assert called[-1] == "mhc_post_res"
    for mine, theirs in zip(plain, chain(plain_step, "torch"), strict=True):
        assert_close(mine, theirs, dtype=torch.float32, kind="reordered", name="liger")
    assert all(map(torch.equal, plain, chain(MixStep(), "liger")))
    assert all(map(torch.equal, plain, chain(GroupStep(2, 3), "liger")))


def test_no_tokens_are_no_fault() -> None:
    streams = torch.empty(0, 2, 12, requires_grad=True)
    (layer,) = mhc_layers("liger", 1, 12)
    x, pending = layer(StreamState(streams))
    written = layer.write(pending, x).settled().streams
    (gradient,) = torch.autograd.grad(written.sum(), [streams])
    assert x.shape == (0, 12) and gradient.shape == streams.shape
    empty = [torch.empty(0, 12), torch.empty(0, 12)]
    weights = torch.ones(12), torch.ones(12)
    read = kernels.read_sources(empty, *weights, eps=1e-6, backend="liger")
    assert read.shape == (0, 12)
    h_pre = torch.empty(0, 2)
    assert kernels.read_streams(streams, h_pre, backend="liger").shape == (0, 12)
