# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Step time and memory of a whole GPT through the adapter: plain, mHC and Block AttnRes.

    python -m benchmarks.model [--device cuda] [--layers 8 --hidden-size 1024 ...]

The models of one process, taken in turns; attention is PyTorch's scaled_dot_product_attention, or
all layers are Transformer Engine's. One rank; on the CPU the host's CUDA calls are rerouted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock import Mark, fixed_threads
from megatron_residuals import cpu_host

MODELS = {
    "plain": "residual()",
    "mhc": "mhc()",
    "block_attnres": "block_attnres()",
}
VOCABULARY = 4096
Sizes = argparse.Namespace


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table of ratios to the plain residual; write it as JSON where asked."""
    args = parse(argv)
    if args.device == "cpu":
        cpu_host.install()
    one_rank(args.device)
    with fixed_threads(args.threads):
        rows = measure(args, texts_of(args))
    print(table(rows))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"sizes": sizes(args), "models": rows}, indent=1))
    return 0


def parse(argv: Sequence[str] | None) -> Sizes:
    """The sizes of the run."""
    return parser("python -m benchmarks.model").parse_args(argv)


def parser(program: str) -> argparse.ArgumentParser:
    """Options that training shares."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    for name, default in (
        ("--layers", 8),
        ("--hidden-size", 1024),
        ("--seq-length", 512),
        ("--micro-batch-size", 1),
        ("--rounds", 5),
        ("--threads", 1),
    ):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=TEXT",
        help="a residual configuration, e.g. 'mhc=mhc(kernels=\"torch\")'; the first one is the "
        "baseline (default: plain, mhc, block_attnres)",
    )
    parser.add_argument(
        "--transformer-engine", action="store_true", help="layers of Transformer Engine"
    )
    parser.add_argument("--json", type=Path)
    return parser


def texts_of(args: Sizes) -> dict[str, str]:
    """The residual configurations to compare, by name; the first one is the baseline."""
    return dict(item.split("=", 1) for item in args.model) or MODELS


def sizes(args: Sizes) -> dict[str, Any]:
    """What was measured, for the record."""
    return {name: value for name, value in vars(args).items() if name not in ("json", "model")}


def measure(args: Sizes, texts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Times of every model, in turns; ratios are taken within a round."""
    models = {name: build(args, text) for name, text in texts.items()}
    batch = _batch(args)
    for model in models.values():
        for _ in range(2):
            step(model, batch)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for turn in range(args.rounds):
        names = list(models)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken[name].append(step(models[name], batch))
    baseline = [sum(times) for times in taken[next(iter(models))]]
    return {
        name: {
            "residual": texts[name],
            "forward_ms": statistics.median(forward for forward, _ in times),
            "backward_ms": statistics.median(backward for _, backward in times),
            "ratio": statistics.median(
                (forward + backward) / plain
                for (forward, backward), plain in zip(times, baseline, strict=True)
            ),
            "peak_mib": _peak(models[name], batch),
        }
        for name, times in taken.items()
    }


def build(args: Sizes, text: str) -> Any:
    """A GPT on one rank with the residual that the text describes."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_residuals.config import ResidualConfig
    from megatron_residuals.mcore.install import install
    from megatron_residuals.mcore.spec import replace_residual

    install()
    dtype = getattr(torch, args.dtype)
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden_size,
        num_attention_heads=max(1, args.hidden_size // 128),
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        ffn_hidden_size=args.hidden_size * 8 // 3 // 64 * 64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=args.device == "cpu",
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(3)
    model = GPTModel(
        config=config,
        transformer_layer_spec=replace_residual(layer_spec(args), ResidualConfig.parse(text)),
        vocab_size=VOCABULARY,
        max_sequence_length=args.seq_length,
        position_embedding_type="rope",
    )
    return model.to(args.device).to(dtype)


def layer_spec(args: Sizes) -> Any:
    """The host's layers: its local ones with PyTorch's attention, or Transformer Engine's."""
    from megatron.core.models.gpt import gpt_layer_specs

    if args.transformer_engine:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    from benchmarks.attention import TorchAttention

    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = TorchAttention
    return spec


def step(model: Any, batch: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """Milliseconds of forward and backward."""
    on_gpu = batch["tokens"].is_cuda
    model.zero_grad(set_to_none=True)
    start = Mark(on_gpu)
    loss = model(batch["tokens"], batch["positions"], None, labels=batch["labels"]).mean()
    middle = Mark(on_gpu)
    loss.backward()
    end = Mark(on_gpu)
    return start.until(middle), middle.until(end)


def _batch(args: Sizes) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    shape = (args.micro_batch_size, args.seq_length)
    tokens = torch.randint(VOCABULARY, (shape[0], shape[1] + 1), device=args.device)
    positions = torch.arange(args.seq_length, device=args.device).expand(shape).contiguous()
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": positions}


def _peak(model: Any, batch: Mapping[str, torch.Tensor]) -> float | None:
    if not batch["tokens"].is_cuda:
        return None
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(model, batch)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def one_rank(device: str) -> None:
    """Initialise torch.distributed and the host for one rank."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,
    )
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(3)


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: ratios to the first model."""
    first = next(iter(rows.values()))
    lines = [
        "| model | step / plain | forward / plain | backward / plain | peak MiB |",
        "|-|-|-|-|-|",
    ]
    for name, row in rows.items():
        peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
        ratios = [row["ratio"], *[row[k] / first[k] for k in ("forward_ms", "backward_ms")]]
        lines.append(" | ".join((f"| {name}", *[f"{ratio:.3f}" for ratio in ratios], f"{peak} |")))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
