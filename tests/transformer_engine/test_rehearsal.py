# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rehearsals in Transformer Engine's own classes: against real launches, and as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_residuals.mcore.rehearsal import te_kernels
from tests.mcore.rehearsal.launches import (
    LASTING,
    MHC,
    VIRTUAL,
    Case,
    beside_lasting,
    for_real,
    rehearsed,
)
from tests.scripts import Scripts

te = pytest.importorskip("transformer_engine.pytorch")
pytestmark = pytest.mark.timeout(240)

CLASSES = "--transformer-impl transformer_engine"
CASES = (
    Case("plain", f"{CLASSES} --bf16 --tensor-model-parallel-size 2 --sequence-parallel"),
    Case("mhc, group", f"{CLASSES} {MHC} --residual-recompute group {VIRTUAL}"),
    Case(
        "blocks",
        f"{CLASSES} --residual block_attnres --residual-block-layers 1 --bf16 "
        f"--use-distributed-optimizer {VIRTUAL}",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_rehearsal_finds_what_every_rank_keeps_for_real(
    case: Case, scripts: Scripts, tmp_path: Path
) -> None:
    real = for_real(scripts, case, tmp_path)
    fake = rehearsed(scripts, case, tmp_path, "--cpu-host")
    for seen, said in zip(real, fake, strict=True):
        kept = {kind: seen["bytes"][kind] for kind in LASTING}
        assert kept == {kind: said["bytes"][kind] for kind in LASTING}
        assert min(kept.values()) > 0
        assert beside_lasting(said) == pytest.approx(beside_lasting(seen), rel=0.01)
        assert said["hops"] == seen["hops"]


def test_as_on_a_gpu_it_is_the_same_model_and_optimizer(scripts: Scripts, tmp_path: Path) -> None:
    case = CASES[-1]
    on_cpu = rehearsed(scripts, case, tmp_path, "--cpu-host")
    on_gpu = rehearsed(scripts, case, tmp_path)
    for here, there in zip(on_cpu, on_gpu, strict=True):
        assert all(here["bytes"][kind] == there["bytes"][kind] for kind in LASTING)
        assert here["hops"] == there["hops"] and min(there["bytes"].values()) >= 0


def _kept(build: Callable[[], torch.nn.Module], *shape: int, inputs: int = 1) -> list[int]:
    """Elements of what a module keeps of bfloat16 inputs for backward, which runs through."""
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    module, x = build(), torch.empty(shape, dtype=torch.bfloat16)
    given = [torch.empty_like(x, requires_grad=True) for _ in range(inputs)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(*given)
    output.backward(torch.empty_like(output))
    leaves = [*given, *module.parameters()]
    assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves)
    return sorted(kept)


def test_attention_keeps_its_inputs_its_output_and_a_number_per_token_and_head() -> None:
    s, b, heads, d = 32, 3, 2, 8

    def build() -> torch.nn.Module:
        return te.DotProductAttention(heads, d, attention_dropout=0.0, qkv_format="sbhd")

    with te_kernels.in_place_of_compiled_code():
        kept = _kept(build, s, b, heads, d, inputs=3)
    assert kept[-5:] == [b * heads * s, *4 * [s * b * heads * d]]
    assert sum(kept[:-5]) < 20  # lengths of sequences, the state of the random numbers


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_a_layer_keeps_the_same_whoever_stands_in_for_its_compiled_code(normalization: str) -> None:
    def build() -> torch.nn.Module:
        return te.LayerNormLinear(16, 24, normalization=normalization, params_dtype=torch.bfloat16)

    with_numbers = _kept(build, 6, 3, 16)
    with te_kernels.in_place_of_compiled_code():
        assert _kept(build, 6, 3, 16) == with_numbers
