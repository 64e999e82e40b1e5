# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What the repaired parts of the host do: tagged norms, discarded outputs, optimizer loading."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    build_chunks,
    setup_parallel,
    transformer_config,
)

pytestmark = [pytest.mark.host, pytest.mark.timeout(120)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_torch_norm_carries_the_tag_that_the_config_asks_for(sequence_parallel: bool) -> None:
    config = transformer_config(ToyGPT(tp=2, sequence_parallel=sequence_parallel))
    norm = WrappedTorchNorm(config, config.hidden_size)
    tags = {parameter.sequence_parallel for parameter in norm.parameters()}
    assert tags == {sequence_parallel} and config.sequence_parallel is sequence_parallel


def _recompute_without_output() -> tuple[int, torch.Tensor, torch.Tensor]:
    setup_parallel(ToyGPT())
    weight = torch.linspace(-1, 2, 12).reshape(3, 4)
    x = torch.linspace(0.5, 3, 12).reshape(3, 4).requires_grad_()
    recompute = CheckpointWithoutOutput()
    hidden = recompute.checkpoint(lambda y: torch.sin(y) * y, x)
    loss = (hidden.square() * weight).sum()
    recompute.discard_output_and_register_recompute(loss)
    num_bytes = hidden.untyped_storage().size()
    loss.backward()
    plain = x.detach().clone().requires_grad_()
    ((torch.sin(plain) * plain).square() * weight).sum().backward()
    return num_bytes, x.grad, plain.grad


def test_an_output_is_discarded_and_recomputed_with_the_same_gradient() -> None:
    ((num_bytes, grad, expected),) = run_ranks(1, _recompute_without_output)
    assert num_bytes == 0
    assert torch.equal(grad, expected)


@dataclasses.dataclass
class _Trainer:
    """One chunk under data parallelism with the distributed optimizer, fed made-up gradients."""

    def __post_init__(self) -> None:
        toy = ToyGPT(num_layers=1)
        setup_parallel(toy)
        (self.chunk,) = build_chunks(toy)
        self.wrapped = DistributedDataParallel(
            self.chunk.config,
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            self.chunk,
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True),
            [self.wrapped],
        )

    def step(self, seed: int) -> None:
        self.wrapped.zero_grad_buffer()
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.chunk.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        self.wrapped.finish_grad_sync()
        self.optimizer.step()

    def sharded_state(self, *, is_loading: bool) -> dict[str, Any]:
        model = self.chunk.sharded_state_dict()
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
        optimizer = self.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        )
        return {"model": model, "optimizer": optimizer}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.chunk.named_parameters()}


def _save_and_go_on(folder: str) -> dict[str, torch.Tensor]:
    trainer = _Trainer()
    for seed in (1, 2, 3):
        trainer.step(seed)
    dist_checkpointing.save(trainer.sharded_state(is_loading=False), folder)
    trainer.step(4)
    trainer.step(5)
    return trainer.weights()


def _load_and_go_on(folder: str) -> tuple[dict[str, torch.Tensor], set[float]]:
    trainer = _Trainer()
    state = dist_checkpointing.load(trainer.sharded_state(is_loading=True), folder)
    trainer.chunk.load_state_dict(state["model"], strict=False)
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.step(4)
    trainer.step(5)
    (inner,) = trainer.optimizer.chained_optimizers
    return trainer.weights(), {float(entry["step"]) for entry in inner.optimizer.state.values()}


# Torch warns, at lines of its own, of how the host calls its checkpoint functions.
@pytest.mark.filterwarnings("ignore::Warning")
def test_a_distributed_optimizer_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    saved = run_ranks(2, _save_and_go_on, str(tmp_path))
    loaded = run_ranks(2, _load_and_go_on, str(tmp_path))
    for expected, (actual, steps) in zip(saved, loaded, strict=True):
        # Shared by all parameters, `step` would have advanced once per parameter and step.
        assert steps == {5.0}
        for name, weight in expected.items():
            assert torch.equal(actual[name], weight), name
