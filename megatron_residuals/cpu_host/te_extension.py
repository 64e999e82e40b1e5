# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's Python on the CPU, where its compiled extension is not installed.

The wheel `transformer_engine` holds every class of `transformer_engine.pytorch`, and none of the
compiled code behind them. Here is a module in place of that code, `transformer_engine_torch`, with
what a step in float32 or bfloat16 calls, in PyTorch; the rest (fp8, fused attention, overlap of
communication) raises and says so. Modules, parameters, `_extra_state`, checkpoint keys and autograd
functions are Transformer Engine's own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_residuals.function_modes import ThroughBackward

_PACKAGE, _EXTENSION = "transformer_engine", "transformer_engine_torch"


def supply_extension() -> str | None:
    """The wheel alone raises RuntimeError on import, for which the host is not prepared."""
    if importlib.util.find_spec(_PACKAGE) is None:
        return None
    if importlib.util.find_spec(_EXTENSION) is not None:
        return "Transformer Engine: left alone, its compiled extension is installed"
    sys.modules[_EXTENSION] = _Extension(_EXTENSION)
    _answer_as_a_gpu()
    version = _import_without_core()
    return (
        f"Transformer Engine {version}: its Python runs in float32 and bfloat16, with PyTorch in "
        f"place of its compiled extension, and is told that there is a GPU (no fp8, no fused "
        "attention)"
    )


def _import_without_core() -> str:
    """The variable is what its own build sets to leave the core library out."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    # Without it a module that is split over ranks warns that messages may not overlap with work.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("NVTE_MASKED_SOFTMAX_FUSION", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package tries to load the extension, and warns
        package = importlib.import_module(_PACKAGE)
    package.common.load_framework_extension = lambda framework: None
    importlib.import_module(f"{_PACKAGE}.pytorch")
    return str(package.__version__)


class _AnswersAsGpu(ThroughBackward):
    """Tensors are on a GPU when Transformer Engine asks, and for nobody else."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func == _IS_CUDA and _asked_by_transformer_engine():
            return True
        return func(*args, **(kwargs or {}))


# equal to what torch passes, and never the same object
_IS_CUDA = torch.Tensor.is_cuda.__get__


def _asked_by_transformer_engine() -> bool:
    """Through other modes, which have had the question before."""
    asking = sys._getframe(2)
    while asking.f_code.co_name == "__torch_function__" and asking.f_back is not None:
        asking = asking.f_back
    return bool(asking.f_globals.get("__name__", "").startswith(_PACKAGE))


def _answer_as_a_gpu() -> None:
    """Its modules refuse to be built or called without a GPU, and ask which one it is."""
    is_available, current_device = torch.cuda.is_available, torch.cuda.current_device
    torch.cuda.is_available = lambda: _asked_by_transformer_engine() or is_available()
    torch.cuda.current_device = lambda: 0 if _asked_by_transformer_engine() else current_device()
    properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=1)
    torch.cuda.get_device_properties = lambda *args, **kwargs: properties
    torch.cuda.get_device_capability = lambda *args, **kwargs: (9, 0)
    _AnswersAsGpu().__enter__()


class _Member(int):
    """A member of an enumeration, or what is left of a record that only compiled code reads."""

    def __new__(cls, number: int = 0, **fields: object) -> _Member:
        return super().__new__(cls, number)


class _Names(type):
    """An enumeration whose members are those that were asked for, numbered in that order.

    Transformer Engine mirrors the enumerations of its extension in Python, name by name, and then
    compares the two lists.
    """

    __members__: dict[str, int]

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        member = cls.__members__[name] = cls(len(cls.__members__))
        setattr(cls, name, member)
        return member


