# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a GPU would dispatch, on fake tensors that lie on the CPU of this machine.

Fake tensors of a GPU have no backward where there is none, so all of them lie on the CPU, and
operations that keep something else there than on a GPU are given the GPU's form here.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_residuals.function_modes import ThroughBackward
from megatron_residuals.kernels.common import dispatch
from megatron_residuals.mcore.rehearsal import te_kernels

STAND_IN = """\
Transformer Engine's layers run on GPUs only: they are stood in for by the host's local ones with \
flash attention"""
OWN_CLASSES = """\
Transformer Engine's own classes run; in place of its compiled functions is what these allocate"""
# Kernels of others that a rehearsal does without; what they keep is the same.
FUSIONS = ("moe_permute_fusion", "moe_router_fusion")
FUSIONS_OF_STAND_INS = ("apply_rope_fusion", "masked_softmax_fusion", "persist_layer_norm")
NO_TRITON = "Triton is not installed here: the residual path is rehearsed as plain PyTorch runs it"


class _GpuForms(ThroughBackward):
    """Norms and dropout as one operation, as on a GPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.nn.functional.rms_norm, torch.rms_norm):
            return _rms_norm(*args, **kwargs)
        if func is torch.nn.functional.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


class FusedRMSNorm(torch.autograd.Function):
    """Keeps what a fused norm keeps: its input, its weight and a float32 per token.

    Its numbers mean nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        """x [..., d] and weight [d] -> [..., d]"""
        rstd = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients of both."""
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    normed: Tensor = FusedRMSNorm.apply(input, weight)
    return normed


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


class FlashAttention(torch.autograd.Function):
    """Keeps what flash attention keeps: its inputs, its output and a float32 per token and head.

    Its numbers mean nothing.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[s, b, heads, d], [s, b, groups, d], [s, b, groups, d_v] -> [s, b, heads * d_v]"""
        s, b, heads, _ = query.shape
        output = query.new_empty(s, b, heads * value.shape[-1])
        sums = query.new_empty(b, heads, s, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the inputs."""
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


def _build(self: Any, config: Any, *_: Any, **__: Any) -> None:
    """Whatever head sizes and ranks an attention is asked for, it keeps no parameters."""
    MegatronModule.__init__(self, config)


def _attend(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    attended: Tensor = FlashAttention.apply(query, key, value)
    return attended


def _share_storage() -> Callable[[Tensor, Tensor], None]:
    """The host's way to fill an emptied tensor again without a second copy."""

    def share(target: Tensor, source: Tensor) -> None:
        size = source.untyped_storage().size()
        source.untyped_storage().resize_(0)
        target.untyped_storage().resize_(size)

    return share


def _accumulate(inputs: Tensor, gradient: Tensor, total: Tensor) -> None:
    """The gradient of a weight is added to what is there, without a tensor of its own."""


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """The host and the mechanisms dispatch as on a GPU."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.tensor_parallel import random as host_random

    fused = SimpleNamespace(wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (dispatch, "is_on_gpu", lambda tensor: True),
            (layers, "_grad_accum_fusion_available", True),
            (layers, "fused_weight_gradient_mlp_cuda", fused),
            (host_random, "_get_share_storage", _share_storage),
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        stack.enter_context(_GpuForms())
        yield


@contextlib.contextmanager
def transformer_engine(args: argparse.Namespace) -> Iterator[None]:
    """Its own classes without its compiled code, or stand-ins where they are not installed.

    Raises:
        ValueError: the launch quantizes, which only compiled code does.
    """
    if args.fp8 or getattr(args, "fp4", None):
        raise ValueError(
            "fp8 and fp4 are done by compiled code of Transformer Engine, which a rehearsal does "
            "without; rehearse in bfloat16"
        )
    for fusion in FUSIONS:
        setattr(args, fusion, False)
    with te_kernels.in_place_of_compiled_code() if te_kernels.are_here() else _stand_ins(args):
        yield


@contextlib.contextmanager
def _stand_ins(args: argparse.Namespace) -> Iterator[None]:
    """Local layers with flash attention."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    args.transformer_impl = "local"
    for fusion in FUSIONS_OF_STAND_INS:
        setattr(args, fusion, False)
    args.no_persist_layer_norm = True
    with mock.patch.multiple(DotProductAttention, __init__=_build, forward=_attend):
        yield
