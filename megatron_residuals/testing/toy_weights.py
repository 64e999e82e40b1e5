# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Weights and gradients of a model by global name, whatever ranks its pieces live on.

A global name is a parameter's name in the model of one process: layer numbers count from the first
layer of the whole model, experts from the first expert of their layer, and the output weight of
tied embeddings is the embedding's.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

Chunk: TypeAlias = Any
"""A model chunk: the host's GPTModel, or its hybrid model, which has another name by release."""
Initialise = Callable[[str, tuple[int, ...], torch.Generator], torch.Tensor | None]
"""(global name, full shape, generator) -> full weight, or None to keep what the module chose."""

_EMBEDDING = "embedding.word_embeddings.weight"
_LOCAL_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"(?<=\.local_experts\.)(\d+)(?=\.)")
_SCALE = 0.08


def default_initialise(
    name: str, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """0.08 * N(0, 1), float64; one is added to the scale of a norm."""
    weight = torch.randn(shape, generator=generator, dtype=torch.float64) * _SCALE
    return weight + 1 if "norm" in name and name.endswith("weight") else weight


def named_globally(chunk: Chunk) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(global name, parameter) of one model chunk."""
    layers: Any = chunk.decoder.layers
    numbers = [layer.layer_number - 1 for layer in layers]
    tied = chunk.share_embeddings_and_output_weights
    for name, parameter in chunk.named_parameters():
        if tied and name == "output_layer.weight":
            yield _EMBEDDING, parameter
            continue
        name = _LOCAL_LAYER.sub(lambda m: f"decoder.layers.{numbers[int(m.group(1))]}.", name)
        yield (
            _LOCAL_EXPERT.sub(lambda m: str(_first_expert(chunk) + int(m.group(1))), name),
            parameter,
        )


def _first_expert(chunk: Chunk) -> int:
    ranks = parallel_state.get_expert_model_parallel_world_size()
    rank = parallel_state.get_expert_model_parallel_rank()
    return int(rank * (chunk.config.num_moe_experts or 0) // ranks)


@torch.no_grad()
def initialise_chunk(chunk: Chunk, initialise: Initialise, seed: int) -> None:
    """Sets every parameter to this rank's share of a weight that depends on name and seed alone."""
    for name, parameter in named_globally(chunk):
        shape = list(parameter.shape)
        if _is_sharded(parameter):
            dim, _ = _partition(parameter)
            shape[dim] *= _tp_size()
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
        weight = initialise(name, tuple(shape), generator)
        if weight is not None:
            parameter.copy_(_own_shard(weight, parameter))


def full_grads(chunks: Sequence[Chunk]) -> dict[str, torch.Tensor]:
    """{global name: gradient} of this rank's parameters, whole over TP; zeros where none arrived.

    A collective call: it does, on copies, what `finalize_model_grads` does without data parallelism
    (sums over TP for sequence-parallel parameters, over first and last stage for tied embeddings).
    Frozen parameters are left out.
    """
    grads: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        for name, parameter in named_globally(chunk):
            if not parameter.requires_grad:
                continue
            grad = parameter.grad
            grad = torch.zeros_like(parameter) if grad is None else grad.detach().clone()
            _reduce_over_tp(grad, name, parameter, chunk.config)
            grads[name] = whole_over_tp(grad, parameter)
        if _repeats_embedding(chunk) and (chunk.pre_process or chunk.post_process):
            _sum_over_stages(grads, chunk)
    return grads


def _repeats_embedding(chunk: Chunk) -> bool:
    """Whether the last stage has the embedding too: as output weight, or to predict more tokens."""
    return bool(chunk.share_embeddings_and_output_weights or chunk.config.mtp_num_layers)


def _sum_over_stages(grads: dict[str, torch.Tensor], chunk: Chunk) -> None:
    # One process has one embedding parameter, and a stage that is both first and last has too.
    if parallel_state.get_pipeline_model_parallel_world_size() > 1 and _EMBEDDING in grads:
        torch.distributed.all_reduce(grads[_EMBEDDING], group=parallel_state.get_embedding_group())


def _tp_size() -> int:
    return int(parallel_state.get_tensor_model_parallel_world_size())


def _is_sharded(parameter: torch.nn.Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _partition(parameter: Any) -> tuple[int, int]:
    """The dimension that a sharded parameter is split along, and in how many parts."""
    return parameter.partition_dim, getattr(parameter, "partition_stride", 1)


def _own_shard(weight: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    if not _is_sharded(parameter):
        return weight
    dim, stride = _partition(parameter)
    rank = parallel_state.get_tensor_model_parallel_rank()
    # A gated MLP stacks gate and up: a rank owns its share of each (stride 2).
    parts = weight.chunk(stride, dim)
    return torch.cat([part.chunk(_tp_size(), dim)[rank] for part in parts], dim)


def whole_over_tp(grad: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The whole of a tensor of which each TP rank has what it has of the parameter; collective."""
    if not _is_sharded(parameter) or _tp_size() == 1:
        return grad
    dim, stride = _partition(parameter)
    shards = [torch.empty_like(grad) for _ in range(_tp_size())]
    torch.distributed.all_gather(
        shards, grad.contiguous(), group=parallel_state.get_tensor_model_parallel_group()
    )
    parts = [shard.chunk(stride, dim) for shard in shards]
    return torch.cat([part[i] for i in range(stride) for part in parts], dim)


def _reduce_over_tp(
    grad: torch.Tensor, name: str, parameter: torch.nn.Parameter, config: TransformerConfig
) -> None:
    if _tp_size() == 1:
        return
    group = parallel_state.get_tensor_model_parallel_group()
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        torch.distributed.all_reduce(grad, group=group)
        grad /= _tp_size()
    elif (config.sequence_parallel and getattr(parameter, "sequence_parallel", False)) or (
        config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
    ):
        torch.distributed.all_reduce(grad, group=group)