class _Extension(types.ModuleType):
    """`transformer_engine_torch`: enumerations, and functions that are looked up when called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.stand_ins = _FUNCTIONS
        for each in _FUNCTIONS:  # some modules take all that is there
            getattr(self, each)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_type = name[0].isupper()
        value = _Names(name, (_Member,), {"__members__": {}}) if is_type else _function(name)
        setattr(self, name, value)
        return value


def _function(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if name not in _FUNCTIONS:
            raise RuntimeError(
                f"Transformer Engine called {name} of its compiled extension, which the CPU host "
                "does not have: run in float32 or bfloat16, without fp8, fused attention and "
                "overlap of communication, or on a GPU."
            )
        return _FUNCTIONS[name](*args, **kwargs)

    return call


def generic_gemm(
    A: Tensor,
    transa: bool,
    B: Tensor,
    transb: bool,
    out: Tensor | None,
    quantizer: None,
    out_dtype: int | None,
    bias: Tensor | None,
    bias_dtype: int,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    **overlap: object,
) -> tuple[Tensor, Tensor | None, None, None]:
    """op(B) @ op(A), [..., n]; with `grad` the bias gives its gradient instead of being added."""
    left, right = B.flatten(0, -2), A.flatten(0, -2)
    product = (left.mT if transb else left) @ (right.mT if transa else right)
    if not transb:
        product = product.view(*B.shape[:-1], -1)
    bias_grad = left.sum(0).to(bias.dtype) if bias is not None and grad else None
    if bias is not None and not grad:
        product = product + bias
    if out is None:
        return product.to(_torch_dtype(out_dtype, B.dtype)), bias_grad, None, None
    out.copy_(out + product if accumulate else product)
    return out, bias_grad, None, None


def _torch_dtype(code: int | None, otherwise: torch.dtype) -> torch.dtype:
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    dtype: torch.dtype = otherwise if code is None else TE_DType_To_Torch[code]
    return dtype


def te_general_grouped_gemm(
    A: Sequence[Tensor],
    transa: bool,
    B: Sequence[Tensor],
    transb: bool,
    out: Sequence[Tensor],
    out_dtype: int,
    m_splits: Sequence[int] | None,
    bias: Sequence[Tensor],
    bias_dtype: int,
    single_output: bool,
    gelu_in: Sequence[Tensor],
    grad: bool,
    *scheduling: object,
) -> Sequence[Tensor]:
    """`generic_gemm` group by group, written into `out` (one tensor with `single_output`)."""
    accumulate = bool(scheduling[2])
    targets = out[0].split(list(m_splits or ())) if single_output else out
    for a, b, target, shift in zip(A, B, targets, bias, strict=True):
        product = (b.mT if transb else b) @ (a.mT if transa else a)
        if shift.numel() and grad:
            shift.copy_(b.sum(0))
        elif shift.numel():
            product = product + shift
        target.copy_(target + product if accumulate else product)
    return bias


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: None,
    out_dtype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed x [rows, n], mean and 1 / standard deviation [rows]."""
    scale = weight + 1 if zero_centered_gamma else weight
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], scale, bias, eps)
    return _into(out, y), mean.flatten(), rstd.flatten()


def layernorm_bwd(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    normed = (x.float() - mean[:, None]) * rstd[:, None]
    grad_x, grad_weight = _norm_backward(grad, normed, rstd, weight, zero_centered_gamma)
    centred = grad_x - grad_x.mean(-1, keepdim=True)
    return centred.to(x.dtype), grad_weight, grad.float().sum(0).to(weight.dtype)


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: None,
    out_dtype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, None, Tensor]:
    """x / rms(x) * weight [rows, n], nothing, 1 / rms(x) [rows]."""
    rstd = (x.float().square().mean(-1) + eps).rsqrt()
    scale = weight.float() + zero_centered_gamma
    return _into(out, (x.float() * rstd[:, None] * scale).to(x.dtype)), None, rstd


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    normed = x.float() * rstd[:, None]
    grad_x, grad_weight = _norm_backward(grad, normed, rstd, weight, zero_centered_gamma)
    return grad_x.to(x.dtype), grad_weight


def _norm_backward(
    grad: Tensor, normed: Tensor, rstd: Tensor, weight: Tensor, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """Through the division by a root mean square alone."""
    inner = grad.float() * (weight.float() + zero_centered_gamma)
    along = (inner * normed).mean(-1, keepdim=True)
    grad_weight = (grad.float() * normed).sum(0).to(weight.dtype)
    return rstd[:, None] * (inner - normed * along), grad_weight


def multi_tensor_l2norm(
    chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm over all tensors [1], and those of each if asked for."""
    norms = torch.stack(torch._foreach_norm(list(lists[0]))).float()
    return norms.norm().reshape(1), norms if per_tensor else norms.new_empty(0)


def multi_tensor_scale(
    chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float | Tensor
) -> None:
    """Sources times a number into targets."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_adam(
    chunk: int,
    overflow: Tensor,
    lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    corrected: int,
    weight_decay: float,
) -> None:
    """A step of Adam: gradients, parameters, first and second moments, all updated in place."""
    correction1 = 1 - beta1**step if corrected else 1.0
    correction2 = 1 - beta2**step if corrected else 1.0
    for gradient, parameter, first, second in zip(*lists, strict=True):
        slope = gradient.float()
        if not decoupled:
            slope = slope + weight_decay * parameter
        first.lerp_(slope, 1 - beta1)
        second.mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
        update = first / correction1 / ((second / correction2).sqrt() + eps)
        if decoupled:
            update = update + weight_decay * parameter
        parameter.sub_(lr * update)


def _into(out: Tensor | None, value: Tensor) -> Tensor:
    return value if out is None else out.copy_(value)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        function.__name__: function
        for function in (
            generic_gemm,
            te_general_grouped_gemm,
            layernorm_fwd,
            layernorm_bwd,
            rmsnorm_fwd,
            rmsnorm_bwd,
            multi_tensor_l2norm,
            multi_tensor_scale,
            multi_tensor_adam,
        )
    },
    "multi_tensor_scale_tensor": multi_tensor_scale,
    "get_cudnn_version": lambda: 91200,
    "get_fused_attn_backend": lambda record: (0, "it is not compiled"),  # No_Backend comes first
    "get_num_cublas_streams": lambda: 1,
    "get_stream_priority_range": lambda *args: (0, 0),
}
"""What there is in place of compiled functions, by name."""
