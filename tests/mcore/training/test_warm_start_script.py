# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron's own training loop: a stock run is saved, and runs with a residual start from it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.mcore.test_training_scripts import RUNNER, SCRIPT, TIMEOUT_S, TOY, Run, run

LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
PIPELINE = ("--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank")
# without the pipeline: how stages read their parts is shown where no process has to be started
ONE_STAGE = [
    word
    for word, before in zip(TOY, ["", *TOY], strict=False)
    if word not in PIPELINE and before not in PIPELINE
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(4 * TIMEOUT_S),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.training") is None,
        reason="this Megatron-Core has no megatron.training (wheels before 0.17)",
    ),
]


def train(folder: Path, command: list[str]) -> Run:
    """Train the toy on one rank, successfully."""
    done = run(folder, [*LAUNCH, *command, *ONE_STAGE])
    assert done.status == 0, done.log[-4000:]
    return done


def test_load_plain_and_finetune_start_at_the_loss_of_the_stock_model(tmp_path: Path) -> None:
    command = [*RUNNER, "--cpu-host", str(SCRIPT), "--norm-epsilon", "1e-12"]
    train(tmp_path, [*command, "--save", "plain", "--save-interval", "4"])
    start = [*command, "--load", "plain", "--finetune"]
    stock = train(tmp_path, start)
    blocks = train(
        tmp_path, [*start, "--residual", "block_attnres", "--residual-block-layers", "1"]
    )
    message = "starts from the plain model in plain/iter_0000004: "
    assert message not in stock.log
    assert blocks.log.count(message) == 1
    losses = [float(done.iterations[1].loss) for done in (stock, blocks)]
    assert losses[0] < 4.1  # trained: a guess has 4.14
    assert losses[1] == pytest.approx(losses[0], abs=2e-6)  # printed with six digits
    assert blocks.iterations[1].grad_norm != stock.iterations[1].grad_norm  # the queries learn
