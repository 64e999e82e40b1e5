# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What the compiled functions of Transformer Engine allocate on a GPU, for its own classes.

The numbers in what they return mean nothing. A function that is not here is refused by name.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def are_here() -> bool:
    """Whether the classes can be imported, and what they call is the CPU host's."""
    return hasattr(_extension(), "stand_ins")


def _extension() -> Any:
    return sys.modules.get("transformer_engine_torch")


@contextlib.contextmanager
def in_place_of_compiled_code() -> Iterator[None]:
    """Transformer Engine's classes call what is here."""
    with mock.patch.dict(_extension().stand_ins, _FUNCTIONS):
        yield


def _gemm(
    a: Tensor,
    transa: bool,
    b: Tensor,
    transb: bool,
    out: Tensor | None,
    quantizer: None,
    out_dtype: int | None,
    bias: Tensor | None,
    bias_dtype: int,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    *others: object,
    **overlap: object,
) -> tuple[Tensor, Tensor | None, None, None]:
    bias_gradient = torch.empty_like(bias) if bias is not None and grad else None
    if out is None:
        rows = [b.shape[-1]] if transb else list(b.shape[:-1])
        columns = a.shape[0] if transa else a.shape[-1]
        out = b.new_empty(*rows, columns, dtype=_dtype(out_dtype) or b.dtype)
    return out, bias_gradient, None, None


def _dtype(code: int | None) -> torch.dtype | None:
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    return None if code is None else TE_DType_To_Torch[code]


def _grouped_gemm(*args: Any) -> Any:
    return args[7]  # the biases, whose gradients they are; the products have their place


def _layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Any, *_: Any) -> Any:
    return _like(x, out), _per_row(x), _per_row(x)


def _layernorm_backward(gradient: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    weight = rest[2]
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def _rmsnorm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None, *_: Any) -> Any:
    return _like(x, out), None, _per_row(x)


def _rmsnorm_backward(gradient: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, *_: Any) -> Any:
    return torch.empty_like(x), torch.empty_like(weight)


def _like(x: Tensor, out: Tensor | None) -> Tensor:
    return torch.empty_like(x) if out is None else out


def _per_row(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float32)


def _attention_backend(record: Any) -> tuple[int, str]:
    return int(_extension().NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen), ""


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    """Queries, keys, values and what follows them: the tensors of a call that have heads."""
    return [each for each in args if isinstance(each, Tensor) and each.dim() >= 3]


def _attention(*args: Any) -> list[Tensor]:
    """The output, a float32 per token and head, and the state of the random numbers."""
    query, _, value = _tensors(args)[:3]
    most, s_b = args[0], query.shape[:-2]
    heads = query.shape[-2]
    batch = query.shape[:-2].numel() // most
    sums = query.new_empty(batch, heads, most, 1, dtype=torch.float32)
    state = query.new_empty(2, dtype=torch.int64)
    return [query.new_empty(*s_b, heads, value.shape[-1]), sums, state]


def _attention_backward(*args: Any) -> list[Tensor | None]:
    gradients: list[Tensor | None] = [torch.empty_like(each) for each in _tensors(args)[:3]]
    return [*gradients, None, None]


def _norm_of_all(chunk: int, overflow: Tensor, lists: Any, per_tensor: bool = False) -> Any:
    one: Tensor = lists[0][0]
    each = one.new_empty(len(lists[0]) if per_tensor else 0, dtype=torch.float32)
    return one.new_empty(1, dtype=torch.float32), each


def _in_place(*args: object, **kwargs: object) -> None:
    """Writes into what is there."""


def _rotate(x: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(x)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "generic_gemm": _gemm,
    "te_general_grouped_gemm": _grouped_gemm,
    "layernorm_fwd": _layernorm,
    "layernorm_bwd": _layernorm_backward,
    "rmsnorm_fwd": _rmsnorm,
    "rmsnorm_bwd": _rmsnorm_backward,
    "get_fused_attn_backend": _attention_backend,
    "fused_attn_fwd": _attention,
    "fused_attn_bwd": _attention_backward,
    "fused_rope_forward": _rotate,
    "fused_rope_backward": _rotate,
    "multi_tensor_l2norm": _norm_of_all,
    "multi_tensor_scale": _in_place,
    "multi_tensor_scale_tensor": _in_place,
    "multi_tensor_adam": _in_place,
}
