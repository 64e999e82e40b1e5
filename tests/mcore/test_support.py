# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What cannot be combined is refused when the model is built, all of it at once, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mcore.spec import replace_residual
from megatron_residuals.mcore.support import REFUSALS, check_model
from megatron_residuals.testing import RankFailure, run_ranks
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    build_chunks,
    setup_parallel,
    transformer_config,
)

pytestmark = pytest.mark.host

MHC = ResidualConfig("mhc")


def layer_specs(**replaced: Any) -> list[ModuleSpec]:
    spec = replace_residual(get_gpt_layer_local_spec(), ResidualConfig("mhc"))
    for name, value in replaced.items():
        setattr(spec.submodules, name, value)
    return [spec]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.option)
def test_a_refused_option_is_named_with_its_value_and_what_to_do(refusal: Any) -> None:
    config = transformer_config(ToyGPT())
    setattr(config, refusal.option, "local" if refusal.option == "cuda_graph_impl" else 1)
    with pytest.raises(ValueError) as error:
        check_model(config, layer_specs(), MHC)
    assert f"{refusal.option} = " in str(error.value)
    assert refusal.advice in str(error.value)


def test_every_fault_is_in_one_message() -> None:
    config = transformer_config(ToyGPT())
    config.mtp_standalone = True
    config.cpu_offloading = True
    config.recompute_granularity = "full"
    specs = layer_specs(mlp=IdentityOp, cross_attention=ModuleSpec(module=torch.nn.Identity))
    with pytest.raises(ValueError) as error:
        check_model(config, specs, ResidualConfig("mhc", recompute="mix"))
    for part in ("mtp_standalone", "cpu_offloading", "'full'", "cross-attention", "no mlp"):
        assert part in str(error.value)


def test_an_ordinary_model_is_accepted_and_zero_means_off() -> None:
    config = transformer_config(ToyGPT())
    config.mtp_num_layers = 0
    check_model(config, layer_specs(), MHC)


def build(toy: ToyGPT) -> int:
    setup_parallel(toy)
    return len(build_chunks(toy, spec_for("mhc()")))


def test_the_model_itself_refuses_while_it_is_built() -> None:
    toy = ToyGPT(config_overrides=dict(fp32_residual_connection=True))
    with pytest.raises(RankFailure, match="fp32_residual_connection = True"):
        run_ranks(1, build, toy)


def generate(toy: ToyGPT) -> None:
    setup_parallel(toy)
    (chunk,) = build_chunks(toy, spec_for("mhc()"))
    chunk.decoder(torch.zeros(4, 1, toy.hidden_size), None, inference_context=object())


def test_generation_with_an_inference_context_is_refused() -> None:
    with pytest.raises(RankFailure, match="generation with an inference context"):
        run_ranks(1, generate, ToyGPT())
