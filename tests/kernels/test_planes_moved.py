# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What the kernels and autograd between them move is what the accounting of traffic says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")

from benchmarks import traffic as metering
from megatron_residuals.config import ResidualConfig
from megatron_residuals.depth import DepthMap
from megatron_residuals.modules import SourceState, StreamState, build_sublayer_residual
from megatron_residuals.pipeline.traffic import (
    SUM_OF_SOURCE,
    Planes,
    one_pass,
    streams,
    two_phases,
)

TOKENS, HIDDEN = 7, 37  # primes: nothing but planes has as many numbers
DTYPE = torch.bfloat16


class Sublayer(torch.autograd.Function):
    """A sublayer that moves nothing; its gradients are tensors of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with _disable_current_modes():
            return gradient.clone()


def plane(*streams: int) -> Tensor:
    return torch.randn(TOKENS, *streams, HIDDEN).to(DTYPE).requires_grad_()


def measured(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Tensor]) -> Planes:
    """Planes of a forward and its backward; tensors of any other size do not count."""

    def touched(tensor: Tensor) -> int:
        numbers = tensor.numel()
        is_planes = numbers > 0 and numbers % (TOKENS * HIDDEN) == 0
        return numbers * tensor.element_size() if is_planes else 0

    monkeypatch.setattr(metering, "touched", touched)
    with metering.TrafficMeter().running() as forward:
        result = run()
    cotangent = torch.randn_like(result)
    with metering.TrafficMeter().running() as backward:
        torch.autograd.backward(result, cotangent)
    found = (metering.planes(each.total, TOKENS, HIDDEN) for each in (forward, backward))
    return Planes(*found)


def run_sublayers(config: ResidualConfig, depth: DepthMap | None, state: Any, where: range) -> Any:
    modules = {
        i: build_sublayer_residual(config, depth, hidden_size=HIDDEN, sublayer=i) for i in where
    }
    for part in config.entry.parts(config, depth, where):
        readers = [modules[i] for i in part]
        state = readers[0].begin(readers, state)
        for reader in readers:
            x, pending = reader.read(state)
            state = reader.write(pending, Sublayer.apply(x))
    return state


@pytest.mark.parametrize(("choice", "way"), [("off", one_pass), ("on", two_phases)])
@pytest.mark.parametrize(("num_finished", "length", "skipped"), [(1, 2, 0), (3, 4, 0), (2, 4, 1)])
def test_a_part_of_a_block_moves_the_planes_of_the_accounting(
    monkeypatch: pytest.MonkeyPatch,
    choice: str,
    way: Callable[..., Planes],
    num_finished: int,
    length: int,
    skipped: int,
) -> None:
    # A copy of a whole source in float32, made to learn a dtype, cost three planes for each read.
    config = ResidualConfig(
        "block_attnres", block_sublayers=length, two_phase=choice, kernels="triton"
    )
    depth = DepthMap(length * num_finished, length, 1)
    where = range(length * (num_finished - 1) + skipped, length * num_finished)
    finished = [plane() for _ in range(depth.num_sources(where.start))]
    partial = plane()

    def run() -> Tensor:
        state = SourceState.of([Sublayer.apply(each) for each in finished], Sublayer.apply(partial))
        result: Tensor = run_sublayers(config, depth, state, where).partial
        return result

    expected = way(num_finished, len(where), opens=skipped == 0)
    expected = expected.plus(SUM_OF_SOURCE, num_finished)
    assert measured(monkeypatch, run) == expected


@pytest.mark.parametrize("mechanism", ["mhc", "ihc", "single_pass_mhc"])
@pytest.mark.parametrize(("num_streams", "num_sublayers"), [(2, 2)])
def test_streams_move_the_planes_of_the_accounting(
    monkeypatch: pytest.MonkeyPatch, num_streams: int, num_sublayers: int, mechanism: str
) -> None:
    config = ResidualConfig(mechanism, streams=num_streams, kernels="triton")
    opened = plane(num_streams)
    shifted = config.entry.numbers(config) > 0
    reads = torch.full(opened.shape[:-1], 0.5) if shifted else None

    def run() -> Tensor:
        state = StreamState(Sublayer.apply(opened), reads=reads)
        settled = run_sublayers(config, None, state, range(num_sublayers)).settled()
        result: Tensor = settled.streams
        return result

    expected = streams(num_streams, num_sublayers, single_pass=shifted)
    assert measured(monkeypatch, run) == expected
