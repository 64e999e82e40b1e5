# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""``--non-persistent-ckpt-type local``: each rank keeps its own part, of mechanisms as well."""

from __future__ import annotations

import io

import pytest
import torch
from megatron.core.dist_checkpointing import tensor_aware_state_dict
from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict

from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import ToyGPT, build_chunks, setup_parallel
from megatron_residuals.testing.toy_weights import default_initialise

TOY = ToyGPT(num_layers=2, hidden_size=16, num_heads=2, pp=2)


def save_and_load(toy: ToyGPT, saved: str, loaded: str) -> str:
    """Load what a rank saved for itself into another model; what that said."""
    # the base class of nvidia-resiliency-ext has no code of its own that is used here
    tensor_aware_state_dict.HAVE_NVRX = True
    setup_parallel(toy)
    (ours,) = build_chunks(toy, spec_for(saved))
    parts, _ = MCoreTensorAwareStateDict.from_state_dict(ours.sharded_state_dict(), algo="atomic")
    file = io.BytesIO()
    torch.save(parts, file)
    file.seek(0)
    parts = torch.load(file, weights_only=False)
    (theirs,) = build_chunks(toy, spec_for(loaded), initialise=doubled)
    try:
        theirs.load_state_dict(parts.to_state_dict(theirs.sharded_state_dict(), algo="atomic"))
    except ValueError as error:
        return str(error)
    before = dict(ours.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in theirs.named_parameters())
    return ""


def doubled(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return 2 * default_initialise(name, shape, generator) + 1


@pytest.mark.parametrize("residual", ["mhc(streams=2)", "block_attnres(block_sublayers=3)"])
def test_a_model_comes_back_from_its_ranks_own_parts(residual: str) -> None:
    assert run_ranks(2, save_and_load, TOY, residual, residual) == ["", ""]


def test_the_settings_are_compared_where_the_record_is() -> None:
    said = run_ranks(2, save_and_load, TOY, "mhc()", "mhc(mhc_sinkhorn_iterations=3)")
    assert any("mhc_sinkhorn_iterations" in text for text in said)
