# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What cannot be combined is refused when the model is built, all of it at once, by name."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_residuals.config import ResidualConfig
from megatron_residuals.kernels import external
from megatron_residuals.mcore import support
from megatron_residuals.mcore.spec import replace_residual
from megatron_residuals.mcore.support import REFUSALS, TRAINING_REFUSALS, check_model
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


@pytest.mark.parametrize("refusal", TRAINING_REFUSALS, ids=lambda refusal: refusal.option)
def test_an_option_of_the_training_loop_is_refused_in_the_same_way(
    refusal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = argparse.Namespace(**{refusal.option: True})
    monkeypatch.setattr(support, "global_args", lambda: args)
    with pytest.raises(ValueError, match=f"{refusal.option} = True: parameters of a mechanism"):
        check_model(transformer_config(ToyGPT()), layer_specs(), MHC)


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


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        ("mhc(kernels='liger')", "--residual-kernels liger: Liger's mHC is the convention dsv4"),
        (
            "mhc(kernels='liger', streams=3, mhc_convention='dsv4')",
            "--residual-kernels liger: Liger's mHC takes 1, 2, 4, 8, 16 streams, not 3",
        ),
        ("attnres(kernels='liger')", "not torch.float64"),
        ("block_attnres(kernels='fla')", "not torch.float64"),
    ],
)
def test_a_library_is_refused_for_what_it_has_not(
    residual: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "is_installed", lambda choice: True)
    config = transformer_config(ToyGPT())
    config.params_dtype = torch.bfloat16
    if "float64" in message:
        check_model(config, layer_specs(), ResidualConfig.parse(residual))
        config.params_dtype = torch.float64
    with pytest.raises(ValueError) as error:
        check_model(config, layer_specs(), ResidualConfig.parse(residual))
    assert message in str(error.value)


def test_a_library_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformer_config(ToyGPT())
    config.params_dtype = torch.bfloat16
    dsv4 = ResidualConfig("mhc", mhc_convention="dsv4", kernels="liger")
    monkeypatch.setattr(external, "is_installed", lambda choice: True)
    check_model(config, layer_specs(), dsv4)
    monkeypatch.setattr(external, "is_installed", lambda choice: False)
    check_model(config, layer_specs(), ResidualConfig("residual", kernels="liger"))
    for residual in (dsv4, ResidualConfig("attnres", kernels="liger")):
        with pytest.raises(ValueError, match="kernels liger: liger-kernel is not installed"):
            check_model(config, layer_specs(), residual)
    with pytest.raises(ValueError, match="kernels fla: flash-linear-attention is not installed"):
        check_model(config, layer_specs(), ResidualConfig("attnres", kernels="fla"))


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
