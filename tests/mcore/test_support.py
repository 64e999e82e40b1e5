# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What cannot be combined is refused when the model is built, all of it at once, by name."""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_residuals.config import ResidualConfig
from megatron_residuals.kernels.common import libraries
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
    with pytest.raises(ValueError, match=re.escape(f"{refusal.option} = True: {refusal.advice}")):
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
    monkeypatch.setattr(libraries, "is_installed", lambda choice: True)
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
    monkeypatch.setattr(libraries, "is_installed", lambda choice: True)
    check_model(config, layer_specs(), dsv4)
    monkeypatch.setattr(libraries, "is_installed", lambda choice: False)
    check_model(config, layer_specs(), ResidualConfig("residual", kernels="liger"))
    for residual in (dsv4, ResidualConfig("attnres", kernels="liger")):
        with pytest.raises(ValueError, match="kernels liger: liger-kernel is not installed"):
            check_model(config, layer_specs(), residual)
    with pytest.raises(ValueError, match="kernels fla: flash-linear-attention is not installed"):
        check_model(config, layer_specs(), ResidualConfig("attnres", kernels="fla"))


# Each of these ended in the host, the stock model too, without a word of the reason: a backward
# that never returns, and a ZeroDivisionError on one rank while the other waits for it.
SILENT = {
    "recompute_modules = 'mlp' with add_bias_linear": dict(
        recompute_granularity="selective", recompute_modules=["mlp"]
    ),
    "num_layers_in_first_pipeline_stage and num_layers_in_last": dict(
        num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=2
    ),
}
PIPELINE = ToyGPT(pp=2, vpp=2)


@pytest.mark.parametrize("message", SILENT)
def test_what_fails_in_the_host_without_a_reason_is_given_one(message: str) -> None:
    config = transformer_config(dataclasses.replace(PIPELINE, config_overrides=SILENT[message]))
    with pytest.raises(ValueError, match=message):
        check_model(config, layer_specs(), MHC)


EXPERTS = dict(num_moe_experts=2, moe_router_pre_softmax=True, moe_token_dispatcher_type="alltoall")


@pytest.mark.parametrize(
    ("options", "frequency", "fails"),
    [
        (dict(add_bias_linear=False), 1, False),
        (EXPERTS, 1, False),
        (EXPERTS, [1, 1, 1, 1], False),
        (EXPERTS, [1, 0, 1, 1], True),
        (EXPERTS, 2, True),
    ],
)
def test_recomputed_mlps_are_refused_only_where_they_are_dense_and_have_a_bias(
    options: dict[str, Any], frequency: int | list[int], fails: bool
) -> None:
    recomputed = dict(recompute_granularity="selective", recompute_modules=["mlp"])
    overrides = {**recomputed, **options, "moe_layer_freq": frequency}
    config = transformer_config(ToyGPT(config_overrides=overrides))
    if fails:
        with pytest.raises(ValueError, match="add_bias_linear"):
            check_model(config, layer_specs(), MHC)
    else:
        check_model(config, layer_specs(), MHC)


def test_passes_that_lose_their_last_send_are_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without emptied outputs nobody waits for the last send of a forward-only pass: rank 0 was done
    # and rank 1 waited for ever, in the stock model too.
    monkeypatch.setattr(support.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(support.dist, "get_backend", lambda: "gloo")

    def warnings(**changed: Any) -> list[str]:
        options = dict(overlap_p2p_comm_warmup_flush=True, microbatch_group_size_per_vp_stage=4)
        toy = dataclasses.replace(PIPELINE, config_overrides={**options, **changed})
        return support.host_warnings(transformer_config(toy))

    (warning,) = warnings()
    assert "set deallocate_pipeline_outputs = True" in warning
    assert not warnings(deallocate_pipeline_outputs=True)
    assert not warnings(overlap_p2p_comm_warmup_flush=False)
    assert not warnings(microbatch_group_size_per_vp_stage=2)


def build(toy: ToyGPT) -> int:
    setup_parallel(toy)
    return len(build_chunks(toy, spec_for("mhc()")))


def test_the_model_itself_refuses_while_it_is_built() -> None:
    toy = ToyGPT(config_overrides=dict(apply_residual_connection_post_layernorm=True))
    with pytest.raises(RankFailure, match="apply_residual_connection_post_layernorm = True"):
        run_ranks(1, build, toy)


def generate(toy: ToyGPT) -> None:
    setup_parallel(toy)
    (chunk,) = build_chunks(toy, spec_for("mhc()"))
    chunk.decoder(torch.zeros(4, 1, toy.hidden_size), None, inference_context=object())


def test_generation_with_another_context_than_the_static_one_is_refused() -> None:
    with pytest.raises(RankFailure, match="object: the dynamic engine, and speculative decoding"):
        run_ranks(1, generate, ToyGPT())
