# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A step needs no value on the host: fake tensors, which have none, pass forward and backward.

So a mechanism never waits for the device, and what it does depends on shapes alone: what a capture
of the whole step into a CUDA graph needs of it.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from megatron.core.tensor_parallel import random
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from megatron_residuals.mechanisms.streams.module import StreamHead
from megatron_residuals.testing import RankFailure, run_ranks
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import ToyGPT, build_chunks, micro_batches, setup_parallel

TOY = ToyGPT(num_layers=3, hidden_size=16, num_heads=2, seq_length=6, num_microbatches=1)
STEPS = [
    "residual()",
    "hc()",
    "hc(streams=2, hc_dynamic=False)",
    "mhc(recompute='mix')",
    "mhc(mhc_convention='dsv4', recompute='group:2', contraction='learned')",
    "attnres(recompute='mix')",
    "block_attnres(block_sublayers=3)",
    "block_attnres(block_sublayers=4, two_phase='on', recompute='block+layer')",
]


def leave_random_states_alone() -> None:
    """Those of a CPU, which stand in for a device's, are read by the host."""
    random.CudaRNGStatesTracker.fork = lambda self, *_: nullcontext()
    random._get_all_rng_states = lambda: ()
    random._set_all_rng_states = lambda: None


def forget_values(chunk: torch.nn.Module, mode: FakeTensorMode) -> None:
    """Put a parameter of its shape, without values, in the place of each."""
    for module in chunk.modules():
        for name, parameter in module.named_parameters(recurse=False):
            fake = mode.from_tensor(parameter.detach())
            setattr(module, name, torch.nn.Parameter(fake))


def fake_steps(toy: ToyGPT, texts: list[str]) -> list[int]:
    """Forward and backward of each without a value; how many gradients there were."""
    setup_parallel(toy)
    leave_random_states_alone()
    batch = next(micro_batches(toy))
    inputs = tuple(batch[name] for name in ("tokens", "positions", "mask"))
    counts = []
    for text in texts:
        (chunk,) = build_chunks(toy, spec_for(text))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            forget_values(chunk, mode)
            output = chunk(*map(mode.from_tensor, inputs))
            output.backward(torch.rand_like(output))
        parameters = list(chunk.parameters())
        assert all(p.grad is not None and p.grad.shape == p.shape for p in parameters), text
        counts.append(len(parameters))
    return counts


def test_a_step_of_every_mechanism_passes_without_a_value() -> None:
    (counts,) = run_ranks(1, fake_steps, TOY, STEPS)
    plain, *others = counts
    assert plain > 0 and all(count > plain for count in others)


def look_at_a_value(toy: ToyGPT, text: str) -> None:
    close = StreamHead.close
    StreamHead.close = lambda self, state: close(self, state) * state.streams.mean().item()
    fake_steps(toy, [text])


def test_one_value_that_the_host_asks_for_is_noticed() -> None:
    with pytest.raises(RankFailure, match=DataDependentOutputException.__name__):
        run_ranks(1, look_at_a_value, TOY, "hc()")
