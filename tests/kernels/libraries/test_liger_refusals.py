# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The wish for Liger is met by a package that computes what we compute, or refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_residuals import functional, kernels
from megatron_residuals.mechanisms.streams.module import HyperConnection
from tests.functional.loops import random_tensors
from tests.kernels.libraries.stand_ins import provide, take_away
from tests.kernels.streams.boundary_case import BoundaryCase

LIBRARY = "liger_kernel.transformers.functional"


def attn_res(stacked: Tensor, query: Tensor, gain: Tensor, eps: float) -> Tensor:
    """With the signature of Liger's function, and the reference's result."""
    return functional.read_sources(list(stacked), query, gain, eps=eps)


def forgetful(stacked: Tensor, query: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Takes eight sources at most, and leaves out the others in silence."""
    return attn_res(stacked[:8], query, gain, eps)


def coeffs(
    streams: Tensor, phi: Tensor, bias: Tensor, *alphas: Tensor, tmax: int, **eps: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """As Liger's, whose matrix is [old, new]."""
    weights = functional.MhcWeights(phi.t(), bias, torch.stack(alphas))
    options = functional.MhcOptions("dsv4", tmax, eps["rms_eps"])
    h_pre, h_post, h_res = functional.mhc_coefficients(streams, weights, options)
    return h_pre, h_post, h_res.transpose(-1, -2)


def post_res(streams: Tensor, output: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """As Liger's."""
    return functional.write_streams(functional.StreamUpdate(streams, output, h_post, h_res))


RIGHT: dict[str, Callable[..., Any]] = {
    "liger_attn_res": attn_res,
    "liger_mhc_coeffs": coeffs,
    "liger_mhc_pre": functional.read_streams,
    "liger_mhc_post_res": post_res,
}
CASE = BoundaryCase(4, 6, (3,), "dsv4")


def install(monkeypatch: pytest.MonkeyPatch, **instead: Callable[..., Any]) -> None:
    provide(monkeypatch, LIBRARY, **{**RIGHT, **instead})


def boundary(case: BoundaryCase = CASE, dtype: torch.dtype = torch.float32) -> Tensor:
    return case.run(*case.tensors(dtype), backend="liger").x


def read(count: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = random_tensors(3)
    sources = [draw(2, 8).to(dtype) for _ in range(count)]
    direction, gain = draw(8).float(), draw(8).float()
    return kernels.read_sources(sources, direction, gain, eps=1e-6, backend="liger")


def test_a_right_installation_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert read().shape == (2, 8)
    assert torch.equal(boundary(), CASE.reference(*CASE.tensors(torch.float32)).x)


COMPILED = """
import pytest, torch
from tests.kernels.libraries import test_liger_refusals as here
with pytest.MonkeyPatch.context() as patch:
    here.install(patch)
    graphs = []
    def backend(graph, _):
        graphs.extend(node.name for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward
    for use in (here.read, here.boundary):
        assert torch.equal(torch.compile(lambda x: 2 * (x + use()), backend=backend)(0), 2 * use())
print("mul" in graphs, *sorted({"reshape", "stacked", "softmax"} & set(graphs)))
"""


def test_a_compiler_calls_the_library_and_does_not_trace_it() -> None:
    # in a process of its own: the CPU host of this one has made torch.compile do nothing
    environment = {k: v for k, v in os.environ.items() if k != "TORCHDYNAMO_DISABLE"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.stdout.split() == ["True"], run.stdout + run.stderr


def test_a_missing_installation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, LIBRARY)
    for use in (read, boundary):
        with pytest.raises(RuntimeError, match="cannot be used .* install a liger-kernel that has"):
            use()


def transposed(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    h_pre, h_post, h_res = coeffs(*args, **options)
    return h_pre, h_post, h_res.transpose(-1, -2)


def failing(*_: Any, **__: Any) -> Tensor:
    raise TypeError("unexpected argument")


class WrongBackward(torch.autograd.Function):
    """The weighted sum of streams; for the weights the gradient of other ones."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, h_pre: Tensor) -> Tensor:
        ctx.save_for_backward(streams, h_pre)
        return functional.read_streams(streams, h_pre)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        streams, h_pre = ctx.saved_tensors
        d_pre = 0.9 * torch.einsum("td,tnd->tn", gradient, streams)
        return h_pre.unsqueeze(-1) * gradient.unsqueeze(-2), d_pre


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("liger_mhc_coeffs", transposed, "liger_mhc_coeffs of .* differs from the reference by"),
        (
            "liger_mhc_coeffs",
            failing,
            "liger_mhc_coeffs of .* fails for .* .TypeError: unexpected",
        ),
        ("liger_mhc_pre", WrongBackward.apply, "liger_mhc_pre with .* differs from the reference"),
    ],
)
def test_an_installation_with_another_mhc_is_refused(
    name: str, function: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, **{name: function})
    with pytest.raises(RuntimeError, match=message):
        boundary()


def test_an_installation_that_leaves_out_sources_is_refused_where_it_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, liger_attn_res=forgetful)
    assert read(8).shape == (2, 8)
    with pytest.raises(RuntimeError, match="liger_attn_res of .* differs from the reference by"):
        read(9)


def test_a_mathematics_that_liger_has_not_is_refused_with_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)
    with pytest.raises(ValueError, match="convention dsv4, not paper"):
        boundary(BoundaryCase(4, 6, (3,), "paper"))
    with pytest.raises(ValueError, match="takes 1, 2, 4, 8, 16 streams, not 3"):
        boundary(BoundaryCase(3, 6, (3,), "dsv4"))
    for use in (read, lambda dtype: boundary(CASE, dtype)):
        with pytest.raises(ValueError, match="bfloat16 and float16 tensors, not torch.float64"):
            use(dtype=torch.float64)
    with pytest.raises(ValueError, match="kernels is 'liger' for a HyperConnection; allowed: auto"):
        HyperConnection(
            8, num_streams=2, home_stream=0, dynamic=True, norm="rmsnorm", kernels="liger"
        )


def test_what_its_addresses_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    weights = [torch.empty(7168, device="meta")] * 2
    sources = [torch.empty(32768, 7168, device="meta")] * 10
    with pytest.raises(ValueError, match="10 sources .32768, 7168. are 2348810240"):
        kernels.read_sources(sources, *weights, eps=1e-6, backend="liger")
    streams, h_pre = (torch.empty(2**18, 4, *shape, device="meta") for shape in ((2048,), ()))
    with pytest.raises(ValueError, match=r"streams \(262144, 4, 2048\) are more"):
        kernels.read_streams(streams, h_pre, backend="liger")
