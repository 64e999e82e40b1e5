# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The groups that the host's optimizers really make of a mechanism's parameters."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_residuals import cpu_host
from megatron_residuals.mcore import install as seams
from megatron_residuals.mcore.training import optimizer as ours
from megatron_residuals.testing.ranks import run_ranks
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import ToyGPT, setup_parallel
from megatron_residuals.testing.toy_training import ToyTrainer, Training

TOY = ToyGPT(num_layers=2, hidden_size=16, seq_length=8)
RESIDUALS = ("hc(streams=2)", "mhc(streams=2, mhc_convention='dsv4')", "block_attnres()")
PROJECTIONS = ("mapping_weight", "head_weight")
LR, MIN_LR, DECAY = 1e-2, 1e-3, 0.1
HAS_TRAINING = importlib.util.find_spec("megatron.training") is not None

pytestmark = [pytest.mark.host, pytest.mark.timeout(60)]


def trainers(distributed: bool, toy: ToyGPT = TOY) -> Iterator[ToyTrainer]:
    setup_parallel(toy)
    training = Training(ddp=dict(use_distributed_optimizer=distributed))
    for residual in RESIDUALS:
        yield ToyTrainer(toy, spec_for(residual), training)


def groups(trainer: ToyTrainer, optimizer: Any) -> dict[str, dict[str, Any]]:
    """The group of every parameter by name, wherever its optimizer keeps it."""
    found = {}
    names = dict(trainer.chunks[0].named_parameters())
    (inner,) = optimizer.chained_optimizers
    for name, parameter in names.items():
        if hasattr(inner, "model_param_group_index_map"):
            index, _ = inner.model_param_group_index_map[parameter]
            found[name] = inner.param_groups[index]
        else:
            (found[name],) = (
                group
                for group in inner.param_groups
                if any(parameter is member for member in group["params"])
            )
    return found


def of_mechanism(values: dict[str, Any]) -> dict[str, Any]:
    mine = {name: value for name, value in values.items() if "residual" in name}
    assert all(ours.is_residual_parameter(name) == (name in mine) for name in values)
    return mine


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_by_default_the_projections_of_a_mechanism_decay_and_nothing_else(
    distributed: bool,
) -> None:
    def run() -> list[dict[str, tuple[float, int]]]:
        return [
            {
                name: (group["wd_mult"], dict(trainer.chunks[0].named_parameters())[name].dim())
                for name, group in of_mechanism(groups(trainer, trainer.optimizer)).items()
            }
            for trainer in trainers(distributed)
        ]

    (by_residual,) = run_ranks(1, run)
    last_parts = [{name.rpartition(".")[2] for name in found} for found in by_residual]
    assert last_parts == [
        {"static_pre", "static_post", "static_res", "mapping_weight", "scale"},
        {"mapping_weight", "bias", "alpha_pre", "alpha_post", "alpha_res"}
        | {"head_weight", "head_bias", "head_scale"},
        {"query", "key_gain"},
    ]
    for found in by_residual:
        for name, (wd_mult, dim) in found.items():
            projection = name.endswith(PROJECTIONS)
            # the number of dimensions is what every release asks for before it chooses Muon
            assert (wd_mult, dim) == ((1.0, 2) if projection else (0.0, 1)), name


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.core.optimizer.emerging_optimizers") is None,
    reason="before 0.18 the rule for Muon is inside a function that needs emerging-optimizers",
)
def test_muon_would_take_the_projections_of_a_mechanism_and_nothing_else() -> None:
    rules = importlib.import_module("megatron.core.optimizer.emerging_optimizers")

    def run() -> None:
        for trainer in trainers(False):
            for name, parameter in of_mechanism(dict(trainer.chunks[0].named_parameters())).items():
                is_muons = not rules._is_nonlinear_or_embedding(parameter)
                assert is_muons == name.endswith(PROJECTIONS), name

    run_ranks(1, run)


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_multipliers_scale_the_mechanism_through_a_whole_schedule(distributed: bool) -> None:
    def run() -> None:
        config = OptimizerConfig(
            optimizer="adam",
            lr=LR,
            min_lr=MIN_LR,
            weight_decay=DECAY,
            use_distributed_optimizer=distributed,
        )
        overrides = {
            **get_standard_config_overrides(config),
            **ours.residual_overrides(config, lr_mult=0.5, wd_mult=0.25),
        }
        for trainer in trainers(distributed):
            optimizer = get_megatron_optimizer(config, trainer.models, config_overrides=overrides)
            rates = {}
            for step, expected in ((0, LR), (10, MIN_LR)):
                scheduler = schedule(optimizer)
                scheduler.step(step)
                by_name = groups(trainer, optimizer)
                for name, group in by_name.items():
                    mine = ours.is_residual_parameter(name)
                    assert group["lr"] == pytest.approx(expected * (0.5 if mine else 1.0)), name
                    rates[name] = group["weight_decay"]
            for name, rate in of_mechanism(rates).items():
                assert rate == (0.25 * DECAY if name.endswith(PROJECTIONS) else 0.0), name
            assert rates["decoder.layers.0.mlp.linear_fc1.weight"] == DECAY

    run_ranks(1, run)


def schedule(optimizer: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LR,
        min_lr=MIN_LR,
        lr_warmup_steps=0,
        lr_decay_steps=10,
        lr_decay_style="cosine",
        start_wd=DECAY,
        end_wd=DECAY,
        wd_incr_steps=10,
        wd_incr_style="constant",
    )


def test_multipliers_of_one_add_no_groups_and_bad_ones_are_refused() -> None:
    config = OptimizerConfig(lr=LR, min_lr=MIN_LR)
    assert ours.residual_overrides(config) == {}
    for bad in ({"lr_mult": -1.0}, {"wd_mult": float("nan")}, {"lr_mult": float("inf")}):
        with pytest.raises(ValueError, match="finite number of at least 0"):
            ours.residual_overrides(config, **bad)


def test_a_flag_that_the_training_loop_would_not_hear_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours.check_multipliers_are_heard(False)
    args = argparse.Namespace(residual_lr_mult=0.5)
    monkeypatch.setattr(ours, "global_args", lambda: args)
    ours.check_multipliers_are_heard(True)
    with pytest.raises(RuntimeError, match="--residual-lr-mult cannot take effect"):
        ours.check_multipliers_are_heard(False)


@pytest.mark.skipif(not HAS_TRAINING, reason="this Megatron-Core has no megatron.training")
def test_the_training_loop_takes_the_multipliers_from_its_arguments() -> None:
    def run() -> tuple[list[str], list[float]]:
        seams.uninstall()
        cpu_host.install(training=True)
        from megatron.training import global_vars, training

        seams.install()
        args = argparse.Namespace(optimizer="adam", lr=LR, min_lr=MIN_LR, weight_decay=DECAY)
        _, stock = training.get_megatron_optimizer_config(args)
        args.residual_lr_mult = 0.5
        global_vars._GLOBAL_ARGS = args
        _, overrides = training.get_megatron_optimizer_config(args)
        parameter = torch.nn.Parameter(torch.zeros(2, 2))
        taken = [
            override["max_lr"]
            for key, override in overrides.items()
            if key.matches(parameter, "module.decoder.layers.3.mlp_residual.mapping_weight")
        ]
        return [str(key) for key in overrides if key not in stock], taken

    ((added, taken),) = run_ranks(1, run)
    assert len(added) == 1 and taken == [0.5 * LR]
