# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""``--optimizer muon``: projections of a mechanism are Muon's, and its 1-D parameters Adam's."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_residuals.testing import assert_close
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import ToyGPT
from megatron_residuals.testing.toy_training import Trained, Training, train_toy

pytest.importorskip("emerging_optimizers", reason="what Megatron's Muon needs")

BF16 = dict(dtype=torch.bfloat16, config_overrides=dict(bf16=True))
TOY = ToyGPT(num_layers=2, hidden_size=16, num_heads=2, seq_length=6, **BF16)


def trained(toy: ToyGPT, mechanism: str) -> Trained:
    training = Training(
        steps=2,
        optimizer=dict(optimizer="muon", weight_decay=0.0),
        ddp=dict(grad_reduce_in_fp32=True),
    )
    return train_toy(toy, spec_for(mechanism), training)


@pytest.mark.parametrize("mechanism", ["mhc(streams=2)", "block_attnres(block_sublayers=3)"])
def test_two_data_parallel_ranks_equal_one_process_under_muon(mechanism: str) -> None:
    one = trained(TOY, mechanism)
    two = trained(dataclasses.replace(TOY, dp=2), mechanism)
    assert one.parameters.keys() == two.parameters.keys()
    for name, parameter in one.parameters.items():
        assert_close(
            two.parameters[name], parameter, dtype=torch.bfloat16, kind="reordered", name=name
        )
