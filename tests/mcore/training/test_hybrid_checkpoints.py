# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of hybrid models: resumed, cut otherwise, and taken over from a GPT."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_residuals.mcore.compat import host_version
from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.toy_gpt import ToyGPT
from tests.mcore.test_hybrid import as_gpt, hybrid
from tests.mcore.training.saving import (
    BLOCKS,
    DISTRIBUTED,
    MHC,
    PLAIN,
    quiet,
    request,
    start,
    train,
)

HAS_STAGES = host_version().release >= (0, 17)
pytestmark = [
    pytest.mark.host,
    pytest.mark.skipif(not HAS_STAGES, reason="hybrid models of 0.16 have no stages"),
]
INTEROP = "megatron.core.dist_checkpointing.gpt_checkpoint_interop"
CUT = hybrid("*-|E|*|-", pp=2, vpp=2)


@pytest.mark.parametrize(("residual", "training"), [(BLOCKS, DISTRIBUTED), (MHC, PLAIN)])
def test_an_interrupted_run_goes_on_as_a_whole_one_and_any_other_cut_takes_its_weights(
    residual: str, training: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    whole = train(CUT, residual, training, 2, save=folder, save_after=1)
    resumed = train(CUT, residual, training, 1, load=folder)
    assert resumed.losses == whole.losses[1:]
    assert all(torch.equal(resumed.after[name], value) for name, value in whole.after.items())
    one = train(hybrid("*-E*-"), residual, training, 0, load=folder)
    assert one.before.keys() == whole.saved.keys()
    assert all(torch.equal(one.before[name], value) for name, value in whole.saved.items())


@pytest.mark.parametrize("other", [BLOCKS.replace("3", "2"), MHC])
def test_a_checkpoint_of_another_residual_is_refused(other: str, tmp_path: Path) -> None:
    train(hybrid("*-"), BLOCKS.replace("3", "1"), PLAIN, 1, save=tmp_path / "saved", save_after=1)
    with pytest.raises(Exception, match="does not fit this model's residual"):
        train(hybrid("*-"), other, PLAIN, 0, load=tmp_path / "saved")


@pytest.mark.skipif(importlib.util.find_spec(INTEROP) is None, reason="from 0.19 on")
@pytest.mark.parametrize("residual", ["mhc(streams=3)", BLOCKS])
def test_a_gpt_becomes_the_hybrid_of_its_sublayers_by_the_hosts_own_translation(
    residual: str, tmp_path: Path
) -> None:
    folder, sizes = tmp_path / "saved", dataclasses.asdict(hybrid("*-*-"))
    gpt = ToyGPT(**{**sizes, "num_layers": 2, "pattern": None})
    before = train(gpt, residual, PLAIN, 2, save=folder, save_after=1)

    def take_over() -> tuple[list[float], dict[str, torch.Tensor]]:
        from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop

        trainer = start(hybrid("*-*-"), residual, PLAIN)
        asked = {"model": request(trainer, "fully_reshardable", loading=True)["model"]}
        maps = interop.gpt_compatible_layer_maps("*-*-")
        interop.retarget_sharded_state_dict_to_gpt_checkpoint(asked["model"], maps)
        with quiet():
            trainer.chunks[0].load_state_dict(dist_checkpointing.load(asked, str(folder))["model"])
        return trainer.accumulate(), trainer.parameters()

    ((losses, parameters),) = run_ranks(1, take_over)
    assert losses == before.losses[1]
    taken = {as_gpt(name): value for name, value in parameters.items()}
    assert taken.keys() == before.saved.keys()
    assert all(torch.equal(taken[name], value) for name, value in before.saved.items())
