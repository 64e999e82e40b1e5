# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Swap the residual connection of a small GPT and see that the first loss stays the same.

    python examples/01_first_loss.py

Every mechanism starts as the plain pre-norm model, up to the eps of the norms: AttnRes reads the
mean of its sources, whose variance must be large against that eps. With Megatron's default, 1e-5,
and embeddings of standard deviation 0.02 it is not; hence the small eps here, to see the equality.
On a machine without a GPU, Megatron runs on the CPU.
"""

from megatron_residuals import cpu_host

cpu_host.install()  # nothing happens where a GPU is present

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_residuals import ResidualConfig  # noqa: E402
from megatron_residuals.specs import residual_spec  # noqa: E402

VOCABULARY, SEQUENCE = 128, 32
RESIDUALS = (
    ResidualConfig("residual"),
    ResidualConfig("hc"),
    ResidualConfig("mhc", streams=4),
    ResidualConfig("attnres"),
    ResidualConfig("block_attnres", block_layers=2),
)


def build(residual: ResidualConfig | None) -> GPTModel:
    """A GPT with the stock layers (None), or with their residual replaced."""
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    spec = get_gpt_layer_local_spec()
    return GPTModel(
        config=TransformerConfig(
            num_layers=6,
            hidden_size=64,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            layernorm_epsilon=1e-12,
            use_cpu_initialization=True,
        ),
        transformer_layer_spec=spec if residual is None else residual_spec(spec, residual),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
    )


def main() -> None:
    """Print the loss of the same batch for every mechanism, all from the same weights."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    tokens = torch.randint(
        VOCABULARY, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(2)
    )
    positions = torch.arange(SEQUENCE).expand(2, -1).contiguous()
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    stock = build(None)
    for residual in (None, *RESIDUALS):
        model = stock
        if residual is not None:
            model = build(residual)
            missing, unexpected = model.load_state_dict(stock.state_dict(), strict=False)
            assert not unexpected and all("residual" in name for name in missing)
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        print(f"{'stock' if residual is None else str(residual):36} first loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
