# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters in a frozen model, in every stage, with and without recomputation.

With a frozen embedding nothing in front of the first adapter has a gradient: a checkpoint whose
inputs need none would leave the adapters of the first stage untrained.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_residuals.testing.toy_gpt import ToyGPT
from megatron_residuals.testing.toy_training import Trained, Training, train_toy
from megatron_residuals.testing.toy_weights import named_globally
from tests.mcore.parallel.cases import (
    BLOCKS,
    FLOAT64,
    MHC,
    assert_same_step,
    block_spec_for,
    is_mechanism,
)

pytestmark = pytest.mark.timeout(120)

RANK = 3
SIZES = dict(FLOAT64, num_layers=4, num_microbatches=4)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
INTERLEAVED = dict(pp=2, vpp=2)
CASES = {
    "blocks recomputed": (BLOCKS.replace(")", ", recompute='block')"), INTERLEAVED, {}),
    "inputs replayed": (BLOCKS.replace(")", ", recompute='mix')"), INTERLEAVED, {}),
    "groups replayed": (MHC.replace(")", ", recompute='group:3')"), INTERLEAVED, {}),
    "the host's full": (BLOCKS, INTERLEAVED, FULL),
    "data parallel": (MHC, dict(dp=2, pp=2), {}),
}


def adapt(train_mechanism: bool, chunks: Sequence[torch.nn.Module]) -> None:
    """A low-rank term beside both inner linear layers; nothing else of the host's trains."""
    for chunk in chunks:
        chunk.requires_grad_(False)
        for name, module in list(chunk.named_modules()):
            if name.endswith(("linear_qkv", "linear_fc1")):
                rows, columns = module.weight.shape
                for part, shape in (("adapter_a", (RANK, columns)), ("adapter_b", (rows, RANK))):
                    value = torch.empty(shape, dtype=module.weight.dtype)
                    module.register_parameter(part, torch.nn.Parameter(value))
                module.register_forward_hook(add_low_rank_term)
        for name, parameter in named_globally(chunk):
            if "adapter_" in name:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.data.normal_(0, 0.2, generator=generator)
            parameter.requires_grad_("adapter_" in name or (train_mechanism and is_mechanism(name)))


def add_low_rank_term(module: Any, inputs: Any, output: Any) -> Any:
    (x, *_), (y, bias) = inputs, output
    return y + x @ module.adapter_a.T @ module.adapter_b.T, bias


def train(toy: ToyGPT, residual: str, train_mechanism: bool, **ddp: Any) -> Trained:
    training = Training(ddp=ddp, prepare=functools.partial(adapt, train_mechanism))
    return train_toy(toy, block_spec_for(residual), training)


@functools.cache
def one_process(residual: str, train_mechanism: bool) -> Trained:
    return train(ToyGPT(**SIZES), residual, train_mechanism)


@pytest.mark.parametrize("train_mechanism", [False, True], ids=["adapters", "with mechanism"])
@pytest.mark.parametrize(("residual", "layout", "host"), CASES.values(), ids=CASES)
def test_adapters_in_a_frozen_model_equal_one_process_without_recomputation(
    residual: str, layout: dict[str, Any], host: dict[str, Any], train_mechanism: bool
) -> None:
    toy = ToyGPT(**SIZES, config_overrides=host, **layout)
    buckets = dict(overlap_grad_reduce=True, bucket_size=40) if toy.dp > 1 else {}
    actual = train(toy, residual, train_mechanism, **buckets)
    assert_same_step(actual, one_process(MHC if "mhc" in residual else BLOCKS, train_mechanism))
    adapters = [grad for name, grad in actual.grads.items() if "adapter_" in name]
    assert len(adapters) == toy.num_layers * 2 * 2
    assert all(grad.abs().max() > 0 for grad in adapters)
    assert (len(actual.grads) > len(adapters)) == train_mechanism
