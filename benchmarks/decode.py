# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of a prompt, and per token after it, beside the plain residual's.

    python -m benchmarks.decode [--device cuda] [--prompt 512 --new-tokens 32 ...]

The models of one process, taken in turns, each with the host's own cache of keys and values (its
static inference context); a ratio is taken within a round. One sequence on one rank, no sampling.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.clock import Mark, fixed_threads
from benchmarks.model import MODELS, VOCABULARY, build, one_rank, parser, sizes
from megatron_residuals import cpu_host

Times = Mapping[str, Sequence["Generation"]]


class Generation(NamedTuple):
    """Milliseconds to the first token, and of each one after it."""

    first_ms: float
    token_ms: float


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table of ratios to the plain residual; write it as JSON where asked."""
    args = parse(argv)
    if args.device == "cpu":
        cpu_host.install()
    one_rank(args.device)
    texts = dict(item.split("=", 1) for item in args.model) or MODELS
    with fixed_threads(args.threads), torch.no_grad():
        models = {name: build(args, text).eval() for name, text in texts.items()}
        rows = ratios(in_turns(models, args))
    print(table(rows))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"sizes": sizes(args), "models": rows}, indent=1))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The sizes of the run."""
    options = parser("python -m benchmarks.decode")
    options.add_argument("--prompt", type=int, default=512)
    options.add_argument("--new-tokens", type=int, default=32)
    return options.parse_args(argv)


def in_turns(models: Mapping[str, Any], args: argparse.Namespace) -> Times:
    """Every model once in each round, behind one round that is not counted."""
    taken: dict[str, list[Generation]] = {name: [] for name in models}
    names = list(models)
    for turn in range(args.rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found = generate(models[name], args)
            if turn:
                taken[name].append(found)
    return taken


def generate(model: Any, args: argparse.Namespace) -> Generation:
    """A prompt, then one token after another."""
    from megatron.core.inference.contexts import StaticInferenceContext

    length = args.prompt + args.new_tokens
    context = StaticInferenceContext(max_batch_size=1, max_sequence_length=length)
    tokens = torch.arange(length, device=args.device).remainder(VOCABULARY).unsqueeze(0)
    positions = torch.arange(length, device=args.device).unsqueeze(0)
    on_gpu = tokens.is_cuda

    def run(start: int, stop: int) -> None:
        part = slice(start, stop)
        model(tokens[:, part], positions[:, part], None, inference_context=context)
        context.increment_sequence_len_offset(stop - start)

    began = Mark(on_gpu)
    run(0, args.prompt)
    first = Mark(on_gpu)
    for number in range(args.prompt, length):
        run(number, number + 1)
    end = Mark(on_gpu)
    return Generation(began.until(first), first.until(end) / args.new_tokens)


def ratios(taken: Times) -> dict[str, dict[str, Any]]:
    """Medians, and of the ratios the least and the most too."""
    plain = taken[next(iter(taken))]
    rows = {}
    for name, found in taken.items():
        per_token = [a.token_ms / b.token_ms for a, b in zip(found, plain, strict=True)]
        first = [a.first_ms / b.first_ms for a, b in zip(found, plain, strict=True)]
        rows[name] = {
            "first_ms": statistics.median(each.first_ms for each in found),
            "token_ms": statistics.median(each.token_ms for each in found),
            "first_ratio": statistics.median(first),
            "token_ratio": statistics.median(per_token),
            "token_ratio_range": [min(per_token), max(per_token)],
        }
    return rows


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: ratios to the first model."""
    lines = ["| model | first token / plain | token / plain | range |", "|-|-|-|-|"]
    for name, row in rows.items():
        low, high = row["token_ratio_range"]
        lines.append(
            f"| {name} | {row['first_ratio']:.3f} | {row['token_ratio']:.3f} | "
            f"{low:.3f} to {high:.3f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
