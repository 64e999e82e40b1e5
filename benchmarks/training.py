# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A short training on real text (the bytes of this project's own files), kernels side by side.

    python -m benchmarks.training [--device cuda --iterations 60 ...]

Every model starts from the same weights of the host and sees the same batches. Shown are the loss
of the first iteration and the mean of the last ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import model
from megatron_residuals import cpu_host

LAST = 10
LEARNING_RATE = 1e-3


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print a line for each model; 1 if a loss does not fall or is not finite."""
    args = parse(argv)
    if args.device == "cpu":
        cpu_host.install()
    model.one_rank(args.device)
    curves = {name: train(args, text) for name, text in model.texts_of(args).items()}
    for name, curve in curves.items():
        print(f"{name:28} first {curve[0]:.4f}  last {sum(curve[-LAST:]) / LAST:.4f}", flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(curves))
    return int(any(not curve[-1] < curve[0] for curve in curves.values()))


def parse(argv: Sequence[str] | None) -> model.Sizes:
    """The sizes of the run."""
    parser = model.parser("python -m benchmarks.training")
    parser.add_argument("--iterations", type=int, default=60)
    return parser.parse_args(argv)


def train(args: model.Sizes, text: str) -> list[float]:
    """The loss of every iteration."""
    gpt = model.build(args, text)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    data = torch.tensor(list(_text()), device=args.device)
    positions = torch.arange(args.seq_length, device=args.device)
    positions = positions.expand(args.micro_batch_size, -1).contiguous()
    generator = torch.Generator().manual_seed(17)
    losses = []
    for _ in range(args.iterations):
        starts = torch.randint(
            len(data) - args.seq_length - 1, (args.micro_batch_size,), generator=generator
        )
        rows = torch.stack([data[start : start + args.seq_length + 1] for start in starts])
        optimizer.zero_grad(set_to_none=True)
        loss = gpt(rows[:, :-1], positions, None, labels=rows[:, 1:]).float().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def _text() -> bytes:
    root = Path(__file__).resolve().parent.parent
    files = sorted([*root.glob("docs/*.md"), *root.glob("megatron_residuals/**/*.py")])
    return b"".join(file.read_bytes() for file in files)


if __name__ == "__main__":
    sys.exit(main())
