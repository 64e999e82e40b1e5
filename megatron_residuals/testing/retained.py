# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Measures what autograd keeps in a step of the toy GPT, and gives the same toy to the planner.

Call ``megatron_residuals.testing.install()`` before importing this: it imports Megatron-Core.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.planner.memory import MemoryPlan
from megatron_residuals.planner.sizes import ModelSizes
from megatron_residuals.recompute.accounting import RetainedBytes
from megatron_residuals.testing import run_ranks, toy_gpt
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import SpecLike, ToyGPT

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Measured(NamedTuple):
    """Bytes on one rank, parameters apart.

    Attributes:
        kept_bytes: of one micro-batch, between its forwards and its backwards, up to the loss.
        peak_bytes: most at any moment of the step at which an operation saves or needs something.
        left_bytes: after the step.
    """

    kept_bytes: int
    peak_bytes: int
    left_bytes: int


def measure_step(toy: ToyGPT, spec: SpecLike = None, *, timeout_s: float = 100) -> list[Measured]:
    """One training step of the toy on forked ranks, and what each of them kept."""
    return run_ranks(toy.world_size, _measure_rank, toy, spec, timeout_s=timeout_s)


def measure_plan(plan: MemoryPlan, dtype: str) -> dict[str, dict[str, int]]:
    """By policy of the plan: kept and peak bytes of the worst rank, measured and predicted.

    Runs the toy with the plan's sizes, a small vocabulary and the ranks that the plan has.
    ``dtype`` is bf16, fp16 or fp32, as the plan's element size says.
    """
    toy = _toy(plan, dtype)
    same = dataclasses.replace(plan, sizes=model_sizes(toy))
    found = {}
    for policy in plan.policies:
        residual = dataclasses.replace(plan.residual, recompute=policy)
        predicted = same.predict(policy)
        measured = measure_step(toy, spec_for(residual), timeout_s=600)[:: toy.tp]
        worst = predicted.worst
        found[policy] = {
            "rank": worst.rank,
            "kept_bytes": measured[worst.rank].kept_bytes,
            "kept_bytes_predicted": sum(worst.kept_parts.values()),
            "peak_bytes": measured[worst.rank].peak_bytes,
            "peak_bytes_predicted": worst.peak_bytes,
        }
    return found


def _toy(plan: MemoryPlan, dtype: str) -> ToyGPT:
    sizes, layout = plan.sizes, plan.layout
    overrides: dict[str, Any] = {"ffn_hidden_size": sizes.ffn_hidden_size}
    if sizes.query_groups is not None:
        overrides["num_query_groups"] = sizes.query_groups
    if sizes.kv_channels is not None:
        overrides["kv_channels"] = sizes.kv_channels
    if sizes.gated:
        overrides |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    if plan.group_size is not None:
        overrides["microbatch_group_size_per_vp_stage"] = plan.group_size
    if layout.num_ranks > 1:
        overrides["pipeline_model_parallel_layout"] = layout_text(layout)
    if dtype in ("bf16", "fp16"):
        overrides[dtype] = True
    return ToyGPT(
        num_layers=layout.num_layers,
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        seq_length=sizes.seq_length,
        micro_batch_size=sizes.micro_batch_size,
        num_microbatches=plan.num_microbatches,
        tp=sizes.tp,
        pp=layout.num_ranks,
        vpp=layout.num_chunks if layout.num_chunks > 1 else None,
        sequence_parallel=sizes.sequence_parallel,
        dtype=DTYPES[dtype],
        positions="rope" if sizes.rope else "learned_absolute",
        bias=False,
        config_overrides=overrides,
    )


def model_sizes(toy: ToyGPT) -> ModelSizes:
    """The toy as the planner sees it. Its loss takes whole logits, in their own dtype."""
    overrides = toy.config_overrides
    return ModelSizes(
        seq_length=toy.seq_length,
        micro_batch_size=toy.micro_batch_size,
        hidden_size=toy.hidden_size,
        ffn_hidden_size=overrides.get("ffn_hidden_size", 4 * toy.hidden_size),
        num_heads=toy.num_heads,
        query_groups=overrides.get("num_query_groups"),
        kv_channels=overrides.get("kv_channels"),
        gated=overrides.get("gated_linear_unit", False),
        rope=toy.positions == "rope",
        unfused_rms_norm=toy.normalization == "RMSNorm",
        vocab_size=toy.vocab_size * toy.tp,
        tp=toy.tp,
        sequence_parallel=toy.sequence_parallel,
        element_bytes=toy.dtype.itemsize,
        logit_bytes=toy.dtype.itemsize,
    )


def layout_text(layout: StageLayout) -> str:
    """The layout as the host's layout string, so that any layout can be asked of the host."""
    return f"E{'|'.join('t' * layers for layers in layout.layers)}L"


def _measure_rank(toy: ToyGPT, spec: SpecLike) -> Measured:
    toy_gpt.setup_parallel(toy)
    chunks = toy_gpt.build_chunks(toy, spec)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    with RetainedBytes(
        exclude=parameters, beside=lambda: _cached(chunks), sample_backward=True
    ) as retained:
        # rotary angles are computed once for all steps
        for chunk in chunks:
            if toy.positions == "rope":
                chunk.rotary_pos_emb.register_forward_hook(
                    lambda module, inputs, output: retained.exclude(output)
                )
        with _watched_forward(retained) as growth:
            toy_gpt.train_step(chunks, toy)
        left = retained.measure().bytes
    # what a stage adds is what it does not share with earlier stages of the rank
    return Measured(sum(growth) // toy.num_microbatches, retained.peak, left)


@contextlib.contextmanager
def _watched_forward(retained: RetainedBytes) -> Iterator[Sequence[int]]:
    """Lists by how many bytes each forward pass grew what is kept, its loss included."""
    growth: list[int] = []
    stock = toy_gpt._forward_step

    def forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        before = retained.measure().bytes
        output, loss_function = stock(batches, model)
        growth.append(retained.sample() - before)

        def loss(logits: torch.Tensor) -> Any:
            result = loss_function(logits)
            growth[-1] = retained.sample() - before
            return result

        return output, loss

    with mock.patch.object(toy_gpt, "_forward_step", forward_step):
        yield growth


def _cached(chunks: Sequence[Any]) -> list[torch.Tensor]:
    """Sources in the cache of this rank."""
    if not hasattr(chunks[0].decoder, "stage_io"):
        return []
    slots = chunks[0].decoder.stage_io.route.step.cache._slots.values()
    return [slot.value for slot in slots if slot.value is not None]
