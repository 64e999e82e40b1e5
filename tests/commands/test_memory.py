# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""`megatron-residuals memory`: numbers worked out by hand, the budget, errors, measuring."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest

from megatron_residuals.cli import main
from megatron_residuals.commands.memory import EXAMPLES

SIZES = "--hidden-size 1024 --heads 16 --seq-length 512 --micro-batch-size 2"
ROW = 512 * 2 * 1024 * 2  # bf16
TOKENS = 512 * 2
DEEP = f"memory --layers 32 {SIZES}"
BLOCKS = f"{DEEP} --residual block_attnres --block-layers 4"
MHC = f"{DEEP} --residual mhc --streams 4"
SMALL = "--layers 4 --hidden-size 32 --heads 4 --seq-length 16 --micro-batch-size 1"


def run(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str, str]:
    status = main(shlex.split(command))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], command: str, status: int = 0) -> dict[str, Any]:
    found, out, err = run(capsys, f"{command} --json")
    assert (found, err) == (status, "")
    fields: dict[str, Any] = json.loads(out)
    return fields


def test_block_recompute_keeps_the_sources_and_stock_full_recompute_a_row_per_layer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = run_json(capsys, f"{BLOCKS} --residual-recompute block")
    assert fields["kept_bytes_stock_full_recompute"] == 32 * ROW
    # embedding and eight blocks, and for the last read two float32 numbers per token and source
    assert fields["kept_bytes"] == 9 * ROW + 2 * 9 * TOKENS * 4
    assert fields["kept_bytes"] / fields["kept_bytes_stock_full_recompute"] <= 0.31
    assert fields["kept_parts"]["attention_and_mlp"] == 0
    assert fields["policy"] == "block"
    # the host's full recompute keeps the running sum in front of every layer as well
    assert fields["host_full"]["kept_bytes"] == fields["kept_bytes"] + (32 - 8) * ROW
    assert fields["worst_rank"] == 0 and len(fields["per_rank"]) == 1
    assert fields["per_rank"][0].items() >= {"rank": 0, "kept_bytes": fields["kept_bytes"]}.items()
    assert 0 < fields["policies"]["block+layer"]["transient_bytes"] < fields["transient_bytes"]


