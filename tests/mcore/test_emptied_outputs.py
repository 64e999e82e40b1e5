# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Outputs that the schedule empties while they are still being sent arrive whole."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    ToyResult,
    build_chunks,
    merge,
    run_toy,
    setup_parallel,
    train_step,
)
from megatron_residuals.testing.toy_weights import full_grads

pytestmark = pytest.mark.host


def step_with_late_receivers(toy: ToyGPT, spec: Any) -> ToyResult:
    """A step in which one rank posts its receives late, and freed memory is overwritten at once."""
    receive = dist.irecv

    @functools.wraps(receive)
    def late_receive(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return receive(*args, **kwargs)

    if dist.get_rank() == 1:
        dist.irecv = late_receive
    setup_parallel(toy)
    chunks = build_chunks(toy, spec)
    litter: list[list[torch.Tensor]] = []
    empty_output = schedules.deallocate_output_tensor

    @functools.wraps(empty_output)
    def empty_and_overwrite(out: Any, *args: Any) -> None:
        size = out.numel() if isinstance(out, torch.Tensor) else 0
        empty_output(out, *args)
        litter.append([torch.full((size,), float("nan")) for _ in range(8 if size > 1 else 0)])

    schedules.deallocate_output_tensor = empty_and_overwrite
    losses = train_step(chunks, toy)
    return ToyResult(losses, full_grads(chunks))


@pytest.mark.parametrize("mechanism", ["mhc()", "block_attnres(block_sublayers=3)"])
def test_an_output_that_is_emptied_while_it_is_being_sent_arrives_whole(mechanism: str) -> None:
    # hosts up to 0.17 empty outputs of the interleaved schedule before their send is complete
    toy = ToyGPT(pp=2, vpp=2, config_overrides={"deallocate_pipeline_outputs": True})
    spec = spec_for(mechanism)
    actual = merge(run_ranks(2, step_with_late_receivers, toy, spec, timeout_s=60))
    expected = run_toy(ToyGPT(pp=2, vpp=2), spec)
    assert actual.losses == expected.losses
    assert all(torch.equal(actual.grads[name], grad) for name, grad in expected.grads.items())
