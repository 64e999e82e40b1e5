# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""`megatron-residuals simulate`: its numbers against `plan` and `memory`, options and errors."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_residuals.cli import main
from megatron_residuals.commands.simulate import EXAMPLES

SIZES = "--hidden-size 1024 --heads 8 --seq-length 512 --micro-batch-size 2"
LAYERS = "--layers 16 --pp 4 --vpp 2"
SMALL = f"simulate {LAYERS} --block-layers 3 --microbatches 8 {SIZES}"


def run(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str, str]:
    status = main(shlex.split(command))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], command: str) -> Any:
    status, out, err = run(capsys, f"{command} --json")
    assert (status, err) == (0, "")
    return json.loads(out)


def by_scheme(fields: Any) -> dict[str, dict[str, Any]]:
    return {each["scheme"]: each for each in fields["schemes"]}


def test_bytes_are_those_of_plan_and_peaks_those_of_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = by_scheme(run_json(capsys, SMALL))
    states = {
        "plain": ("--streams 1", "--residual residual"),
        "mhc": ("--streams 4", "--residual mhc"),
        "attnres full": (
            "--block-layers 3 --transport full",
            "--residual block_attnres --block-layers 3 --transport full",
        ),
        "attnres delta": ("--block-layers 3", "--residual block_attnres --block-layers 3"),
    }
    for name, (state, residual) in states.items():
        plan = run_json(capsys, f"plan {LAYERS} {state} {SIZES.replace('--heads 8', '')}")
        assert found[name]["sent_bytes"] == 2 * 8 * plan["bytes"]
        assert found[name]["widest_hop_bytes"] == max(plan["hop_bytes"])
        memory = run_json(capsys, f"memory {LAYERS} --microbatches 8 {SIZES} {residual}")
        peaks = [rank["peak_bytes"] for rank in memory["per_rank"]]
        if name != "plain":  # which is the host's own block here
            assert [rank["peak_bytes"] for rank in found[name]["per_rank"]] == peaks
    assert set(found) == {*states, "attnres padded"}


def test_the_table_says_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = by_scheme(run_json(capsys, SMALL))
    status, out, _ = run(capsys, SMALL)
    assert status == 0
    rows = [line for line in out.splitlines() if re.match(r"(plain|mhc|attnres \w+) ", line)]
    assert len(rows) == 3 * len(found)  # steps, compute by rank, peak by rank
    for row, (name, fields) in zip(rows, found.items(), strict=False):
        cells = row.removeprefix(name).split()
        assert cells[0] == f"{fields['step_ms']:.1f}"
        assert cells[1] == f"{fields['step_ms'] / found['plain']['step_ms']:.3f}"
        parts = [fields[f"{part}_ms"] for part in ("compute", "imbalance", "bubble", "exposed")]
        assert cells[2:6] == [f"{part:.1f}" for part in parts]
        assert sum(parts) == pytest.approx(fields["step_ms"])


def test_hardware_comes_from_the_table_or_from_options(capsys: pytest.CaptureFixture[str]) -> None:
    slow = by_scheme(run_json(capsys, f"{SMALL} --gpu a100 --network 100gbe"))
    fast = by_scheme(run_json(capsys, f"{SMALL} --gpu gb200 --network xdr --ranks-per-node 4"))
    for name, fields in fast.items():
        assert fields["compute_ms"] < slow[name]["compute_ms"] / 3
        assert fields["exposed_ms"] < slow[name]["exposed_ms"] / 10
    given = "--tflops 100 --memory-gb-per-s 1000 --network-gb-per-s 7 --network-latency-us 3 "
    given += "--inside-gb-per-s 70 --inside-latency-us 2 --efficiency 0.5 --memory-efficiency 0.6"
    cluster = run_json(capsys, f"{SMALL} {given}")["cluster"]
    assert cluster["rates"]["gpu"]["flops_per_s"] == 100e12
    assert cluster["rates"]["gpu"]["memory_bytes_per_s"] == 1000e9
    assert cluster["network"]["between"] == pytest.approx({"bytes_per_s": 7e9, "latency_s": 3e-6})
    assert cluster["network"]["inside"] == pytest.approx({"bytes_per_s": 70e9, "latency_s": 2e-6})
    assert (cluster["rates"]["efficiency"], cluster["rates"]["memory_efficiency"]) == (0.5, 0.6)


def test_overlap_and_waiting_for_sends_are_the_hosts_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def exposed(*options: str) -> float:
        fields = run_json(capsys, " ".join((SMALL, "--schemes 'attnres full'", *options)))
        value = fields["schemes"][0]["exposed_ms"]
        assert isinstance(value, float)
        return value

    off, steady = exposed("--no-overlap-p2p-communication"), exposed()
    free = exposed("--no-wait-for-sends")
    assert free < steady < off
    flush = exposed("--no-wait-for-sends", "--overlap-p2p-communication-warmup-flush")
    assert flush not in (off, steady, free)


def test_a_budget_recomputes_and_says_where_even_that_is_too_much(
    capsys: pytest.CaptureFixture[str],
) -> None:
    free = by_scheme(run_json(capsys, SMALL))
    budget = free["attnres delta"]["peak_bytes"] / 2**30 / 1.05
    tight = by_scheme(run_json(capsys, f"{SMALL} --budget-gib {budget}"))
    assert free["attnres delta"]["fits"] is None
    assert tight["attnres delta"]["fits"] is True
    assert tight["attnres delta"]["recompute"] != "none"
    status, out, _ = run(capsys, f"{SMALL} --budget-gib 0.001")
    assert status == 0 and out.count("(too much)") == 5


def test_the_trace_is_written_and_can_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    command = f"{SMALL} --schemes plain 'attnres delta' --trace {path}"
    assert run(capsys, command)[0] == 0
    events = json.loads(path.read_text())["traceEvents"]
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {"plain", "attnres delta"}
    assert sum(e.get("cat") == "forward" for e in events) == 2 * 8 * 8


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("simulate --layers 4 --pp 2", "simulate: missing: --seq-length"),
        (f"{SMALL} --layout 'Et*4|(t*4|)*2t*4L'", "leave --vpp out"),
        (f"{SMALL} --microbatch-group-size 3", "groups of at least 4"),
        (f"{SMALL} --efficiency 2", "efficiency is 2"),
        (f"{SMALL} --network-gb-per-s 0", "links between nodes have 0 bytes/s"),
        (f"{SMALL} --ranks-per-node 0", "ranks_per_node is 0"),
        (f"{SMALL} --block-sublayers 4", "are both given"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_one_message(
    capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    status, out, err = run(capsys, command)
    assert (status, out) == (2, "")
    assert message in err and err.startswith("megatron-residuals: error: ")


@pytest.mark.parametrize(
    "example", re.sub(r" \\\n +", " ", EXAMPLES).strip().splitlines()[1:], ids=range(2)
)
def test_the_examples_of_the_help_work(
    capsys: pytest.CaptureFixture[str],
    example: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, example.strip().removeprefix("megatron-residuals "))
    assert status == 0 and "attnres delta" in out


def test_it_needs_neither_torch_nor_megatron() -> None:
    script = (
        "import sys\n"
        "sys.modules.update(torch=None, megatron=None)\n"
        "from megatron_residuals.cli import main\n"
        f"sys.exit(main({shlex.split(SMALL)!r}))\n"
    )
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
