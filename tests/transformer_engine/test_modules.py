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


def _compare(actual: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)
    cotangent = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, leaves, cotangent)
    # as the host's schedules do: a call that torch lets a function mode replace runs outside of it
    torch.autograd.backward(actual, cotangent)
    for leaf, grad in zip(leaves, grads, strict=True):
        torch.testing.assert_close(leaf.grad, grad, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("build", "reference"), CASES.values(), ids=CASES)
def test_a_module_computes_what_torch_does_with_every_gradient(build: Any, reference: Any) -> None:
    torch.manual_seed(3)
    module = build().float()
    parameters = dict(module.named_parameters())
    for parameter in parameters.values():
        torch.nn.init.normal_(parameter)
    leaves = [torch.randn(7, 6, requires_grad=True), *parameters.values()]
    split = [[4, 3]] if isinstance(module, te.GroupedLinear) else []
    actual, expected = module(leaves[0], *split), reference(leaves[0], parameters)
    _compare(actual, expected, leaves)


def test_attention_is_causal_softmax_attention() -> None:
    torch.manual_seed(4)
    attention = te.DotProductAttention(2, 8, attention_dropout=0.0, qkv_format="sbhd")
    q, k, v = (torch.randn(5, 3, 2, 8, requires_grad=True) for _ in range(3))
    actual = attention(q, k, v, attn_mask_type="causal").view(5, 3, 2, 8)
    heads = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    expected = F.scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3)
    _compare(actual, expected, [q, k, v])


def test_what_only_compiled_code_does_is_refused_by_name() -> None:
    import transformer_engine_torch as extension

    with pytest.raises(RuntimeError, match="called fused_rope_forward .* or on a GPU"):
        extension.fused_rope_forward(torch.zeros(1))


def test_only_transformer_engine_is_told_of_a_gpu() -> None:
    """Told of one themselves, torch, the host and our kernels would take CUDA's branches."""
    assert not torch.cuda.is_available() and not torch.zeros(1).is_cuda
    (line,) = (line for line in cpu_host.install().device_mapping if "Transformer Engine" in line)
    assert "no fp8" in line
