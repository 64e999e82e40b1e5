# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""``--rehearse`` from its words to its exit status."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megatron_residuals.commands.rehearse import with_world
from megatron_residuals.mcore.rehearsal.ranks import pipeline_rank, ranks_to_rehearse
from tests.mcore.rehearsal.launches import MHC, SCRIPT, SIZES, VIRTUAL
from tests.scripts import Order, Run, Scripts

pytestmark = pytest.mark.timeout(240)
FAILS = """\
    import runpy
    from megatron.core.transformer.mlp import MLP

    stock, seen = MLP.forward, []

    def forward(self, *args, **kwargs):
        seen.append(self)
        if len(seen) == 4:
            raise TypeError("an MLP that cannot")
        return stock(self, *args, **kwargs)

    MLP.forward = forward
    runpy.run_path({!r}, run_name="__main__")
"""


def rehearse(scripts: Scripts, folder: Path, *words: str) -> Run:
    """A rehearsal; status 1 stands for all but 0."""
    pytest.importorskip("megatron.training", reason="not in the 0.16 wheel")
    words = ("-m", "megatron_residuals.run", "--rehearse", *words)
    return scripts.run(Order(words, folder, training=True))


def launch(*more: str, script: Path = SCRIPT) -> list[str]:
    return ["--cpu-host", str(script), *SIZES.split(), *VIRTUAL.split(), *MHC.split(), *more]


def fields(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.log[run.log.index('{"launch"') :].splitlines()[0])
    return found


@pytest.mark.slow
def test_a_budget_that_is_exceeded_ends_in_an_error_and_the_policy_that_fits(
    scripts: Scripts, tmp_path: Path
) -> None:
    most = fields(rehearse(scripts, tmp_path, "2", "--json", *launch()))["peak_bytes"]
    budget = f"--budget-gib={most * 0.95 / 2**30}"
    exceeded = rehearse(scripts, tmp_path, "2", "--json", budget, *launch())
    assert exceeded.status == 1
    said = fields(exceeded)
    assert said["peak_bytes"] == most
    assert (
        "the cheapest recomputation that fits is --residual-recompute mix, with" in said["verdict"]
    )


@pytest.mark.slow
def test_ranks_of_each_kind_are_taken_and_the_worst_is_named(
    scripts: Scripts, tmp_path: Path
) -> None:
    more = launch("--pipeline-model-parallel-size", "4", "--num-layers", "8")
    found = rehearse(scripts, tmp_path, "4", *more)
    assert found.status == 0, found.log
    assert "4 ranks, TP 1 x PP 4, 4 micro-batches, mhc(" in found.log
    assert "1+1 layers, embedding" in found.log
    assert re.search(r"most: rank \d, .*: (for|back)ward of stage \d, micro-batch \d", found.log)
    assert "as planned" in found.log and "not seen: " in found.log


def test_an_error_in_the_middle_says_stage_micro_batch_and_layer(
    scripts: Scripts, tmp_path: Path
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(textwrap.dedent(FAILS).format(str(SCRIPT)))
    words = launch("--pipeline-model-parallel-size", "2", script=script)
    found = rehearse(scripts, tmp_path, "2", "--ranks", "1", *words)
    assert found.status == 1
    said = (
        "rank 1, forward of stage 3, micro-batch 1, layer 4 mlp given [32, 2, 48] torch.float32: "
    )
    assert f"{said}TypeError: an MLP that cannot" in found.log


def test_what_megatron_refuses_is_refused_in_its_words(scripts: Scripts, tmp_path: Path) -> None:
    found = rehearse(scripts, tmp_path, "2", *launch("--num-layers", "5"))
    assert found.status == 1
    assert "megatron_residuals.run: error: Megatron refuses this launch:" in found.log


def test_message_headers_are_refused_since_they_are_values(
    scripts: Scripts, tmp_path: Path
) -> None:
    found = rehearse(scripts, tmp_path, "2", *launch("--residual-check-messages"))
    assert found.status == 1
    assert "error: variable_seq_lengths and --residual-check-messages send headers" in found.log


def test_the_world_may_be_left_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert with_world(["--rehearse", "train.py"]) == ["--rehearse", "16", "train.py"]
    assert with_world(["--rehearse", "8", "train.py"]) == ["--rehearse", "8", "train.py"]
    assert with_world(["--cpu-host", "--rehearse", "--json", "train.py"])[2] == "16"


def test_kinds_are_told_by_layers_experts_and_what_stands_at_the_ends() -> None:
    config = TransformerConfig(
        num_layers=10,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=5,
        pipeline_dtype=torch.float32,
        num_moe_experts=2,
        moe_layer_freq=[0, 0, 0, 1, 1, 1, 1, 1, 1, 1],
        add_bias_linear=False,
    )
    args = argparse.Namespace(
        world_size=40,
        pipeline_model_parallel_size=5,
        tensor_model_parallel_size=2,
        context_parallel_size=1,
    )
    found = [(kind.rank, kind.name) for kind in ranks_to_rehearse(args, config)]
    assert found == [
        (0, "2 layers, embedding"),
        (8, "2 layers, experts"),
        (16, "2 layers, experts"),
        (24, "2 layers, experts"),
        (32, "2 layers, experts, loss"),
    ]
    args.use_tp_pp_dp_mapping = True
    assert [kind.rank for kind in ranks_to_rehearse(args, config)] == [0, 2, 4, 6, 8]
    assert pipeline_rank(args, 13) == 1
