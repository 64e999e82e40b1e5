# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's own modules on the CPU compute what torch's compute, with every gradient.

These tests are for a process that can import Transformer Engine's Python: `make test` runs them so.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_residuals import cpu_host

te = pytest.importorskip("transformer_engine.pytorch")

EPS = 1e-3
# Everything computed in 16 bits is compared with float32 from the same values.
CLOSE = {torch.float32: dict(rtol=1e-5, atol=2e-5), torch.bfloat16: dict(rtol=1.6e-2, atol=2e-2)}
in_each_dtype = pytest.mark.parametrize("dtype", CLOSE, ids=str)


def _norm(x: Tensor, kind: str, weight: Tensor, bias: Tensor | None) -> Tensor:
    if kind == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], weight, EPS)
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _fused(x: Tensor, kind: str, p: dict[str, Tensor], shift: int) -> Tensor:
    normed = _norm(x, kind, p["layer_norm_weight"] + shift, p.get("layer_norm_bias"))
    return F.linear(normed, p["weight"], p.get("bias"))


def _grouped(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    parts = [F.linear(x[:4], p["weight0"], p["bias0"]), F.linear(x[4:], p["weight1"], p["bias1"])]
    return torch.cat(parts)


def _cases() -> dict[str, tuple[Any, Any]]:
    cases = {
        "Linear": (lambda: te.Linear(6, 4), lambda x, p: F.linear(x, p["weight"], p["bias"])),
        "GroupedLinear": (lambda: te.GroupedLinear(2, 6, 4), _grouped),
        "RMSNorm": (
            lambda: te.RMSNorm(6, eps=EPS),
            lambda x, p: _norm(x, "RMSNorm", p["weight"], None),
        ),
        "LayerNorm": (
            lambda: te.LayerNorm(6, eps=EPS),
            lambda x, p: _norm(x, "LayerNorm", p["weight"], p["bias"]),
        ),
    }
    for kind in ("RMSNorm", "LayerNorm"):
        for centred in (False, True):
            options = dict(eps=EPS, normalization=kind, zero_centered_gamma=centred)
            cases[f"LayerNormLinear {kind} {centred}"] = (
                lambda options=options: te.LayerNormLinear(6, 4, **options),
                lambda x, p, kind=kind, centred=centred: _fused(x, kind, p, int(centred)),
            )
    return cases


CASES = _cases()


def _wide(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().float().requires_grad_() for name, value in values.items()}


def _compare(
    actual: Tensor, expected: Tensor, leaves: dict[str, Tensor], wide: dict[str, Tensor]
) -> None:
    """A result and its gradients, of `leaves`, with float32's, of the same values in `wide`."""
    close = CLOSE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, **close)
    cotangent = torch.randn_like(actual)
    grads = torch.autograd.grad(expected, list(wide.values()), cotangent.float())
    # as the host's schedules do: a call that torch lets a function mode replace runs outside of it
    torch.autograd.backward(actual, cotangent)
    for leaf, grad in zip(leaves.values(), grads, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.float(), grad, **close)


@in_each_dtype
@pytest.mark.parametrize(("build", "reference"), CASES.values(), ids=CASES)
def test_a_module_computes_what_torch_does_with_every_gradient(
    build: Any, reference: Any, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    module = build().to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(7, 6, dtype=dtype, requires_grad=True)
    leaves = {"x": x, **dict(module.named_parameters())}
    wide = _wide(leaves)
    split = [[4, 3]] if isinstance(module, te.GroupedLinear) else []
    actual = module(x, *split)
    assert actual.dtype == dtype
    _compare(actual, reference(wide["x"], wide), leaves, wide)


@in_each_dtype
def test_attention_is_causal_softmax_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    attention = te.DotProductAttention(2, 8, attention_dropout=0.0, qkv_format="sbhd")
    leaves = {name: torch.randn(5, 3, 2, 8, dtype=dtype, requires_grad=True) for name in "qkv"}
    wide = _wide(leaves)
    actual = attention(*leaves.values(), attn_mask_type="causal").view(5, 3, 2, 8)
    assert actual.dtype == dtype
    heads = (t.permute(1, 2, 0, 3) for t in wide.values())
    expected = F.scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3)
    _compare(actual, expected, leaves, wide)


def test_what_only_compiled_code_does_is_refused_by_name() -> None:
    import transformer_engine_torch as extension

    with pytest.raises(RuntimeError, match="called fused_rope_forward .* or on a GPU"):
        extension.fused_rope_forward(torch.zeros(1))


def test_only_transformer_engine_is_told_of_a_gpu() -> None:
    """Told of one themselves, torch, the host and our kernels would take CUDA's branches."""
    assert not torch.cuda.is_available() and not torch.zeros(1).is_cuda
    (line,) = (line for line in cpu_host.install().device_mapping if "Transformer Engine" in line)
    assert "no fp8" in line
