# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Train every mechanism for a minute on the demo's data and print a table.

    python examples/07_compare_mechanisms.py [--seconds 60] [--steps N] ['mhc(streams=2)' …]

Bytes of the standard library's source, the same batches and the same first weights for all; one
process, so that the figures are the residual's alone. A minute on a CPU says that a mechanism
trains and what it costs there, not which is best: that takes a tuned learning rate for each.
"""

import argparse
import sysconfig
import time
from pathlib import Path

from megatron_residuals import cpu_host

cpu_host.install()  # nothing happens where a GPU is present

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from prepare_data import choose_documents, source_files  # noqa: E402

from megatron_residuals import ResidualConfig  # noqa: E402
from megatron_residuals.specs import residual_spec  # noqa: E402

SEQUENCE, BATCH, HELD_OUT_BATCHES = 128, 4, 8
RESIDUALS = (
    "residual",
    "hc",
    "mhc",
    "mhc(mhc_mixing='permutations')",
    "mhc(mhc_mixing='kronecker')",
    "ihc",
    "single_pass_mhc",
    "attnres",
    "block_attnres(block_layers=2)",
    "block_attnres(block_layers=2, attnres_heads=4)",
    "block_attnres(block_layers=2, attnres_additive=True)",
)


def build(residual: ResidualConfig) -> GPTModel:
    """A small GPT over bytes, with the same first weights whatever the residual."""
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=8,
        hidden_size=128,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layernorm_epsilon=1e-8,
        use_cpu_initialization=True,
    )
    spec = residual_spec(get_gpt_layer_local_spec(), residual)
    return GPTModel(config, spec, vocab_size=256, max_sequence_length=SEQUENCE)


def loss_of(model: GPTModel, data: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The mean loss of a batch of random pieces."""
    starts = torch.randint(len(data) - SEQUENCE - 1, (BATCH,), generator=generator)
    pieces = torch.stack([data[start : start + SEQUENCE + 1] for start in starts]).long()
    positions = torch.arange(SEQUENCE).expand(BATCH, -1).contiguous()
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    tokens, labels = pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()
    return model(tokens, positions, mask, labels=labels).mean()


def train(residual: ResidualConfig, data: torch.Tensor, seconds: float, steps: int) -> str:
    """One line of the table."""
    held_out, train_on = data[: len(data) // 10], data[len(data) // 10 :]
    model, generator = build(residual), torch.Generator().manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    began, done, first = time.monotonic(), 0, 0.0
    while done < steps and time.monotonic() - began < seconds:
        optimizer.zero_grad()
        loss = loss_of(model, train_on, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        first, done = first or loss.item(), done + 1
    step_ms = 1000 * (time.monotonic() - began) / done
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        losses = [loss_of(model, held_out, generator).item() for _ in range(HELD_OUT_BATCHES)]
    own = sum(p.numel() for n, p in model.named_parameters() if "_residual" in n)
    mean = sum(losses) / len(losses)
    return f"{residual!s:58}{done:7}{step_ms:9.0f}{first:9.4f}{mean:10.4f}{own:12,}"


def main() -> None:
    """Train one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("residuals", nargs="*", default=RESIDUALS)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each mechanism")
    parser.add_argument("--steps", type=int, default=10**9, help="at most")
    args = parser.parse_args()
    group = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **group)
    parallel_state.initialize_model_parallel()
    files = source_files(Path(sysconfig.get_paths()["stdlib"]))
    text = b"".join(choose_documents(files, max_bytes=2**20, seed=0))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    print(
        f"{'residual':58}{'steps':>7}{'ms/step':>9}{'first':>9}{'held out':>10}{'parameters':>12}"
    )
    for residual in args.residuals:
        print(train(ResidualConfig.parse(residual), data, args.seconds, args.steps), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
