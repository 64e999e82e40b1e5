# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The same seed twice gives the same bits, in deterministic mode and with dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_residuals.testing.toy_gpt import ToyGPT
from megatron_residuals.testing.toy_training import Training, train_toy
from tests.mcore.parallel.cases import BLOCKS, MHC, SMALL, block_spec_for

pytestmark = pytest.mark.timeout(120)

CASES = {
    "mhc, interleaved, groups replayed": (
        MHC.replace(")", ", recompute='group:3')"),
        dict(pp=2, vpp=2),
        {},
    ),
    "blocks, interleaved delta": (BLOCKS, dict(pp=2, vpp=2), {}),
    "blocks, overlapped data parallelism, blocks recomputed": (
        BLOCKS.replace(")", ", recompute='block')"),
        dict(dp=2),
        dict(overlap_grad_reduce=True, bucket_size=300),
    ),
}


def deterministic(chunks: Sequence[torch.nn.Module]) -> None:
    """What Megatron's --deterministic-mode does; from here on torch.empty gives NaN."""
    assert all(chunk.config.deterministic_mode for chunk in chunks)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize(("residual", "layout", "ddp"), CASES.values(), ids=CASES)
def test_three_steps_repeat_bit_for_bit(
    residual: str, layout: dict[str, Any], ddp: dict[str, Any]
) -> None:
    def run() -> Any:
        overrides = dict(deterministic_mode=True)
        sizes = dict(SMALL, num_layers=4, dropout=0.1)
        toy = ToyGPT(**sizes, config_overrides=overrides, **layout)
        training = Training(steps=3, ddp=ddp, prepare=deterministic)
        return train_toy(toy, block_spec_for(residual), training)

    first, second = run(), run()
    assert first.losses == second.losses
    for name, value in first.parameters.items():
        assert torch.isfinite(value).all()
        assert torch.equal(value, second.parameters[name]), name
        assert torch.equal(first.grads[name], second.grads[name]), name
