# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Generate with Megatron's static engine from a model with another residual connection.

    python examples/08_generate.py ['block_attnres(block_layers=1)']

A small GPT learns to count, then counts on from prompts of unequal length. Nothing in the calls of
the engine says that the residual has been replaced; with tensor and pipeline parallelism they are
the same on every rank.
"""

import sys

from megatron_residuals import cpu_host

cpu_host.install()

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.inference.contexts import StaticInferenceContext  # noqa: E402
from megatron.core.inference.engines.static_engine import StaticInferenceEngine  # noqa: E402
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (  # noqa: E402
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams  # noqa: E402
from megatron.core.inference.text_generation_controllers.text_generation_controller import (  # noqa: E402
    TextGenerationController,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_residuals import ResidualConfig  # noqa: E402
from megatron_residuals.specs import residual_spec  # noqa: E402

VOCABULARY, LENGTH, STEPS = 32, 24, 80


class Numbers:
    """A tokenizer of which a text is its tokens."""

    vocab_size, bos, eod = VOCABULARY, -1, -1

    def tokenize(self, text: str) -> list[int]:
        """The numbers in it."""
        return [int(word) for word in text.split()]

    def detokenize(self, tokens: list[int]) -> str:
        """The numbers as a text."""
        return " ".join(map(str, tokens))


def build(residual: ResidualConfig) -> GPTModel:
    """A model of one rank."""
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    spec = residual_spec(get_gpt_layer_local_spec(), residual)
    return GPTModel(config, spec, VOCABULARY, LENGTH, position_embedding_type="rope")


def learn(model: GPTModel) -> float:
    """Count modulo the vocabulary; the last loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    positions = torch.arange(LENGTH).expand(8, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for _ in range(STEPS):
        tokens = (torch.randint(VOCABULARY, (8, 1)) + torch.arange(LENGTH + 1)) % VOCABULARY
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    """Learn, then generate."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    model = build(ResidualConfig.parse(sys.argv[1] if len(sys.argv) > 1 else "mhc()"))
    print(f"loss {learn(model):.3f}")

    prompts = ["3 4 5", "17 18 19 20 21 22", "30 31"]
    context = StaticInferenceContext(max_batch_size=len(prompts), max_sequence_length=LENGTH)
    wrapper = GPTInferenceWrapper(model.eval(), context)  # in 0.16 with a third argument between
    controller = TextGenerationController(wrapper, Numbers())
    engine = StaticInferenceEngine(controller, max_batch_size=len(prompts), legacy=True)
    greedy = SamplingParams(top_k=1, num_tokens_to_generate=6)
    for request in engine.generate(prompts=prompts, sampling_params=greedy):
        print(f"{request.prompt} -> {request.generated_text}")


if __name__ == "__main__":
    main()
