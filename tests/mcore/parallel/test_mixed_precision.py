# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""16-bit training: what a mechanism learns is float32 from the module to the checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.residual_toy import toy_spec
from megatron_residuals.testing.toy_gpt import ToyGPT, run_toy, setup_parallel
from megatron_residuals.testing.toy_training import ToyTrainer, Training, train_toy
from tests.mcore.parallel.cases import (
    BLOCKS,
    HC,
    MHC_DSV4,
    SMALL,
    block_spec_for,
    is_mechanism,
)

pytestmark = [pytest.mark.host, pytest.mark.timeout(120)]

OPTIMIZERS = {
    "plain": {},
    "distributed": dict(use_distributed_optimizer=True),
    "distributed, overlapped": dict(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=300,
    ),
}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def half_toy(half: str, **layout: Any) -> ToyGPT:
    sizes = dict(SMALL, num_layers=2, num_microbatches=2, dtype=HALVES[half])
    return ToyGPT(**sizes, config_overrides={half: True}, **layout)


def half_training(ddp: dict[str, Any], **options: Any) -> Training:
    return Training(ddp=ddp, optimizer=dict(loss_scale=64.0), **options)


def dtypes_of_a_step(toy: ToyGPT, residual: str, ddp: dict[str, Any]) -> dict[str, set[Any]]:
    setup_parallel(toy)
    spec = block_spec_for(residual) if toy.pattern is None else toy_spec(toy, residual)
    trainer = ToyTrainer(toy, spec, half_training(ddp))
    trainer.accumulate()
    (chunk,) = trainer.chunks
    ours = {n: p for n, p in chunk.named_parameters() if is_mechanism(n)}
    theirs = [p for n, p in chunk.named_parameters() if not is_mechanism(n)]
    grads = {p.main_grad.dtype for p in ours.values()}
    trainer.update()
    stored = chunk.sharded_state_dict()
    return {
        "module": {p.dtype for p in ours.values()},
        "host's": {p.dtype for p in theirs},
        "main gradients": grads,
        "optimizer": optimizer_dtypes(trainer.optimizer),
        "checkpoint": {stored[name].dtype for name in ours},
        "narrow": {n for n, p in ours.items() if p.ne(0).any() and is_representable(p, toy.dtype)},
    }


def optimizer_dtypes(optimizer: Any) -> set[torch.dtype]:
    """Of every master weight and of its state: all parameters are trained."""
    found = set()
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = [v for k, v in inner.state[parameter].items() if k != "step"]
                assert len(state) == 2 or parameter.numel() == 0
                found |= {parameter.dtype, *(value.dtype for value in state)}
    return found


def is_representable(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(parameter, parameter.to(dtype).float())


CASES = [
    (HC, "plain", "fp16"),
    (HC, "distributed", "bf16"),
    (MHC_DSV4, "distributed", "bf16"),
    (MHC_DSV4, "distributed, overlapped", "fp16"),
    (BLOCKS, "plain", "bf16"),
    (BLOCKS, "distributed, overlapped", "bf16"),
]


@pytest.mark.parametrize(("residual", "optimizer", "half"), CASES)
def test_a_mechanism_is_float32_in_module_gradient_optimizer_and_checkpoint(
    residual: str, optimizer: str, half: str
) -> None:
    ddp = OPTIMIZERS[optimizer]
    for found in run_ranks(2, dtypes_of_a_step, half_toy(half, dp=2), residual, ddp):
        narrow = found.pop("narrow")
        assert found == {
            "module": {torch.float32},
            "host's": {HALVES[half]},
            "main gradients": {torch.float32},
            "optimizer": {torch.float32},
            "checkpoint": {torch.float32},
        }
        # after a step no value is one that 16 bits could hold, apart from what has no gradient
        assert all("layers.0.self_attention_residual" in name for name in narrow), narrow


@pytest.mark.parametrize("residual", [MHC_DSV4, BLOCKS])
def test_data_and_pipeline_parallel_bf16_stays_near_float32(residual: str) -> None:
    actual = train_toy(half_toy("bf16", dp=2, pp=2), block_spec_for(residual), half_training({}))
    wide = ToyGPT(**dict(SMALL, num_layers=2, num_microbatches=2))
    expected = run_toy(wide, block_spec_for(residual))
    assert actual.losses[0] == pytest.approx(expected.losses, rel=2e-2)
    ours = [name for name in expected.grads if is_mechanism(name)]
    # the optimizer takes the loss scale off
    near = torch.cat([actual.grads[name].flatten() / 64 for name in ours])
    grad = torch.cat([expected.grads[name].flatten() for name in ours])
    assert (near - grad).norm() < 0.1 * grad.norm()
