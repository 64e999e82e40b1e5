# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of the mechanisms run, count traffic rightly, and compare equal functions."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import attnres, figures, kernels, mhc, parity
from benchmarks.clock import Candidate, measure, peak_bytes, saved_bytes
from benchmarks.traffic import TrafficMeter, planes, touched
from megatron_residuals.kernels import read_closed

ROOT = Path(__file__).resolve().parent.parent
COMMON = {"tokens": 24, "hidden": 32, "dtype": torch.float32, "device": "cpu"}


def compiled(name: str) -> bool:
    return name.endswith("compiled")


def test_traffic_is_what_operations_read_and_write() -> None:
    a, b = torch.randn(8, 16), torch.randn(8, 16)
    with TrafficMeter().running() as meter:
        total = a + b  # reads two, writes one
        total.mul_(2.0)  # reads one, writes one
        total.view(16, 8).t()  # costs nothing
        torch.zeros_like(a).copy_(b)  # writes one; reads one, writes one
    tensor = 8 * 16 * 4
    assert meter.read["add"] == 2 * tensor and meter.written["add"] == tensor
    assert meter.read["mul_"] == meter.written["mul_"] == tensor
    assert meter.read["copy_"] == meter.written["copy_"] == tensor
    assert "view" not in meter.read and "t" not in meter.read


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch.cuda.is_available(),
    reason="Triton's interpreter is for machines without a GPU",
)
def test_kernels_that_get_a_table_of_addresses_count_what_is_in_it() -> None:
    sources = [torch.randn(8, 16) for _ in range(20)]  # more than one launch fills a table with
    with TrafficMeter().running() as meter:
        read_closed(sources, torch.randn(3, 16), eps=1e-6, backend="triton")
    row, scalars = 8 * 16 * 4, 8 * 4
    sizes = {"scores_kernel": 20 * row + 3 * 16 * 4 + (3 + 1) * 20 * scalars}
    sizes["mix_kernel"] = (20 + 3) * row + (3 + 1) * 20 * scalars + 3 * scalars
    tables = {"scores_kernel": 20 * 8, "mix_kernel": (20 + 3) * 8}
    assert meter.launched == {name: size + tables[name] for name, size in sizes.items()}


def test_a_broadcast_view_counts_what_lies_in_memory() -> None:
    row = torch.randn(16)
    assert touched(row.expand(8, 16)) == 16 * 4
    assert touched(torch.empty(0, 16)) == 0
    assert planes(2 * 24 * 32 * 3, tokens=24, hidden=32) == 3


def test_saved_bytes_leave_out_leaves_and_count_shared_storage_once() -> None:
    leaf = torch.randn(8, 16, requires_grad=True)

    def forward() -> list[torch.Tensor]:
        hidden = leaf * 2.0
        return [hidden * hidden.view(8, 16)]

    candidate = Candidate(forward, [leaf], [torch.randn(8, 16)])
    assert saved_bytes(candidate) == 8 * 16 * 4
    # hidden and the output; in backward hidden, and two products of it with the cotangent or more
    assert 3 * 8 * 16 * 4 <= peak_bytes(candidate) <= 8 * 8 * 16 * 4
    assert measure({"one": candidate}, rounds=1, warm_up=0)["one"].total_ms > 0


@pytest.mark.parametrize(
    "found",
    [
        lambda: mhc.candidates(streams=4, **COMMON),
        lambda: attnres.candidates(sources=4, sublayers=3, **COMMON),
    ],
    ids=["mhc", "attnres"],
)
def test_candidates_that_claim_to_compute_the_same_do(found) -> None:  # type: ignore[no-untyped-def]
    candidates = {name: one for name, one in found().items() if not compiled(name)}
    for relative in ("hyper-connections", "megatron native"):
        candidates.pop(relative, None)
    assert {"ours torch", "naive eager"} <= set(candidates)
    expected = parity.run(candidates["naive eager"])
    for name, candidate in candidates.items():
        for got, want in zip(parity.run(candidate), expected, strict=True):
            torch.testing.assert_close(
                got, want, rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_the_table_has_times_and_planes_and_the_record_is_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--tokens 24 --hidden 512 --rounds 1 --dtype float32 --leave-out".split()
    for mechanism in ("mhc", "attnres"):
        file = tmp_path / f"{mechanism}.json"
        words = ["--mechanism", mechanism, "--json", str(file)]
        assert kernels.main([*words, *sizes, "naive compiled"]) == 0
        rows = json.loads(file.read_text())["float32"]
        assert rows["ours torch"]["forward_planes"] > 0 < rows["ours torch"]["backward_planes"]
        assert rows["ours torch"]["saved_planes"] < rows["naive eager"]["saved_planes"]
        assert rows["ours torch"]["peak_planes"] < rows["naive eager"]["peak_planes"]
        assert f"{mechanism}, float32, per sublayer" in capsys.readouterr().out
        assert figures.main([str(file), str(picture := tmp_path / f"{mechanism}.png")]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_parity_notices_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--tokens 24 --hidden 32 --dtype float32".split()
    monkeypatch.setattr(mhc.torch, "compile", lambda fn, **_: fn)
    assert parity.main(words) == 0
    stock = mhc._ours
    monkeypatch.setattr(mhc, "_ours", lambda *args: stock(*args) * 1.001)
    assert parity.main(words) == 1


def test_parse_keeps_the_sizes() -> None:
    args = kernels.parse(["--tokens", "7"])
    assert isinstance(args, argparse.Namespace) and args.tokens == 7


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_gpu_check_runs_reduced_on_a_cpu(tmp_path: Path) -> None:
    finished = subprocess.run(
        [str(ROOT / "benchmarks" / "gpu_check.sh"), str(tmp_path)],
        env={**os.environ, "REDUCED": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.rstrip().endswith("all steps passed")
    for name in ("mhc", "attnres", "model", "training", "decode", "rehearsal"):
        assert json.loads((tmp_path / f"{name}.json").read_text())
