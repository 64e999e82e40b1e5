# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron's own training loop: a stock run is saved, and runs with a residual start from it."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest

from tests.mcore.test_training_scripts import RUNNER, SCRIPT, TOY, train
from tests.scripts import Scripts

PIPELINE = ("--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank")
# without the pipeline: how stages read their parts is shown where no process has to be started
ONE_STAGE = [
    word
    for word, before in zip(TOY, ["", *TOY], strict=False)
    if word not in PIPELINE and before not in PIPELINE
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.training") is None,
        reason="this Megatron-Core has no megatron.training (wheels before 0.17)",
    ),
]


def test_load_plain_and_finetune_start_at_the_loss_of_the_stock_model(
    scripts: Scripts, tmp_path: Path
) -> None:
    run = functools.partial(train, scripts, tmp_path, toy=ONE_STAGE, ranks=1)
    command = [*RUNNER, "--cpu-host", str(SCRIPT), "--norm-epsilon", "1e-12"]
    run([*command, "--save", "plain", "--save-interval", "4"])
    start = [*command, "--load", "plain", "--finetune"]
    stock = run(start)
    blocks = run([*start, "--residual", "block_attnres", "--residual-block-layers", "1"])
    message = "starts from the plain model in plain/iter_0000004: "
    assert message not in stock.log
    assert blocks.log.count(message) == 1
    losses = [float(done.iterations[1].loss) for done in (stock, blocks)]
    assert losses[0] < 4.1  # trained: a guess has 4.14
    assert losses[1] == pytest.approx(losses[0], abs=2e-6)  # printed with six digits
    assert blocks.iterations[1].grad_norm != stock.iterations[1].grad_norm  # the queries learn
