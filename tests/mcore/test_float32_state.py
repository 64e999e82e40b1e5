# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""``--fp32-residual-connection``: the state, and what is sent, in float32 between 16-bit layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from packaging.version import Version

from megatron_residuals.mcore.compat import host_version
from megatron_residuals.mcore.runner import StageRunner
from megatron_residuals.mcore.support import host_faults
from megatron_residuals.modules import SourceState
from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    ToyResult,
    build_chunks,
    merge,
    run_toy,
    setup_parallel,
    train_step,
    transformer_config,
)
from megatron_residuals.testing.toy_weights import full_grads

pytestmark = pytest.mark.host

WIDE = dict(bf16=True, fp32_residual_connection=True, pipeline_dtype=torch.float32)
SMALL = dict(num_layers=2, hidden_size=16, num_heads=2, seq_length=6, num_microbatches=2)
TOY = ToyGPT(dtype=torch.bfloat16, config_overrides=WIDE, **SMALL)
# "Et|tL" on two ranks; the last stage holds nothing but the loss in the other
LOSS_ALONE = dict(pipeline_model_parallel_layout="Et|t||L")


class CastingNorm:
    """The host's norm as Transformer Engine's are: in the dtype of its own weights."""

    def __new__(cls, *args: Any, **kwargs: Any) -> torch.nn.Module:
        norm = WrappedTorchNorm(*args, **kwargs)
        norm.register_forward_pre_hook(lambda self, inputs: inputs[0].to(self.weight.dtype))
        return norm


def stock_spec(config: Any, _: int | None) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(normalization=config.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = CastingNorm
    return TransformerBlockSubmodules([layer] * config.num_layers, CastingNorm)


@pytest.mark.skipif(host_version() < Version("0.17"), reason="its stock model adds in 16 bit")
def test_the_plain_residual_is_the_stock_model_with_a_float32_residual_bit_for_bit() -> None:
    expected, actual = run_toy(TOY, stock_spec), run_toy(TOY, spec_for("residual()"))
    assert actual.losses == expected.losses
    for name, gradient in expected.grads.items():
        assert torch.equal(actual.grads[name], gradient), name


def steps_of(toy: ToyGPT, mechanisms: list[str]) -> list[tuple[ToyResult, set[torch.dtype]]]:
    """A step of every mechanism, and the dtypes of the states behind a stage's layers."""
    setup_parallel(toy)
    run, seen = StageRunner.run, []

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        behind = run(self, *args, **kwargs)
        rows = behind.outgoing if isinstance(behind, SourceState) else [behind.pack()]
        seen.extend(row.dtype for row in rows)
        return behind

    StageRunner.run = watched  # type: ignore[method-assign]
    results = []
    for text in mechanisms:
        chunks = build_chunks(toy, spec_for(text))
        losses = train_step(chunks, toy)
        results.append((ToyResult(losses, full_grads(chunks)), set(seen)))
    return results


MECHANISMS = [
    "hc()",
    "mhc(recompute='mix')",
    "mhc(mhc_convention='dsv4', recompute='group:2')",
    "attnres(transport='full', recompute='mix')",
    "block_attnres(block_sublayers=3, transport='full', recompute='block')",
]


def test_the_state_is_float32_and_a_pipeline_equals_one_process() -> None:
    (one,) = run_ranks(1, steps_of, TOY, MECHANISMS)
    for layout in (dict(pp=2), dict(pp=2, vpp=2)):
        options = {**WIDE, **(LOSS_ALONE if "vpp" in layout else {})}
        toy = dataclasses.replace(TOY, config_overrides=options, **layout)
        ranks = run_ranks(2, steps_of, toy, MECHANISMS)
        for i, (expected, _) in enumerate(one):
            actual = merge([results[i][0] for results in ranks])
            assert actual.losses == expected.losses, MECHANISMS[i]
            for name, gradient in expected.grads.items():
                assert torch.equal(actual.grads[name], gradient), (MECHANISMS[i], name)
    assert {dtype for _, seen in one for dtype in seen} == {torch.float32}


def test_recomputation_changes_nothing_with_a_float32_state() -> None:
    kept = [
        text.replace("mix", "none").replace("group:2", "none").replace("'block'", "'none'")
        for text in MECHANISMS
    ]
    (replayed,), (expected,) = (run_ranks(1, steps_of, TOY, texts) for texts in (MECHANISMS, kept))
    for (one, _), (other, _) in zip(replayed, expected, strict=True):
        assert one.losses == other.losses
        for name, gradient in other.grads.items():
            assert torch.equal(one.grads[name], gradient), name


def test_a_host_that_would_receive_in_16_bit_is_refused() -> None:
    toy = dataclasses.replace(TOY, pp=2)
    config = transformer_config(toy)
    config.pipeline_dtype = torch.bfloat16
    assert any("receives in 16 bit" in fault for fault in host_faults(config))
