# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The host's data parallelism: buckets, overlapped reductions and gathers, accumulation.

A bucket is reduced once all its parameters have a gradient, so a parameter without one would stall
it; and a parameter is gathered when the module that owns it is called, so a module that is not
called would compute with the value of the step before.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from megatron_residuals.modules import ResidualHead, SublayerResidual
from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.toy_gpt import ToyGPT, setup_parallel
from megatron_residuals.testing.toy_training import ToyTrainer, Trained, Training, train_toy
from tests.mcore.parallel.cases import (
    BLOCKS,
    FULL,
    HC,
    MHC,
    SMALL,
    assert_mechanism_trains,
    assert_same,
    assert_same_step,
    block_spec_for,
    is_mechanism,
)

pytestmark = [pytest.mark.host, pytest.mark.timeout(120)]

# Two to three micro-batches for each rank: gradients accumulate before they are reduced.
SIZES = dict(SMALL, num_layers=4, num_microbatches=4)
FLOAT64 = dict(SIZES, dtype=torch.float64)
TWO_PHASE = BLOCKS.replace(")", ", two_phase='on')")
# Elements: less than any module has, so that nearly every parameter is a bucket of its own.
SMALL_BUCKETS = dict(overlap_grad_reduce=True, bucket_size=30)
GATHERED = dict(SMALL_BUCKETS, use_distributed_optimizer=True, overlap_param_gather=True)


@functools.cache
def one_process(residual: str, dtype: torch.dtype) -> Trained:
    sizes = dict(SIZES, dtype=dtype)
    return train_toy(ToyGPT(**sizes), block_spec_for(residual), Training(steps=3))


@pytest.mark.parametrize("residual", [MHC, FULL])
def test_overlapped_reduction_in_many_buckets_equals_one_process(residual: str) -> None:
    training = Training(steps=3, ddp=SMALL_BUCKETS)
    actual = train_toy(ToyGPT(**FLOAT64, dp=2), block_spec_for(residual), training)
    expected = one_process(residual, torch.float64)
    assert_same_step(actual, expected)
    assert_mechanism_trains(actual.grads)
    assert_same(actual.parameters, expected.parameters, kind="reordered")


GATHERING = [
    (MHC, dict(dp=2, pp=2, vpp=2)),
    (BLOCKS, dict(dp=2, pp=2, vpp=2)),
    (TWO_PHASE, dict(dp=2)),
]


@pytest.mark.parametrize(("residual", "layout"), GATHERING, ids=str)
def test_parameters_gathered_when_they_are_needed_equal_one_process(
    residual: str, layout: dict[str, Any]
) -> None:
    training = Training(steps=3, ddp=GATHERED)
    actual = train_toy(ToyGPT(**SIZES, **layout), block_spec_for(residual), training)
    expected = one_process(residual, torch.float32)
    # a stale parameter of step two or three shows in the loss
    for mine, theirs in zip(actual.losses, expected.losses, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)
    assert_same(actual.parameters, expected.parameters, torch.float32, "reordered")


def freeze_most(chunks: Sequence[torch.nn.Module]) -> None:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            trains = "linear_fc2" in name or (is_mechanism(name) and "mlp" in name)
            parameter.requires_grad_(trains)


def test_buckets_of_a_model_with_frozen_parts_are_reduced() -> None:
    def train(toy: ToyGPT, **ddp: Any) -> Trained:
        training = Training(ddp=ddp, prepare=freeze_most)
        return train_toy(toy, block_spec_for(BLOCKS), training)

    actual = train(ToyGPT(**FLOAT64, dp=2), **SMALL_BUCKETS)
    assert_same_step(actual, train(ToyGPT(**FLOAT64)))
    assert any(is_mechanism(name) for name in actual.grads)


class Facts(NamedTuple):
    """What data parallelism relies on, of one step."""

    num_buckets: int
    num_of_ours_alone: int
    calls: list[int]
    without_gradient: list[str]


def facts_of_a_step(toy: ToyGPT, residual: str) -> Facts:
    setup_parallel(toy)
    trainer = ToyTrainer(toy, block_spec_for(residual), Training(ddp=GATHERED))
    (model,), (chunk,) = trainer.models, trainer.chunks
    ours = {p for name, p in chunk.named_parameters() if is_mechanism(name)}
    buckets = [set(bucket.params) for buffer in model.buffers for bucket in buffer.buckets]
    parts = [part for part in chunk.modules() if isinstance(part, SublayerResidual | ResidualHead)]
    calls = Counter({id(part): 0 for part in parts})
    for part in parts:
        part.register_forward_pre_hook(lambda part, _: calls.update([id(part)]))
        owned = set(part.parameters(recurse=False))
        assert owned == set(part.parameters()), "a part that is never called owns parameters"
    silent = dict(chunk.named_parameters())
    for name, parameter in chunk.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: silent.pop(name, None))
    trainer.accumulate()
    of_ours_alone = sum(bucket <= ours for bucket in buckets)
    return Facts(len(buckets), of_ours_alone, list(calls.values()), list(silent))


@pytest.mark.parametrize("residual", [HC, MHC, BLOCKS, TWO_PHASE, FULL])
def test_in_each_micro_batch_every_module_is_called_and_every_parameter_gets_a_gradient(
    residual: str,
) -> None:
    toy = ToyGPT(**SIZES, dp=2)
    for facts in run_ranks(2, facts_of_a_step, toy, residual):
        assert facts.num_buckets > 2 * toy.num_layers, "no small buckets: nothing could stall"
        assert facts.num_of_ours_alone > 0
        # two sublayers a layer and the head
        assert len(facts.calls) == 2 * toy.num_layers + 1
        assert min(facts.calls) >= toy.num_microbatches // toy.dp
        # newer hosts would reduce a bucket without it at the end of the step; older ones raise
        assert facts.without_gradient == []
