# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Train mHC and Block AttnRes over two pipeline ranks with two virtual stages each.

    torchrun --nproc_per_node 2 examples/03_train_two_ranks.py ['block_attnres(block_layers=1)']
    torchrun --nproc_per_node 2 examples/03_train_two_ranks.py block_attnres '*-|*|-*|-'

The second trains a hybrid model with the layers and stages of that pattern instead of a GPT.
The loop is a user's own: Megatron's interleaved schedule, any optimizer. Without a GPU the ranks
are processes on the CPU over gloo.
"""

import sys

from megatron_residuals import cpu_host

cpu_host.install()

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_residuals import ResidualConfig  # noqa: E402
from megatron_residuals.specs import residual_spec  # noqa: E402

RANKS, CHUNKS, LAYERS, VOCABULARY, SEQUENCE, MICRO_BATCHES, STEPS = 2, 2, 4, 64, 32, 4, 20


def build(residual: ResidualConfig, pattern: str | None) -> list[torch.nn.Module]:
    """This rank's two chunks of the model."""
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS if pattern is None else len(pattern.replace("|", "")),
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=RANKS,
        virtual_pipeline_model_parallel_size=CHUNKS,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=True,
        batch_p2p_comm=False,
        use_cpu_initialization=True,
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for chunk in range(CHUNKS):
        options = dict(
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=rank == 0 and chunk == 0,
            post_process=rank == RANKS - 1 and chunk == CHUNKS - 1,
            position_embedding_type="learned_absolute",
            vp_stage=chunk,
        )
        if pattern is None:
            spec = residual_spec(get_gpt_layer_local_spec(), residual)
            chunks.append(GPTModel(config, spec, **options))
        else:  # from 0.18 on; in 0.17 its name is MambaModel
            from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
            from megatron.core.models.hybrid.hybrid_model import HybridModel

            spec = residual_spec(hybrid_stack_spec, residual)
            chunks.append(HybridModel(config, spec, hybrid_layer_pattern=pattern, **options))
    return chunks


def batches(step: int):
    """Counting modulo the vocabulary, from random starts: something to learn."""
    generator = torch.Generator().manual_seed(step)
    for _ in range(MICRO_BATCHES):
        start = torch.randint(VOCABULARY, (2, 1), generator=generator)
        yield (start + torch.arange(SEQUENCE + 1)) % VOCABULARY


def forward_step(iterator, model):
    """One micro-batch through one stage."""
    tokens = next(iterator)
    positions = torch.arange(SEQUENCE).expand(2, -1).contiguous()
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
    return output, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def main() -> None:
    """Train and print the loss on the last rank."""
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, RANKS, CHUNKS)
    words = dict(enumerate(sys.argv))
    residual = ResidualConfig.parse(words.get(1, "mhc"))
    chunks = build(residual, words.get(2))
    optimizer = torch.optim.AdamW([p for c in chunks for p in c.parameters()], lr=3e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[batches(step) for _ in chunks],
            model=chunks,
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=2,
            forward_only=False,
        )
        optimizer.step()
        if reduced and step % 5 in (0, 4):
            loss = sum(entry["loss"].item() for entry in reduced) / len(reduced)
            print(f"{residual}: step {step} loss {loss:.4f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
