# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The CPU host says what it replaces, does it once, and keeps out of the way of a GPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_residuals import cpu_host
from megatron_residuals.cpu_host import Report, installation
from megatron_residuals.testing import cpu_host as first_name
from megatron_residuals.testing import run_ranks
from tests.mcore.training.test_warm_start_script import ONE_STAGE

pytestmark = [
    pytest.mark.host,
    pytest.mark.timeout(60),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU host does nothing beside a GPU"),
]


def _replaced() -> list[object]:
    """The objects that stand at some of the replaced names."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return [
        torch.compile,
        torch.cuda.current_device,
        torch.distributed.all_to_all_single,
        random._get_cuda_rng_state,
        WrappedTorchNorm.__new__,
    ]


def test_installing_twice_changes_nothing_and_reports_the_same() -> None:
    first, before = cpu_host.install(), _replaced()
    assert cpu_host.install() is first
    assert all(a is b for a, b in zip(_replaced(), before, strict=True))


def test_the_name_that_it_had_first_still_leads_to_it() -> None:
    assert (first_name.install, first_name.Report) == (cpu_host.install, Report)


def test_the_report_keeps_host_defects_apart_from_cuda_and_from_speed() -> None:
    report = cpu_host.install()
    assert any("torch.cuda" in line for line in report.device_mapping)
    assert any("WrappedTorchNorm" in line for line in report.host_repairs)
    assert any("torch.compile" in line for line in report.speed_only)
    assert not any("cuda" in line.lower() for line in report.host_repairs + report.speed_only)
    text = str(report)
    headings = ["CUDA calls answered", "Host defects repaired", "For speed only"]
    assert [text.index(heading) for heading in headings] == sorted(map(text.index, headings))
    for line in report.device_mapping + report.host_repairs + report.speed_only:
        assert f"    - {line}" in text


def test_beside_a_gpu_it_does_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _replaced()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for training in (False, True):
        report = cpu_host.install(training=training)
        assert report == Report() and "nothing replaced" in str(report)
    assert all(a is b for a, b in zip(_replaced(), before, strict=True))


def _install_anew() -> str:
    installation._installed = None
    with pytest.raises(RuntimeError) as refusal:
        cpu_host.install()
    return str(refusal.value)


def test_installing_after_megatron_was_imported_is_refused() -> None:
    (message,) = run_ranks(1, _install_anew)
    assert "after megatron.core had been imported" in message and "conftest.py" in message


def _prepare_training() -> tuple[Report, Report, int, str]:
    before = cpu_host.install()
    after = cpu_host.install(training=True)
    assert cpu_host.install(training=True) is after and cpu_host.install() is after
    from megatron.core.datasets.utils import compile_helpers
    from megatron.training import training

    compile_helpers()
    keywords = training.initialize_megatron.keywords
    return before, after, torch.cuda.device_count(), str(keywords)


def _refuse_training() -> str:
    with pytest.raises(RuntimeError) as refusal:
        cpu_host.install(training=True)
    return str(refusal.value)


needs_training = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="this Megatron-Core has no megatron.training (wheels before 0.17)",
)


def test_training_is_prepared_on_request_or_its_absence_explained() -> None:
    if importlib.util.find_spec("megatron.training") is None:
        (message,) = run_ranks(1, _refuse_training)
        assert "needs megatron.training" in message and "0.17 on" in message
        return
    ((before, after, device_count, keywords),) = run_ranks(1, _prepare_training)
    assert before.speed_only == after.speed_only
    (mapped,) = set(after.device_mapping) - set(before.device_mapping)
    (repaired,) = set(after.host_repairs) - set(before.host_repairs)
    assert "allow_no_cuda" in mapped and "compile_helpers" in repaired
    assert (device_count, keywords) == (1, "{'allow_no_cuda': True}")


def _losses_with_experts() -> list[list[float]]:
    """What Megatron's own arguments make of an MoE model, with grouped experts and without."""
    cpu_host.install(training=True)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training.arguments import parse_args, validate_args

    from megatron_residuals.testing.toy_gpt import ToyGPT, build_chunks, setup_parallel, train_step

    losses = []
    for flags in ([], ["--moe-grouped-gemm"]):
        sys.argv = ["pretrain_gpt.py", *ONE_STAGE, "--num-experts", "4", *flags]
        args = validate_args(parse_args())
        experts = dict(num_moe_experts=args.num_experts, moe_grouped_gemm=args.moe_grouped_gemm)
        toy = ToyGPT(num_layers=1, bias=False, config_overrides=experts)
        if not losses:
            setup_parallel(toy)
        spec = get_gpt_layer_local_spec(args.num_experts, args.moe_grouped_gemm)
        losses.append(train_step(build_chunks(toy, spec), toy))
    return losses


@needs_training
@pytest.mark.filterwarnings("ignore:'type' is deprecated:DeprecationWarning")  # Megatron's parser
def test_grouped_experts_are_taken_and_compute_what_single_ones_do() -> None:
    """--moe-grouped-gemm ended in "no NVIDIA driver": the host asks what the device can do, and
    only the architecture was answered."""
    ((single, grouped),) = run_ranks(1, _losses_with_experts)
    assert len(single) > 1 and grouped == single


def test_the_gauges_of_a_straggler_report_read_zero() -> None:
    """Only the load was answered, and --log-straggler ended in "no NVIDIA driver"."""
    gauges = ("utilization", "temperature", "power_draw", "clock_rate")
    assert [getattr(torch.cuda, name)() for name in gauges] == [0] * 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.zeros(2, device=torch.device("cuda", 0)),
        lambda: torch.zeros(2, device=0),
        lambda: torch.zeros(2, device=torch.cuda.current_device()),
        lambda: torch.zeros(2, pin_memory=True),
        lambda: torch.zeros(2).to("cuda"),
        lambda: torch.zeros(2).to(device="cuda", dtype=torch.float64),
        lambda: torch.zeros(2).cuda(),
        lambda: torch.zeros(2).pin_memory(),
    ],
)
def test_a_tensor_asked_for_on_cuda_is_on_the_cpu(make: Callable[[], torch.Tensor]) -> None:
    assert make().device == torch.device("cpu")


class MakesOnCuda(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, 3, device="cuda")


def test_in_a_backward_pass_too_what_is_asked_for_on_cuda_is_on_the_cpu() -> None:
    # torch runs backward with the mode off that maps devices: Transformer Engine makes its bias
    # gradients there.
    x = torch.zeros(2, requires_grad=True)
    MakesOnCuda.apply(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3, 3]


def test_a_cpu_tensor_passes_for_its_cuda_type_and_for_its_own_and_for_no_other() -> None:
    name = torch.zeros(2, dtype=torch.bfloat16).type()
    assert name == "torch.cuda.BFloat16Tensor" and name == "torch.BFloat16Tensor"
    assert name in ["torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor"]
    assert name != "torch.cuda.FloatTensor" and name not in ["torch.cuda.HalfTensor"]
    assert torch.zeros(2).type(torch.float64).dtype == torch.float64


def test_streams_and_events_are_null_and_the_generator_is_the_cpus() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        begin = torch.cuda.Event(enable_timing=True)
        begin.record()
        end = torch.cuda.current_stream().record_event()
    assert end.query() and begin.elapsed_time(end) > 0 > end.elapsed_time(begin)
    torch.cuda.manual_seed(11)
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    assert torch.cuda.memory_allocated() == 0 and not torch.cuda.is_available()
