# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A run that was interrupted goes on bit for bit as one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_residuals.testing.toy_gpt import ToyGPT
from megatron_residuals.testing.toy_training import Training
from tests.mcore.training.saving import BLOCKS, DISTRIBUTED, MHC, PLAIN, train

SMALL = ToyGPT(num_layers=4, hidden_size=16, seq_length=8)
PIPELINE = ToyGPT(num_layers=4, hidden_size=16, seq_length=8, pp=2, vpp=2)
BF16 = ToyGPT(
    num_layers=2,
    hidden_size=16,
    seq_length=8,
    dp=2,
    dtype=torch.bfloat16,
    config_overrides={"bf16": True},
)

pytestmark = [pytest.mark.host, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("toy", "residual", "training", "saved_after"),
    [
        pytest.param(PIPELINE, BLOCKS, DISTRIBUTED, 1, id="blocks-distributed"),
        pytest.param(PIPELINE, MHC, PLAIN, 1, id="mhc-plain", marks=pytest.mark.newest),
        # the same groups hold parameters of the mechanism in 32 bit and of the host in 16
        pytest.param(BF16, MHC, DISTRIBUTED, 1, id="mhc-16-bit-distributed"),
        pytest.param(BF16, BLOCKS, PLAIN, 1, id="blocks-16-bit-plain", marks=pytest.mark.newest),
    ],
)
def test_the_losses_and_weights_of_an_interrupted_run_are_those_of_a_whole_one(
    toy: ToyGPT, residual: str, training: Training, saved_after: int, tmp_path: Path
) -> None:
    folder, sharding = tmp_path / "saved", "dp_reshardable"  # what the training loop takes
    whole = train(
        toy, residual, training, 3, save=folder, save_after=saved_after, sharding=sharding
    )
    resumed = train(toy, residual, training, 3 - saved_after, load=folder, sharding=sharding)
    assert resumed.losses == whole.losses[saved_after:]
    assert len({loss for losses in whole.losses for loss in losses}) == 3 * toy.num_microbatches
    assert resumed.after.keys() == whole.after.keys()
    for name, parameter in whole.after.items():
        assert torch.equal(resumed.after[name], parameter), name
        # a parameter that no step moves could be lost without anyone noticing
        assert not torch.equal(whole.before[name], parameter), name


def test_a_16_bit_model_saves_its_mechanism_in_32_bit_by_global_layer(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    train(BF16, MHC, DISTRIBUTED, 1, save=folder, save_after=1)
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: (tuple(entry.size), entry.properties.dtype)
        for key, entry in stored.items()
        if "residual" in key and not key.startswith("optimizer") and hasattr(entry, "size")
    }
    layers, streams, hidden = BF16.num_layers, 2, BF16.hidden_size
    rows = 2 * streams + streams**2
    shapes = {"alpha_pre": (1,), "alpha_post": (1,), "alpha_res": (1,), "bias": (rows,)}
    shapes["mapping_weight"] = (rows, streams * hidden)
    expected = {
        f"decoder.layers.{part}_residual.{name}": (layers, *shape)
        for part in ("self_attention", "mlp")
        for name, shape in shapes.items()
    }
    expected |= {
        "decoder.residual_head.head_weight": (streams, streams * hidden),
        "decoder.residual_head.head_bias": (streams,),
        "decoder.residual_head.head_scale": (1,),
    }
    assert tensors == {key: (shape, torch.float32) for key, shape in expected.items()}
