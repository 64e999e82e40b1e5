# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hybrid models under the host's data and context parallelism, and in 16 bits."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mcore.compat import host_version, stock_hybrid_stack
from megatron_residuals.mcore.install import install
from megatron_residuals.mcore.spec import replace_residual
from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.residual_toy import toy_spec
from megatron_residuals.testing.toy_gpt import ToyGPT, run_toy
from megatron_residuals.testing.toy_training import Training, train_toy
from megatron_residuals.testing.toy_weights import default_initialise
from tests.mcore.parallel.cases import (
    BLOCKS,
    MHC,
    assert_mechanism_trains,
    assert_same,
    assert_same_step,
)
from tests.mcore.parallel.context_attention import use_gathered_attention
from tests.mcore.parallel.test_data_parallel import GATHERED
from tests.mcore.parallel.test_mixed_precision import OPTIMIZERS, dtypes_of_a_step
from tests.mcore.test_hybrid import HAS_STAGES, hybrid

pytestmark = [
    pytest.mark.host,
    pytest.mark.skipif(not HAS_STAGES, reason="hybrid models of 0.16 have no stages"),
]
# Up to 0.18 the host asserts where a Mamba layer's small buckets are gathered, stock models' too.
PATTERN = "M*|-M|*E|-*" if host_version().release >= (0, 19) else "*-|E*|-*|-E"


@pytest.mark.parametrize("residual", [MHC, BLOCKS])
def test_a_distributed_optimizer_with_gathers_between_virtual_stages_equals_one_process(
    residual: str,
) -> None:
    toy = hybrid(PATTERN, dp=2, pp=2, vpp=2)
    actual = train_toy(toy, toy_spec(toy, residual), Training(steps=3, ddp=GATHERED))
    alone = hybrid(PATTERN.replace("|", ""))
    expected = train_toy(alone, toy_spec(alone, residual), Training(steps=3))
    for mine, theirs in zip(actual.losses, expected.losses, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)
    assert_same(actual.parameters, expected.parameters, torch.float32, "reordered")


@pytest.mark.newest
@pytest.mark.parametrize("residual", [MHC, BLOCKS])
def test_a_mechanism_is_float32_between_16_bit_layers_of_every_kind(residual: str) -> None:
    overrides = {"bf16": True, "expert_model_parallel_size": 1}
    toy = hybrid("M*E-", dp=2, dtype=torch.bfloat16, config_overrides=overrides)
    for found in run_ranks(2, dtypes_of_a_step, toy, residual, OPTIMIZERS["distributed"]):
        found.pop("narrow")
        assert found.pop("host's") == {torch.bfloat16}
        assert set(found) == {"module", "main gradients", "optimizer", "checkpoint"}
        assert all(dtypes == {torch.float32} for dtypes in found.values())


MIXER_PARTS = {  # rows: z, x, B, C, dt of four heads of 8 each in two groups of 8 states
    "in_proj.weight": (32, 32, 16, 16, 4),
    "conv1d_weight": (32, 16, 16),
    "conv1d_bias": (32, 16, 16),
}


def rows_in_one_process(name: str, length: int) -> torch.Tensor:
    """Of rows as two tensor-parallel ranks have them behind one another, the order of one process.

    A rank has its share of every part.
    """
    parts = next((parts for end, parts in MIXER_PARTS.items() if name.endswith(end)), (length,))
    each, order, begin = sum(parts) // 2, [], 0
    for part in parts:
        for rank in range(2) if len(parts) > 1 else ():
            order += range(rank * each + begin, rank * each + begin + part // 2)
        begin += part // 2
    return torch.tensor(order or range(length))


def in_one_process(
    name: str, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor | None:
    return default_initialise(name, shape, generator)[rows_in_one_process(name, shape[0])]


@pytest.mark.newest
@pytest.mark.parametrize("residual", [MHC, BLOCKS])
def test_mamba_layers_under_tensor_and_sequence_parallelism_equal_one_process(
    residual: str,
) -> None:
    alone = hybrid("M*M-", dtype=torch.float64)
    parts = hybrid("M*|M-", dtype=torch.float64, tp=2, sequence_parallel=True, pp=2)
    expected = run_toy(alone, toy_spec(alone, residual), initialise=in_one_process)
    actual = run_toy(parts, toy_spec(parts, residual))
    grads = {
        name: grad[rows_in_one_process(name, len(grad))] for name, grad in actual.grads.items()
    }
    assert sum(name.endswith(tuple(MIXER_PARTS)) for name in grads) == 6
    assert actual.losses == pytest.approx(expected.losses, rel=1e-12)
    assert_same(grads, expected.grads, torch.float64, "reordered")


def gathered(residual: str) -> Callable[[Any, int | None], Any]:
    """The hybrid stack with attention over the tokens of all context-parallel ranks."""

    def spec(config: Any, vp_stage: int | None) -> Any:
        install()
        stack = copy.deepcopy(stock_hybrid_stack(config))
        use_gathered_attention(stack.submodules.attention_layer)
        return replace_residual(stack, ResidualConfig.parse(residual))

    return spec


@pytest.mark.newest
@pytest.mark.parametrize("residual", [MHC, BLOCKS])
def test_context_parallelism_equals_one_process(residual: str) -> None:
    sizes = dict(hidden_size=16, num_heads=2, seq_length=8, num_microbatches=2)
    whole = ToyGPT(num_layers=6, pattern="*-*-*-", dtype=torch.float64, **sizes)
    parts = dataclasses.replace(whole, pattern="*-|*|-*|-", cp=2, pp=2, vpp=2)
    actual = train_toy(parts, gathered(residual))
    assert_same_step(actual, run_toy(whole, gathered(residual)))
    assert_mechanism_trains(actual.grads)
