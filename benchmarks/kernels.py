# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The mechanisms against their peers: time, planes of traffic, kept and peak memory.

    python -m benchmarks.kernels [--mechanism mhc] [--device cuda] [--dtype bfloat16 ...]

All candidates in one process, in turns. A plane is one bf16 tensor of tokens x hidden; the floor is
what the mathematics must read and write (docs/performance.md).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import attnres, mhc
from benchmarks.clock import Candidate, copy_bandwidth, fixed_threads, measure
from benchmarks.traffic import TrafficMeter, planes

COMPILED = ("naive compiled", "megatron native")
PLANES = ("forward_planes", "backward_planes", "saved_planes", "peak_planes")


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for every dtype; write them as JSON where asked."""
    args = parse(argv)
    record: dict[str, Any] = {"sizes": {k: v for k, v in vars(args).items() if k != "json"}}
    bandwidth = copy_bandwidth() if args.device == "cuda" else None
    record["copy_bytes_per_s"] = bandwidth
    with fixed_threads(args.threads):
        for dtype in args.dtype:
            rows = run(args, getattr(torch, dtype), bandwidth)
            record[dtype] = rows
            print(f"\n{args.mechanism}, {dtype}, per sublayer\n\n{table(rows, bandwidth)}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The sizes of the run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels")
    parser.add_argument("--mechanism", choices=("mhc", "attnres"), default="mhc")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    for name, default, text in (
        ("--tokens", 2048, "tokens of a micro-batch"),
        ("--hidden", 1024, "hidden size"),
        ("--streams", 4, "mHC: residual streams"),
        ("--sources", 8, "AttnRes: sources, the running sum included"),
        ("--sublayers", 8, "AttnRes: sublayers of the block"),
        ("--rounds", 9, "measured steps of each candidate"),
        ("--threads", 1, "CPU threads"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--leave-out", nargs="*", default=[], help="candidates not to run")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def run(
    args: argparse.Namespace, dtype: torch.dtype, bandwidth: float | None
) -> dict[str, dict[str, Any]]:
    """Everything measured of every candidate, per sublayer."""
    common = dict(tokens=args.tokens, hidden=args.hidden, dtype=dtype, device=args.device)
    if args.mechanism == "mhc":
        found, length = mhc.candidates(streams=args.streams, **common), mhc.CHAIN
    else:
        shape = dict(sources=args.sources, sublayers=args.sublayers)
        found, length = attnres.candidates(**shape, **common), args.sublayers
    found = {name: one for name, one in found.items() if name not in args.leave_out}
    found = {name: one for name, one in found.items() if _works(name, one)}
    rows: dict[str, dict[str, Any]] = {}
    for name, measured in measure(found, rounds=args.rounds).items():
        rows[name] = {
            "forward_ms": measured.forward_ms / length,
            "backward_ms": measured.backward_ms / length,
            "saved_planes": planes(measured.saved_mib * 2**20, args.tokens, args.hidden) / length,
            "peak_planes": planes(measured.peak_mib * 2**20, args.tokens, args.hidden) / length,
        }
        if name in COMPILED:
            continue  # what a compiled graph reads and writes no dispatch mode sees
        forward, backward = traffic(found[name])
        rows[name]["forward_planes"] = planes(forward, args.tokens, args.hidden) / length
        rows[name]["backward_planes"] = planes(backward, args.tokens, args.hidden) / length
        if bandwidth is not None:
            seconds = measured.total_ms * 1e-3
            rows[name]["of_copy_bandwidth"] = (forward + backward) / seconds / bandwidth
    return rows


def traffic(candidate: Candidate) -> tuple[int, int]:
    """Bytes that one forward and one backward pass move."""
    with TrafficMeter().running() as meter:
        outputs = candidate.forward()
        forward = meter.total
        torch.autograd.grad(
            list(outputs), list(candidate.leaves), list(candidate.cotangents), allow_unused=True
        )
    return forward, meter.total - forward


def _works(name: str, candidate: Candidate) -> bool:
    """Whether a candidate runs at all; a peer that does not is named and left out."""
    try:
        candidate.forward()
    except Exception as error:
        if name.startswith("ours"):
            raise
        print(f"{name} does not run here: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        return False
    return True


def table(rows: Mapping[str, Mapping[str, Any]], bandwidth: float | None) -> str:
    """Markdown, times relative to the first row."""
    first = next(iter(rows.values()))
    total = first["forward_ms"] + first["backward_ms"]
    columns = ["forward", "backward", "both", "planes forward", "planes backward"]
    columns += ["kept planes", "peak planes", *(["of copy bandwidth"] if bandwidth else [])]
    lines = [f"| per sublayer | {' | '.join(columns)} |", "|-" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        both = row["forward_ms"] + row["backward_ms"]
        cells = [
            *[f"{time / total:.3f}" for time in (row["forward_ms"], row["backward_ms"], both)],
            *[_cell(row, key, ".1f") for key in PLANES],
        ]
        if bandwidth:
            cells.append(_cell(row, "of_copy_bandwidth", ".2f"))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any], name: str, form: str) -> str:
    return format(row[name], form) if row.get(name) is not None else "-"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
