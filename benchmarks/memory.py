# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What every recompute policy keeps and works out again: table and figure of docs/memory.md.

    python -m benchmarks.memory [--layers 32 --hidden-size 512 ...] [--figure PATH] [--table PATH]

One micro-batch through the whole model in one process on the CPU. Bytes are those that autograd
retains; work is the matrix products of a step as torch.utils.flop_counter counts them. Lines of
the figure are predicted, dots are measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_residuals import cpu_host
from megatron_residuals.config import RECOMPUTE, ResidualConfig
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.planner.memory import MemoryPlan, Prediction
from megatron_residuals.planner.sizes import ModelSizes
from megatron_residuals.testing import run_ranks

MIB = 2**20
NUM_BLOCKS = 8
STOCK, STOCK_FULL = "stock", "stock, full/uniform/1"
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


class Case(NamedTuple):
    """One model and policy; no mechanism is the stock model."""

    mechanism: str | None
    policy: str

    @property
    def name(self) -> str:
        return f"{self.mechanism}, {self.policy}" if self.mechanism else self.policy

    def residual(self, layers: int) -> ResidualConfig:
        """The configuration at a depth: eight blocks, four streams."""
        if self.mechanism is None:
            return ResidualConfig()
        options = {"mechanism": self.mechanism, "recompute": self.policy}
        if self.mechanism == "block_attnres":
            return ResidualConfig.from_mapping(options | {"block_layers": -(-layers // NUM_BLOCKS)})
        return ResidualConfig.from_mapping(options)


CASES = (
    Case(None, STOCK),
    Case(None, STOCK_FULL),
    *(
        Case(mechanism, policy)
        for mechanism in ("mhc", "block_attnres", "attnres")
        for policy in RECOMPUTE
        if mechanism in RECOMPUTE[policy]
    ),
)


class Row(NamedTuple):
    """One case at one depth: predicted up to the last layer, measured up to the loss."""

    case: Case
    predicted: Prediction
    kept_bytes: int
    peak_bytes: int
    flops: int


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, draw the figure; 1 if a prediction is off by more than 2 %."""
    args = parse(argv)
    cpu_host.install()
    rows = [measure(case, args.layers, args) for case in CASES]
    text = table(rows)
    print(text)
    if args.table:
        args.table.write_text(text + "\n", encoding="utf-8")
    if args.figure:
        depths = sorted({depth for depth in args.depths if depth < args.layers})
        dots = {(row.case, args.layers): row.kept_bytes for row in rows}
        for depth in depths:
            for case in CASES:
                dots[case, depth] = measure(case, depth, args, flops=False).kept_bytes
        draw(args, dots)
    wrong = [row for row in rows if abs(_total(row.predicted) / row.kept_bytes - 1) > 0.02]
    for row in wrong:
        print(f"FAULT: {row.case.name}: {_total(row.predicted)} predicted", file=sys.stderr)
    return int(bool(wrong))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The sizes of the run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=(__doc__ or "").split("\n")[0]
    )
    for name, default, text in (
        ("--layers", 32, "transformer layers"),
        ("--hidden-size", 512, "of the model; heads are 64 wide"),
        ("--seq-length", 256, "tokens"),
        ("--micro-batch-size", 1, "sequences"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--depths", type=int, nargs="*", default=[8, 16, 24], help="more dots")
    parser.add_argument("--figure", type=Path, help="where to draw kept bytes against depth")
    parser.add_argument("--table", type=Path, help="where to write the table as well")
    return parser.parse_args(argv)


def predict(case: Case, layers: int, sizes: ModelSizes) -> Prediction:
    """The planner's answer for one process."""
    plan = MemoryPlan(StageLayout.even(layers, 1), case.residual(layers), sizes)
    if case.mechanism is None:
        return plan.stock if case.policy == STOCK else plan.stock_full
    return plan.predict()


def measure(case: Case, layers: int, args: argparse.Namespace, *, flops: bool = True) -> Row:
    """One training step of the toy with these sizes."""
    from megatron_residuals.testing.residual_toy import spec_for
    from megatron_residuals.testing.retained import measure_step, model_sizes
    from megatron_residuals.testing.toy_gpt import ToyGPT

    toy = ToyGPT(
        num_layers=layers,
        hidden_size=args.hidden_size,
        num_heads=args.hidden_size // 64,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        num_microbatches=1,
        config_overrides=FULL if case.policy == STOCK_FULL else {},
    )
    spec = spec_for(case.residual(layers)) if case.mechanism else None
    predicted = predict(case, layers, model_sizes(toy))
    (measured,) = measure_step(toy, spec, timeout_s=600)
    counted = run_ranks(1, _count_flops, toy, spec, timeout_s=600)[0] if flops else 0
    print(f"measured {case.name}, {layers} layers", file=sys.stderr, flush=True)
    return Row(case, predicted, measured.kept_bytes, measured.peak_bytes, counted)


def _count_flops(toy: object, spec: object) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    from megatron_residuals.testing import toy_gpt

    toy_gpt.setup_parallel(toy)
    chunks = toy_gpt.build_chunks(toy, spec)
    with FlopCounterMode(display=False) as counter:
        toy_gpt.train_step(chunks, toy)
    return counter.get_total_flops()


def table(rows: Sequence[Row]) -> str:
    """Markdown; bytes in MiB, work beside that of the same model when nothing is recomputed."""
    lines = [
        "| model, policy | kept by the layers | residual path | of stock full | largest replay "
        "| up to the loss: measured | predicted | peak measured | predicted | extra matmul FLOPs |",
        "|---|" + "---:|" * 9,
    ]
    stock_full = next(row for row in rows if row.case.policy == STOCK_FULL)
    plain = {row.case.mechanism: row.flops for row in rows if row.case.policy in ("none", STOCK)}
    for row in rows:
        worst = row.predicted.worst
        ratio = worst.kept_bytes / stock_full.predicted.worst.kept_bytes
        total = _total(row.predicted)
        cells = [
            row.case.name,
            _mib(worst.kept_bytes),
            _mib(worst.kept_parts["residual"]),
            f"{ratio:.2f}",
            _mib(worst.transient_bytes),
            _mib(row.kept_bytes),
            f"{_mib(total)} ({total / row.kept_bytes - 1:+.2%})",
            _mib(row.peak_bytes),
            f"{_mib(worst.peak_bytes)} ({worst.peak_bytes / row.peak_bytes - 1:+.2%})",
            f"{row.flops / plain[row.case.mechanism] - 1:+.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _total(prediction: Prediction) -> int:
    return sum(prediction.worst.kept_parts.values())


def _mib(count: int) -> str:
    return f"{count / MIB:.1f}"


def draw(args: argparse.Namespace, dots: dict[tuple[Case, int], int]) -> None:
    """One panel per mechanism, the stock model in each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from megatron_residuals.testing.retained import model_sizes
    from megatron_residuals.testing.toy_gpt import ToyGPT

    sizes = model_sizes(
        ToyGPT(
            hidden_size=args.hidden_size,
            num_heads=args.hidden_size // 64,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
        )
    )
    depths = list(range(1, args.layers + 1))
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.6), sharey=True, layout="constrained")
    titles = {"mhc": "mHC, 4 streams", "block_attnres": "Block AttnRes, 8 blocks"}
    for axis, mechanism in zip(axes, ("mhc", "block_attnres", "attnres"), strict=True):
        shown = [case for case in CASES if case.mechanism in (None, mechanism)]
        for index, case in enumerate(shown):
            style = "--" if case.mechanism is None else "-"
            color = ("0.55", "0.0")[index] if case.mechanism is None else f"C{index - 2}"
            # a policy that coincides with the one before stays visible under it
            width = 3.6 if case.policy == "block" else 1.7
            kept = [_total(predict(case, depth, sizes)) / MIB for depth in depths]
            axis.plot(depths, kept, style, color=color, lw=width, label=case.policy)
            seen = {depth: size / MIB for (each, depth), size in dots.items() if each == case}
            axis.plot(list(seen), list(seen.values()), "o", color=color, ms=4.5)
        axis.set(title=titles.get(mechanism, "Full AttnRes"), xlabel="layers", yscale="log")
        axis.set_xticks([1, *range(8, args.layers + 1, 8)])
        axis.grid(alpha=0.25, which="both", lw=0.5)
        axis.legend(fontsize=8, frameon=False, loc="upper left")
    axes[0].set_ylabel("kept between forward and backward [MiB]")
    figure.suptitle(
        f"One micro-batch of {args.micro_batch_size} x {args.seq_length} tokens, hidden size "
        f"{args.hidden_size}, float32, up to the loss: lines predicted, dots measured",
        fontsize=11,
    )
    figure.savefig(args.figure, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