def test_grouped_streams_keep_about_a_third_of_the_residual_path(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = run_json(capsys, f"{MHC} --residual-recompute group:auto")
    # projections with the mean square, and coefficients, float32
    per_token = (2 * (4 + 4 + 16) + 1) * 4 * TOKENS
    # 4 * ceil(64 / r) + 6 r is least at r = 6 (and 8): eleven groups
    assert fields["group_lengths"] == [6]
    assert fields["kept_parts"]["residual"] == 11 * 4 * ROW + 64 * (ROW + per_token)
    none = fields["policies"]["none"]["kept_parts"]["residual"]
    stats = 2 * 4 * TOKENS
    assert none == 64 * ((4 + 1 + 1 + 1) * ROW + per_token + stats)
    assert fields["kept_parts"]["residual"] / none <= 0.35
    assert list(fields["policies"]) == ["none", "mix", "group:auto"]
    given = run_json(capsys, f"{MHC} --residual-recompute group:16")
    assert given["group_lengths"] == [16] and "group:16" in given["policies"]
    assert given["kept_parts"]["residual"] == 4 * 4 * ROW + 64 * (ROW + per_token)


def test_the_bytes_of_the_hosts_layer_follow_the_documented_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    q, ffn = TOKENS * 1024 * 2, TOKENS * 4096 * 2
    angles, scores = 4 * 512 * 64 * 2, 2 * 16 * 512 * 512
    expected = 32 * (6 * q + angles + scores * 6 + 2 * ffn)
    assert host_bytes(capsys, "") == expected
    no_rope = 32 * (4 * q + scores * 6 + 2 * ffn)
    assert host_bytes(capsys, "--no-rope") == no_rope
    grouped = 32 * (4 * q + angles + scores * 6 + 2 * ffn)
    assert host_bytes(capsys, "--query-groups 4") == grouped
    one_group = 32 * (4 * q + 2 * TOKENS * 64 * 2 + scores * 6 + 2 * ffn)
    assert host_bytes(capsys, "--query-groups 1 --no-rope") == one_group
    halved = 32 * (3 * q + angles + scores * 3 + ffn)
    assert host_bytes(capsys, "--tp 2 --sequence-parallel") == halved
    gated = 32 * (6 * q + angles + scores * 6 + 5 * TOKENS * 1536 * 2)
    assert host_bytes(capsys, "--swiglu --ffn-hidden-size 1536") == gated
    float32 = 32 * (12 * q + 2 * angles + scores * 4 + 4 * ffn)
    assert host_bytes(capsys, "--dtype fp32") == float32
    assert host_bytes(capsys, "--host-layer-bytes 1000") == 32_000


def host_bytes(capsys: pytest.CaptureFixture[str], options: str) -> int:
    found: int = run_json(capsys, f"{BLOCKS} {options}")["kept_parts"]["attention_and_mlp"]
    return found


def test_sequence_parallelism_divides_the_residual_path(capsys: pytest.CaptureFixture[str]) -> None:
    whole = run_json(capsys, f"{BLOCKS} --tp 4")
    split = run_json(capsys, f"{BLOCKS} --tp 4 --sequence-parallel")
    for name in whole["policies"]:
        parts = [fields["policies"][name]["kept_parts"]["residual"] for fields in (whole, split)]
        # but for the queries of the reads in two phases, which every rank has whole
        queries = 4 * parts[1] - parts[0]
        assert parts[0] > 0 and queries in (0, 3 * 8 * 8 * 1024 * 4)


def test_every_rank_is_listed_with_what_it_has_in_flight(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = run_json(capsys, f"{MHC} --pp 4 --microbatches 8")
    assert [rank["in_flight"] for rank in fields["per_rank"]] == [4, 3, 2, 1]
    peaks = [rank["peak_bytes"] for rank in fields["per_rank"]]
    assert sorted(peaks, reverse=True) == peaks and fields["worst_rank"] == 0
    assert fields["peak_bytes"] == peaks[0] > 4 * fields["kept_bytes"]
    interleaved = run_json(capsys, f"{MHC} --pp 4 --vpp 2 --microbatches 8")
    assert [rank["in_flight"] for rank in interleaved["per_rank"]] == [11, 9, 7, 5]
    groups = "--microbatches 12 --microbatch-group-size 6"
    grouped = run_json(capsys, f"{MHC} --pp 4 --vpp 2 {groups}")
    assert [rank["in_flight"] for rank in grouped["per_rank"]] == [13, 11, 9, 7]
    laid_out = run_json(capsys, f"memory {SIZES} --residual mhc --pp 2 --layout Ett|ttttL")
    assert laid_out["worst_rank"] == 0 or laid_out["per_rank"][1]["in_flight"] == 1


def test_sources_that_stages_of_a_rank_share_count_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipeline = f"{BLOCKS} --pp 2 --vpp 4 --residual-recompute block"
    delta = run_json(capsys, pipeline)["per_rank"]
    full = run_json(capsys, f"{pipeline} --transport full")["per_rank"]
    # full: every stage receives a prefix of its own; rank 0: the embedding, then 3, 5, 7 rows
    assert full[0]["kept_bytes"] == (1 + 3 + 5 + 7) * ROW
    # delta: the embedding and its own blocks; two rows arrive, of which one it had sent before
    assert delta[0]["kept_bytes"] < full[0]["kept_bytes"] / 1.7


def test_the_table_names_every_policy_the_stock_model_and_the_worst_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, err = run(capsys, f"{BLOCKS} --pp 2 --microbatches 4")
    assert (status, err) == (0, "")
    first = [line.split("  ")[0] for line in out.splitlines()]
    for name in ("none", "mix", "block", "block+layer", "host full/uniform/1", "stock"):
        assert name in first
    assert "32 layers, block_attnres(block_layers=4), P=2, V=1, 4 micro-batch(es)" in out
    assert "stock full/uniform/1  " in out
    assert "peak by rank:" in out and "Transformer Engine" in out
    assert "Transformer Engine" not in run(capsys, f"{BLOCKS} --host-layer-bytes 1")[1]
    assert "group:6 " in run(capsys, MHC)[1]


@pytest.mark.parametrize(
    ("policy", "margin", "expected"),
    [("none", 1.0, "none"), ("none", 0.99, "mix"), ("mix", 0.99, "block")],
)
def test_the_cheapest_policy_that_fits_a_budget_is_named(
    capsys: pytest.CaptureFixture[str], policy: str, margin: float, expected: str
) -> None:
    peak = run_json(capsys, BLOCKS)["policies"][policy]["peak_bytes"]
    command = f"{BLOCKS} --budget-gib {margin * peak / 2**30!r}"
    status, out, _ = run(capsys, command)
    assert status == 0
    assert re.search(f"the cheapest policy that fits is {re.escape(expected)}, with", out)
    assert run_json(capsys, command)["recommended"] == expected


def test_a_budget_that_nothing_fits_gives_status_1_and_the_smallest_need(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, err = run(capsys, f"{BLOCKS} --budget-gib 0.01")
    assert (status, err) == (1, "")
    assert "0.01 GiB: no policy fits; block+layer needs least" in out
    fields = run_json(capsys, f"{BLOCKS} --budget-gib 0.01", status=1)
    assert fields["recommended"] is None
    assert fields["least_peak_bytes"] == fields["policies"]["block+layer"]["peak_bytes"]


def test_logits_count_in_the_peak_alone(capsys: pytest.CaptureFixture[str]) -> None:
    without = run_json(capsys, f"{MHC} --pp 2 --microbatches 1")
    with_logits = run_json(capsys, f"{MHC} --pp 2 --microbatches 1 --vocab-size 1024")
    assert with_logits["kept_bytes"] == without["kept_bytes"]
    last = [fields["per_rank"][1]["peak_bytes"] for fields in (with_logits, without)]
    assert last[0] - last[1] == TOKENS * (1024 * 4 + 8)
    first = [fields["per_rank"][0]["peak_bytes"] for fields in (with_logits, without)]
    assert first[0] == first[1]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("memory --residual mhc --layers 4", "missing: --seq-length, --micro-batch-size, --hidden"),
        (f"memory --residual mhc {SIZES}", "the depth is missing"),
        (f"{DEEP} --residual mhd", "mechanism is 'mhd'"),
        (DEEP, "give --residual, or a launch behind --"),
        (f"{DEEP} --residual mhc --residual-recompute block", "recompute is 'block'"),
        (f"{BLOCKS} --residual-recompute group", "recompute is 'group'"),
        (f"{BLOCKS} --streams 2", "streams is 2"),
        (f"{MHC} --tp 3", "num_heads 16 does not divide over 3"),
        (f"{MHC} --tp 0", "tp is 0"),
        (f"{MHC} --pp 2 --vpp 2 --microbatches 3", "3 micro-batches leave a last group of 1"),
        (f"{MHC} --microbatches 0", "num_microbatches is 0"),
        (f"{MHC} --cp 2 --host-layer-bytes 1 --measure", "no context parallelism"),
    ],
)
def test_wrong_input_gives_one_message_and_status_2(
    capsys: pytest.CaptureFixture[str], command: str, words: str
) -> None:
    status, out, err = run(capsys, command)
    assert (status, out) == (2, "")
    assert "error: " in err and words in err
    assert "Traceback" not in err


def test_a_hybrid_model_of_the_same_sublayers_keeps_what_a_gpt_keeps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = f"memory {SIZES} --pp 2 --residual block_attnres --block-sublayers 4"
    gpt = run_json(capsys, f"{command} --layers 4")
    hybrid = run_json(capsys, f"{command} --pattern *-*-|*-*-")
    for policy in ("none", "mix", "block"):  # the others replay by layers, which are shorter
        for name in ("kept_bytes", "peak_bytes", "transient_bytes"):
            assert hybrid["policies"][policy][name] == gpt["policies"][policy][name]
    mamba = run_json(capsys, f"memory {SIZES} --residual mhc --pattern M-*E")
    # a Mamba layer: gates and vectors, 8 groups, 32 heads; the scan's output, and the norm's
    wide = TOKENS * (2 * 2048 + 2 * 8 * 128 + 32 + 2 * 2048) * 2
    mlp = TOKENS * 2 * 4096 * 2  # and a layer of experts, without a width of its own
    attention = host_bytes(capsys, "") // 32 - mlp
    assert mamba["kept_parts"]["attention_and_mlp"] == wide + attention + 2 * mlp
    _, _, err = run(capsys, f"{command} --pattern G-|*-")
    assert "a sublayer is 'gdn'; sizes are known of attention, mla, mlp, moe, mamba" in err


def test_every_example_of_the_help_runs(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "memory --help")
    assert status == 0 and out.endswith(EXAMPLES)
    commands = EXAMPLES.replace("\\\n", " ").splitlines()[1:]
    assert len(commands) == 2
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "megatron-residuals"
        assert main(words) == 0
        assert "stock full" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        f"memory {SMALL} --residual block_attnres --block-sublayers 3 --dtype fp32 --swiglu "
        "--ffn-hidden-size 96 --pp 2 --vpp 2 --microbatches 5 --microbatch-group-size 3",
        f"memory {SMALL} --residual mhc --query-groups 2 --dtype bf16 --no-rope --tp 2",
    ],
)
def test_measuring_agrees_with_the_prediction(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    fields = run_json(capsys, f"{command} --measure")
    assert list(fields["measured"]) == list(fields["policies"])
    for numbers in fields["measured"].values():
        for what in ("kept_bytes", "peak_bytes"):
            assert abs(numbers[f"{what}_predicted"] / numbers[what] - 1) < 0.02


def test_the_measured_table_shows_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, f"memory {SMALL} --residual residual --dtype fp32 --measure")
    assert status == 0
    lines = out.split("measured on the CPU")[1].splitlines()
    assert re.fullmatch(
        r"none( +[\d.]+ KiB){2} +[+-]0\.\d\d%( +[\d.]+ KiB){2} +[+-]0\.\d\d%", lines[2]
    )


def test_predicting_needs_neither_torch_nor_megatron() -> None:
    script = (
        "import sys; from megatron_residuals.cli import main\n"
        f"status = main({shlex.split(MHC)!r})\n"
        "print({'torch', 'megatron', 'numpy'} & set(sys.modules), file=sys.stderr)\n"
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stderr == "set()\n"
    assert "group:6" in done.stdout
