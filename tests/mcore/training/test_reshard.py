# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of one parallel layout goes on in any other."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_residuals.testing import assert_close
from megatron_residuals.testing.ranks import run_ranks
from megatron_residuals.testing.toy_gpt import ToyGPT
from tests.mcore.training.saving import (
    BLOCKS,
    DISTRIBUTED,
    MHC,
    PLAIN,
    RESHARDABLE,
    Steps,
    request,
    start,
    train,
)

ONE = ToyGPT(num_layers=4, hidden_size=16, seq_length=8)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": dict(tp=2, sequence_parallel=True),
    "pp2": dict(pp=2),
    "pp2-vpp2": dict(pp=2, vpp=2),
    "dp2": dict(dp=2),
}

pytestmark = [pytest.mark.host, pytest.mark.timeout(120)]


def layout(name: str) -> ToyGPT:
    return dataclasses.replace(ONE, **LAYOUTS[name])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Steps]]:
    """By mechanism: a checkpoint after the first of three steps, and the run that wrote it."""
    runs = {}
    for residual, written_in in ((BLOCKS, "pp2-vpp2"), (MHC, "tp2")):
        folder = tmp_path_factory.mktemp(written_in) / "saved"
        run = train(layout(written_in), residual, DISTRIBUTED, 3, save=folder, save_after=1)
        runs[residual] = (folder, run)
    return runs


@pytest.mark.parametrize(
    ("residual", "read_in"),
    [
        pytest.param(BLOCKS, "one", id="blocks-pp2-vpp2-one", marks=pytest.mark.newest),
        pytest.param(BLOCKS, "tp2", id="blocks-pp2-vpp2-tp2"),
        pytest.param(BLOCKS, "pp2", id="blocks-pp2-vpp2-pp2", marks=pytest.mark.newest),
        pytest.param(BLOCKS, "dp2", id="blocks-pp2-vpp2-dp2"),
        pytest.param(MHC, "one", id="mhc-tp2-one", marks=pytest.mark.newest),
        pytest.param(MHC, "pp2-vpp2", id="mhc-tp2-pp2-vpp2"),
    ],
)
def test_another_layout_has_the_same_weights_and_goes_on_with_the_same_losses(
    written: dict[str, tuple[Path, Steps]], residual: str, read_in: str
) -> None:
    folder, run = written[residual]
    read = train(layout(read_in), residual, DISTRIBUTED, 2, load=folder)
    assert read.before.keys() == run.saved.keys()
    for name, parameter in run.saved.items():
        assert torch.equal(read.before[name], parameter), name
    # the second loss is that of weights which the loaded optimizer has changed
    losses = torch.tensor(read.losses), torch.tensor(run.losses[1:])
    assert_close(*losses, dtype=torch.float32, kind="same_math", name="losses")


def shards(toy: ToyGPT) -> list[dict[str, tuple[Any, ...]]]:
    """What each rank asks for of the mechanism: key, global shape, offset, replica."""

    def run() -> dict[str, tuple[Any, ...]]:
        state = request(start(toy, MHC, PLAIN), RESHARDABLE, loading=True)
        return {
            f"{chunk}.{name}": (part.key, part.global_shape, part.global_offset, part.replica_id)
            for chunk in ("model0", "model1")
            for name, part in state[chunk].items()
            if "residual" in name and isinstance(part, ShardedTensor)
        }

    return run_ranks(toy.world_size, run)


def test_every_shard_is_placed_by_its_global_layer_and_only_the_last_stage_has_the_head() -> None:
    toy = dataclasses.replace(ONE, tp=2, pp=2, vpp=2)
    by_rank = shards(toy)
    for rank, owned in enumerate(by_rank):
        tp_rank, pp_rank = rank % 2, rank // 2
        for chunk in range(2):
            key = f"model{chunk}.decoder.layers.0.mlp_residual.bias"
            layer = 2 * chunk + pp_rank  # one layer per stage, stages dealt out in turn
            expected = ("decoder.layers.mlp_residual.bias", (4, 8), (layer, 0), (0, tp_rank, 0))
            assert owned[key] == expected
        heads = [name for name in owned if "residual_head" in name]
        assert len(heads) == (3 if pp_rank == 1 else 0)
        assert all(name.startswith("model1.") for name in heads)
