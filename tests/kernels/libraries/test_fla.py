# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The wish for fla is met by a package that computes what we compute, or refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_residuals import config, functional, kernels
from megatron_residuals.kernels.common import libraries
from tests.functional.loops import random_tensors
from tests.kernels.depth_attention.block import Block, gradients
from tests.kernels.libraries.stand_ins import provide, take_away

calls: list[int] = []


def stand_in(query: Tensor, values: Sequence[Tensor], gain: Tensor, *, rms_eps: float) -> Tensor:
    """With the signature of fla's function, [1, T, d] values, and the reference's result."""
    assert all(value.dim() == 3 for value in values)
    calls.append(len(values))
    return functional.read_sources(values, query, gain, eps=rms_eps)


def wrong(query: Tensor, values: Sequence[Tensor], gain: Tensor, *, rms_eps: float) -> Tensor:
    """Takes another gain."""
    return stand_in(query, values, 1.1 * gain, rms_eps=rms_eps)


def install(monkeypatch: pytest.MonkeyPatch, function: object) -> None:
    provide(monkeypatch, "fla.ops.attnres", fused_attnres=function)
    calls.clear()


def test_fla_reads_for_one_sublayer_and_not_in_two_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, stand_in)
    block = Block.random(3, 2, torch.float32, 4, 2)
    expected, actual = block.one_phase(), block.one_phase(kernels, backend="fla")
    assert calls[-2:] == [4, 4]
    assert all(map(torch.equal, actual, expected))
    found = [gradients(each, block.leaves) for each in (actual, expected)]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="phase 1 of a read; allowed: auto, torch, triton"):
        block.two_phase(backend="fla")


def read(dtype: torch.dtype) -> Tensor:
    draw = random_tensors(3)
    sources = [draw(2, 8).to(dtype) for _ in range(2)]
    return kernels.read_sources(sources, draw(8).float(), draw(8).float(), eps=1e-6, backend="fla")


def test_an_installation_with_another_result_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, wrong)
    with pytest.raises(RuntimeError, match="differs from the reference by"):
        read(torch.float32)


def test_a_missing_installation_and_an_unknown_dtype_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, stand_in)
    with pytest.raises(ValueError, match="not torch.float64"):
        read(torch.float64)
    take_away(monkeypatch, "fla.ops.attnres")
    with pytest.raises(RuntimeError, match="fla.ops.attnres.fused_attnres cannot be used"):
        read(torch.float32)


def test_the_libraries_are_those_that_the_configuration_allows() -> None:
    assert tuple(libraries.LIBRARIES) == config.LIBRARIES
