# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""`megatron-residuals plan`: output, sizes, and errors without tracebacks."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from megatron_residuals._version import __version__
from megatron_residuals.cli import build_parser, main
from megatron_residuals.commands.plan import EXAMPLES
from megatron_residuals.depth import DepthMap
from megatron_residuals.pipeline.plan import StageLayout, TransferPlan

PLAN_96 = "plan --layers 96 --block-layers 12 --pp 8 --vpp 4"
SIZES = "--seq-length 4096 --micro-batch-size 2 --hidden-size 1024"


def run(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str, str]:
    status = main(shlex.split(command))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, object]:
    status, out, err = run(capsys, f"{command} --json")
    assert (status, err) == (0, "")
    fields: dict[str, object] = json.loads(out)
    return fields


def test_the_table_is_the_grid_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plan = TransferPlan.for_sources(StageLayout.even(96, 8, 4), DepthMap.from_layers(96, 12))
    assert run(capsys, PLAN_96) == (0, plan.grid() + "\n", "")
    assert run(capsys, f"{PLAN_96} {SIZES}") == (0, plan.grid(2**24) + "\n", "")
    full = plan.with_transport("full")
    assert run(capsys, f"{PLAN_96} --transport full") == (0, full.grid() + "\n", "")


SMALL = "--layers 4 --pp 2 --seq-length 64 --micro-batch-size 1 --hidden-size 128"


@pytest.mark.parametrize(
    "command", ["plan --streams 4", "memory --residual mhc --heads 8", "simulate --heads 8"]
)
def test_rows_that_tensor_parallel_ranks_do_not_share_are_pointed_out(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    # Every figure was that of whole rows on each of the eight ranks, and nothing said so.
    note = "without --sequence-parallel each of the 8 tensor-parallel ranks computes, keeps and"
    assert note in run(capsys, f"{command} {SMALL} --tp 8")[1]
    for shared in ("--tp 8 --sequence-parallel", "--tp 1"):
        status, out, _ = run(capsys, f"{command} {SMALL} {shared}")
        assert status == 0 and "without --sequence-parallel" not in out


def test_json_holds_the_totals_and_every_boundary(capsys: pytest.CaptureFixture[str]) -> None:
    fields = run_json(capsys, PLAN_96)
    totals = {"rows_full": 167, "rows_delta": 77, "max_rows_full": 9, "max_rows_delta": 3}
    assert totals.items() <= fields.items()
    assert fields["cache_rows"] == 7
    boundaries = fields["boundaries"]
    assert isinstance(boundaries, list) and len(boundaries) == 31
    assert boundaries[-1] == {
        "stage": 31,
        "sender_rank": 6,
        "receiver_rank": 7,
        "receiver_chunk": 3,
        "sublayer": 186,
        "held": [0, 1, 2, 3, 4, 5, 6],
        "sent": [7],
        "partial": 8,
        "partial_complete": False,
        "rows": 2,
        "carries_state": True,
    }
    assert "row_bytes" not in fields


@pytest.mark.parametrize(
    ("options", "row_bytes"),
    [
        ("", 4096 * 2 * 1024 * 2),
        ("--dtype fp32", 4096 * 2 * 1024 * 4),
        ("--tp 4", 4096 * 2 * 1024 * 2),
        ("--tp 4 --sequence-parallel", 1024 * 2 * 1024 * 2),
        ("--tp 4 --sequence-parallel --cp 2", 512 * 2 * 1024 * 2),
    ],
)
def test_bytes_follow_from_the_sizes_of_one_rank(
    capsys: pytest.CaptureFixture[str], options: str, row_bytes: int
) -> None:
    fields = run_json(capsys, f"{PLAN_96} {SIZES} {options}")
    assert fields["row_bytes"] == row_bytes
    assert fields["bytes"] == fields["bytes_delta"] == 77 * row_bytes
    assert fields["bytes_full"] == 167 * row_bytes
    assert fields["cache_bytes"] == 7 * row_bytes
    hop_bytes = fields["hop_bytes"]
    assert isinstance(hop_bytes, list) and sum(hop_bytes) == 77 * row_bytes


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ("--layers 8 --pp 2 --vpp 2", [2, 2, 2, 2]),
        ("--layers 8", [8]),
        ("--layout Et*3|(tt|)*2,t|L --pp 5", [3, 2, 2, 1, 0]),
        ("--layout E|tt|t||tt|L --pp 2 --vpp 3 --layers 5", [0, 2, 1, 0, 2, 0]),
        ("--layers 14 --pp 4 --vpp 2 --first-stage-layers 2", [1, 2, 2, 2, 1, 2, 2, 2]),
        ("--layers 7 --pp 2 --last-stage-layers 3", [4, 3]),
        ("--pattern *-|M*|E-|/*- --pp 2", [2, 2, 2, 0]),
        ("--pattern *-M*E-G --pp 2 --first-stage-layers 3", [3, 4]),
        ("--layers 7 --pp 4 --account-for-embedding-in-pipeline-split", [1, 2, 2, 2]),
    ],
)
def test_stages_can_be_given_in_every_way_that_megatron_knows(
    capsys: pytest.CaptureFixture[str], options: str, layers: list[int]
) -> None:
    fields = run_json(capsys, f"plan --streams 4 {options}")
    layout = fields["layout"]
    assert isinstance(layout, dict) and layout["layers"] == layers


