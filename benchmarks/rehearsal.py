# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a rehearsal says that one rank needs, beside what the GPU's allocator has handed out.

    python -m benchmarks.rehearsal --device cuda [--layers 8 --hidden-size 2048 ...]

The example script, two steps in bfloat16 with Adam. On a CPU it is rehearsed only: no allocator
counts there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "pretrain_gpt.py"
MODELS = {
    "plain": "residual",
    "mhc": "mhc",
    "mhc group": "mhc --residual-recompute group",
    "block_attnres": "block_attnres",
}
FIXED = """
    --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-4 --bf16 --mock-data
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --eval-iters 0
    --eval-interval 10 --tokenizer-type NullTokenizer --vocab-size 32000 --num-workers 0
    --no-one-logger --transformer-impl local --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion
"""
# As the runner does, then the most bytes that tensors have had at once.
FOR_REAL = """
import runpy, sys, torch
sys.argv = ["megatron_residuals.run", *sys.argv[1:]]
try:
    runpy.run_module("megatron_residuals.run", run_name="__main__")
except SystemExit as end:
    if end.code:
        raise
print("peak bytes:", torch.cuda.max_memory_allocated())
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print both and their difference; write them as JSON where asked."""
    args = parse(argv)
    rows = {name: measure(args, MODELS[name]) for name in args.models}
    for name, (said, had) in rows.items():
        beside = "" if had is None else f", {had / 2**20:.1f} had, {100 * (said / had - 1):+.2f} %"
        print(f"{name}: {said / 2**20:.1f} MiB rehearsed{beside}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        found = {name: {"rehearsed": said, "had": had} for name, (said, had) in rows.items()}
        args.json.write_text(json.dumps(found, indent=1))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The sizes of the run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rehearsal")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for name, default in (("--layers", 8), ("--hidden-size", 2048), ("--seq-length", 2048)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def measure(args: argparse.Namespace, residual: str) -> tuple[int, int | None]:
    """Bytes at the peak: rehearsed, and on a GPU had."""
    words = [str(SCRIPT), *FIXED.split(), "--residual", *residual.split()]
    words += ["--num-layers", str(args.layers), "--hidden-size", str(args.hidden_size)]
    words += ["--num-attention-heads", str(max(1, args.hidden_size // 128))]
    words += ["--seq-length", str(args.seq_length), "--max-position-embeddings"]
    words += [str(args.seq_length)]
    runner = ["-m", "megatron_residuals.run", "--rehearse", "1", "--json"]
    said = json.loads(last_line([*runner, *words]))["peak_bytes"]
    if args.device == "cpu":
        return said, None
    return said, int(last_line(["-c", FOR_REAL, *words]).removeprefix("peak bytes:"))


def last_line(words: Sequence[str]) -> str:
    """Of what a Python prints, as the only rank of a launch."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    env = {**os.environ, **alone, "MASTER_PORT": os.environ.get("MASTER_PORT", "29511")}
    run = subprocess.run([sys.executable, *words], env=env, stdout=subprocess.PIPE, text=True)
    run.check_returncode()
    return run.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
