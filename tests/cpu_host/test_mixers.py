# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Mamba and Gated DeltaNet on the CPU: kernels against recurrences, the mixers around them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from megatron.core import __version__, dist_checkpointing
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.mamba.mamba_model import MambaModel
from torch import Tensor

from megatron_residuals import cpu_host
from megatron_residuals.cpu_host import mixer_kernels
from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    setup_parallel,
    train_step,
    transformer_config,
)

pytestmark = [pytest.mark.host, pytest.mark.timeout(120)]

OLDEST = __version__.startswith("0.16")


def _normal(*shape: int, requires_grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(requires_grad)


def _mamba_recurrence(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token and head by head."""
    batch, length, heads, _ = x.shape
    y = torch.zeros_like(x)
    last = torch.zeros_like(state)
    for b in range(batch):
        for h in range(heads):
            group, hidden = h * B.shape[2] // heads, state[b, h]
            for t in range(length):
                step = torch.log1p(dt[b, t, h].exp())
                hidden = (step * A[h]).exp() * hidden + step * x[b, t, h].outer(B[b, t, group])
                read = hidden @ C[b, t, group] + D[h] * x[b, t, h]
                y[b, t, h] = read * z[b, t, h] * torch.sigmoid(z[b, t, h])
            last[b, h] = hidden
    return y, last


def _delta_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token, the erasing factor written out."""
    out = []
    eye = torch.eye(k.shape[-1], dtype=k.dtype)
    for t in range(q.shape[1]):
        key, b = k[:, t, :, :, None], beta[:, t, :, None, None]
        state = g[:, t, :, None, None].exp() * (eye - b * key * key.mT) @ state
        state = state + b * key * v[:, t, :, None, :]
        out.append((q[:, t, :, None, :] @ state).squeeze(-2) / k.shape[-1] ** 0.5)
    return torch.stack(out, 1), state


def _mamba_inputs() -> list[Tensor]:
    """Seven tokens, four heads in two groups, every size another."""
    decay = -torch.linspace(0.3, 2.0, 4, dtype=torch.float64)
    x, z, dt = _normal(2, 7, 4, 3), _normal(2, 7, 4, 3), _normal(2, 7, 4)
    B, C = _normal(2, 7, 2, 5), _normal(2, 7, 2, 5)
    return [x, dt, decay.requires_grad_(), B, C, _normal(4), z, _normal(2, 4, 3, 5)]


def _delta_inputs() -> list[Tensor]:
    q, k, v = _normal(2, 7, 3, 4), _normal(2, 7, 3, 4), _normal(2, 7, 3, 5)
    g = -torch.rand(2, 7, 3, dtype=torch.float64)
    beta = torch.rand(2, 7, 3, dtype=torch.float64)
    return [q, k, v, g.requires_grad_(), beta.requires_grad_(), _normal(2, 3, 4, 5)]


def _mamba_scan(chunk_size: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C, D, z, state = inputs
    return mixer_kernels.mamba_chunk_scan_combined(
        *(x, dt, A, B, C, chunk_size),
        D=D,
        z=z,
        initial_states=state,
        dt_softplus=True,
        return_final_states=True,
    )


def _delta_scan(chunk_size: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta, state = inputs
    return mixer_kernels.chunk_gated_delta_rule(
        *(q, k, v, g, beta),
        initial_state=state,
        output_final_state=True,
        chunk_size=chunk_size,
    )


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 64])
@pytest.mark.parametrize(
    ("scan", "recurrence", "inputs"),
    [
        pytest.param(_mamba_scan, _mamba_recurrence, _mamba_inputs, id="mamba"),
        pytest.param(_delta_scan, _delta_recurrence, _delta_inputs, id="gated_delta_net"),
    ],
)
def test_a_scan_in_chunks_is_the_recurrence_with_every_gradient(
    scan: Callable[..., tuple[Tensor, Tensor]],
    recurrence: Callable[..., tuple[Tensor, Tensor]],
    inputs: Callable[[], list[Tensor]],
    chunk_size: int,
) -> None:
    torch.manual_seed(5)
    leaves = inputs()
    ours, expected = scan(chunk_size, *leaves), recurrence(*leaves)
    cotangents = [torch.randn_like(tensor) for tensor in expected]
    grads = torch.autograd.grad(ours, leaves, cotangents)
    expected_grads = torch.autograd.grad(expected, leaves, cotangents)
    for actual, wanted in zip((*ours, *grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("scan", "inputs"), [(_mamba_scan, _mamba_inputs), (_delta_scan, _delta_inputs)]
)
def test_gradients_of_a_scan_are_its_slopes(
    scan: Callable[..., tuple[Tensor, Tensor]], inputs: Callable[[], list[Tensor]]
) -> None:
    torch.manual_seed(6)
    assert torch.autograd.gradcheck(lambda *leaves: scan(3, *leaves), inputs(), fast_mode=True)


def test_a_decay_beyond_the_range_of_exp_leaves_finite_gradients() -> None:
    """Masked after exp instead of before it, the upper triangle would be inf and its slope nan."""
    q, k, v, g, beta, state = _delta_inputs()
    steep = (g.detach() - 400).requires_grad_()
    out, _ = _delta_scan(7, q, k, v, steep, beta, state)
    assert all(t.isfinite().all() for t in torch.autograd.grad(out.sum(), (q, k, v, steep, beta)))


def test_a_causal_convolution_sees_the_present_and_what_came_before() -> None:
    torch.manual_seed(7)
    x, weight, bias = _normal(2, 6, 5), _normal(5, 3), _normal(5)
    y, _ = mixer_kernels.causal_conv1d(x, weight, bias, activation="silu")
    for t in range(6):
        seen = sum(x[:, t - i] * weight[:, 2 - i] for i in range(3) if t >= i)
        torch.testing.assert_close(y[:, t], F.silu(seen + bias))


@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_the_gated_norm_is_taken_in_groups(norm_before_gate: bool) -> None:
    torch.manual_seed(8)
    norm = mixer_kernels.RMSNorm(6, 1e-5, 3, norm_before_gate, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    x, z = _normal(4, 6), _normal(4, 6)
    gate = z * z.sigmoid()
    groups = (x if norm_before_gate else x * gate).view(4, 2, 3)
    normed = groups / (groups.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = normed.view(4, 6) * norm.weight * (gate if norm_before_gate else 1)
    torch.testing.assert_close(norm(x, z), expected)


def test_packed_sequences_are_refused() -> None:
    q, k, v, g, beta, _ = _delta_inputs()
    with pytest.raises(NotImplementedError, match="pad the sequences"):
        mixer_kernels.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=torch.tensor([0, 7]))


def test_only_the_hosts_mixers_see_the_stand_ins() -> None:
    """A module left under the name of a package would have passed for it everywhere."""
    from megatron.core.ssm import gated_delta_net, mamba_mixer

    assert gated_delta_net.chunk_gated_delta_rule is mixer_kernels.chunk_gated_delta_rule
    assert issubclass(mamba_mixer.ExtendedRMSNorm, mixer_kernels.RMSNorm)
    for name in ("mamba_ssm", "causal_conv1d", "fla.ops.gated_delta_rule"):
        assert getattr(sys.modules.get(name), "__file__", "none") is not None
    assert importlib.util.find_spec("mamba_ssm") is None
    (line,) = (line for line in cpu_host.install().device_mapping if "Mamba" in line)
    assert "mamba_ssm (not installed)" in line


def _toy(pattern: str, **layout: int | bool) -> ToyGPT:
    overrides = {
        "mamba_state_dim": 8,
        "mamba_head_dim": 8,
        "mamba_num_groups": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "activation_func": F.silu,
    }
    return ToyGPT(num_layers=len(pattern), bias=False, config_overrides=overrides, **layout)


def _build(toy: ToyGPT, pattern: str) -> MambaModel:
    from megatron_residuals.cpu_host.local_stack import local_stack_spec

    setup_parallel(toy)
    named = "hybrid_override_pattern" if OLDEST else "hybrid_layer_pattern"
    return MambaModel(
        transformer_config(toy),
        local_stack_spec(),
        toy.vocab_size,
        toy.seq_length,
        **{named: pattern},
    )


def _train(pattern: str, toy: ToyGPT, folder: str, saves: bool) -> list[list[float]]:
    """Losses of three steps downhill, from the weights in the folder."""
    model = _build(toy, pattern)
    if saves:
        dist_checkpointing.save(model.sharded_state_dict(), folder)
    else:
        state = dist_checkpointing.load(model.sharded_state_dict(), folder)
        model.load_state_dict(state, strict=False)
    losses = []
    for _ in range(3):
        losses.append(train_step([model], toy))
        _descend(model)
    return losses


@torch.no_grad()
def _descend(model: MambaModel) -> None:
    """The gradient of what TP ranks share is the sum of theirs, as the host's training has it."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(parameter.grad)
        parameter -= 0.5 * parameter.grad


# Torch warns, at lines of its own, of how the host calls its checkpoint functions.
@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize(
    "pattern", ["M*-M-", pytest.param("G*-G", marks=pytest.mark.skipif(OLDEST, reason="no G"))]
)
def test_a_hybrid_trains_on_one_rank_and_on_two_alike(pattern: str, tmp_path: Path) -> None:
    toy = _toy(pattern)
    two = dataclasses.replace(toy, tp=2, sequence_parallel=True)
    (one,) = run_ranks(1, _train, pattern, toy, str(tmp_path), True)
    first, second = run_ranks(2, _train, pattern, two, str(tmp_path), False)
    assert first == second and one[-1] < one[0]
    torch.testing.assert_close(torch.tensor(first), torch.tensor(one), rtol=2e-5, atol=0)


def _logits_with_a_cache_and_without() -> tuple[Tensor, Tensor]:
    """Six tokens at once, then one by one, on the state that the mixers keep; all ten at once."""
    toy = _toy("M*-M")
    model = _build(toy, "M*-M").eval()
    tokens = torch.randint(toy.vocab_size, (1, 10), generator=torch.Generator().manual_seed(9))
    positions = torch.arange(10).expand_as(tokens)
    context = StaticInferenceContext(max_batch_size=1, max_sequence_length=10)
    with torch.no_grad():
        whole = model(tokens, positions, None)
        parts = []
        with _inference_mode():
            for seen in (slice(6), *(slice(t, t + 1) for t in range(6, 10))):
                own = tokens[:, seen].contiguous(), positions[:, seen].contiguous()
                parts.append(
                    model(*own, None, inference_context=context, runtime_gather_output=True)
                )
                context.increment_sequence_len_offset(own[0].shape[1])
                context.enable_decode_mode()
    return whole, torch.cat(parts, 1)


def _inference_mode() -> contextlib.AbstractContextManager[None]:
    """From 0.18 on the host's engine says that it is at work, instead of `model.eval()`."""
    try:
        from megatron.core.inference.utils import InferenceMode
    except ImportError:
        return contextlib.nullcontext()
    return InferenceMode.active()


def test_a_hybrid_decodes_token_by_token_what_it_computes_at_once() -> None:
    ((whole, decoded),) = run_ranks(1, _logits_with_a_cache_and_without)
    assert whole.std() > 0.01
    torch.testing.assert_close(decoded[:, -4:], whole[:, -4:], rtol=1e-5, atol=1e-5)