def test_block_lengths_can_be_given_in_sublayers(capsys: pytest.CaptureFixture[str]) -> None:
    in_layers = run_json(capsys, "plan --layers 8 --pp 2 --vpp 2 --block-layers 2")
    in_sublayers = run_json(capsys, "plan --layers 8 --pp 2 --vpp 2 --block-sublayers 4")
    full_attnres = run_json(capsys, "plan --layers 8 --pp 2 --vpp 2 --block-sublayers 1")
    assert in_layers == in_sublayers
    # the layers of a hybrid model are sublayers
    hybrid = run_json(capsys, f"plan --pattern {'*-*-|' * 3}*-*- --pp 2 --block-layers 4")
    assert hybrid["boundaries"] == in_layers["boundaries"]
    assert full_attnres["max_rows_full"] == 13


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan --layers 33 --streams 4 --pp 4", "33 layers"),
        ("plan --streams 4 --pp 4", "the depth is missing; give --layers, --layout or"),
        ("plan --layers 8 --streams 0", "num_streams is 0"),
        ("plan --layers 8 --block-layers 0", "block_layers is 0"),
        ("plan --layers 8 --block-layers 2 --pp 0", "num_ranks is 0"),
        ("plan --layout 'Ex|L' --streams 2 --pp 2", "'x' is left after expansion"),
        ("plan --layout 'Et|tL' --streams 2 --pp 2 --layers 3", "the model has 3"),
        ("plan --pattern 'Q*|-' --streams 2 --pp 2", "'Q' is no layer; known are M G"),
        ("plan --pattern '*|-|E' --streams 2 --pp 2", "3 stages do not divide by 2 pipeline ranks"),
        (
            "plan --pattern '*|-' --streams 2 --pp 2 --layers 3",
            "--layers is 3, but --pattern has 2",
        ),
        ("plan --pattern '*-' --layout EttL --streams 2", "more than one of --layout, --pattern"),
        ("plan --layout 'Et|tL' --streams 2 --pp 2 --vpp 2", "1 chunks per rank; leave --vpp out"),
        (
            "plan --layers 8 --streams 2 --pp 2 --first-stage-layers 3 "
            "--account-for-loss-in-pipeline-split",
            "give one",
        ),
        (f"{PLAN_96} --seq-length 4096", "missing: --micro-batch-size, --hidden-size"),
        (f"{PLAN_96} {SIZES} --cp 3", "does not divide over 3 ranks"),
        (f"{PLAN_96} {SIZES} --tp 0", "--tp is 0"),
        ("plan --layers x --streams 4", "invalid int value: 'x'"),
        ("plan --layers 8", "give --block-layers, --block-sublayers, --streams or --residual"),
        ("plan --layers 8 --streams 4 --block-layers 2", "not allowed with argument"),
        ("plan --layers 8 --stream 4", "unrecognized arguments: --stream 4"),
        ("", "the following arguments are required: COMMAND"),
        ("plant", "invalid choice: 'plant'"),
    ],
)
def test_wrong_input_gives_one_message_and_status_2(
    capsys: pytest.CaptureFixture[str], command: str, words: str
) -> None:
    status, out, err = run(capsys, command)
    assert (status, out) == (2, "")
    assert "error: " in err and words in err
    assert "Traceback" not in err


def test_help_shows_examples_and_every_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "plan --help")
    assert status == 0 and out.endswith(EXAMPLES)
    commands = EXAMPLES.replace("\\\n", " ").splitlines()[1:]
    assert len(commands) == 3
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "megatron-residuals"
        assert main(words) == 0
        assert "rows" in capsys.readouterr().out
    status, out, _ = run(capsys, "--help")
    assert status == 0 and f"  {program} {' '.join(shlex.split(PLAN_96))}\n" in out
    assert run(capsys, "--version") == (0, f"megatron-residuals {__version__}\n", "")
    assert "plan" in build_parser().format_help()


def test_the_command_needs_neither_torch_nor_megatron() -> None:
    script = (
        "import sys; from megatron_residuals.cli import main\n"
        f"status = main({shlex.split(PLAN_96)!r})\n"
        "print({'torch', 'megatron', 'numpy'} & set(sys.modules), file=sys.stderr)\n"
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stderr == "set()\n"
    assert "full 167, delta 77" in done.stdout


def test_a_reader_that_stops_early_gets_no_traceback() -> None:
    # 95 hops of up to 192 sources: more than a pipe holds, so the writer meets the closed end.
    command = "plan --layers 96 --block-sublayers 1 --pp 8 --vpp 12 --json"
    with subprocess.Popen(
        [sys.executable, "-m", "megatron_residuals", *shlex.split(command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None and writer.stderr is not None
        assert writer.stdout.readline() == "{\n"
        writer.stdout.close()
        assert writer.stderr.read() == ""
        assert writer.wait() == 1
