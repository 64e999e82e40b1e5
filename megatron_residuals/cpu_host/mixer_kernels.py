# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels of Mamba-2 and Gated DeltaNet in plain PyTorch, with the signatures of their packages.

Both mixers are linear attention with a decay. Within a chunk, gamma the running sum of the log of
the decay and S the state [K, V] in front of the chunk,

    out_t = sum_{s<=t} exp(gamma_t - gamma_s) (q_t . k_s) u_s + exp(gamma_t) S^T q_t
    S'    = exp(gamma_l) S + sum_s exp(gamma_l - gamma_s) k_s u_s^T

Mamba-2 (arXiv 2405.21060) has q = C, k = B, u = dt x. In Gated DeltaNet (arXiv 2412.06464) u is
what the state does not yet know of v: u_t = beta_t (v_t - what k_t reads just before u_t is
written), a triangular system.

Sums are in float32, or in float64 where an argument is; results have the dtype of the input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T;  y_t = h_t C_t + D x_t, times silu(z) if given.

    Args:
        x: [b, l, h, p]; dt: [b, l, h]; A, dt_bias: [h]; B, C: [b, l, g, n], g dividing h.
        D: [h] or [h, p]; z: as x; initial_states: [b, h, p, n].

    Returns:
        y [b, l, h, p] in the dtype of x, and the last state [b, h, p, n] if it is asked for.

    Raises:
        NotImplementedError: the sequences are packed.
    """
    _refuse_packed(seq_idx, cu_seqlens, return_varlen_states or None)
    dtype = _sum_dtype(x, A)
    dt = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias
    dt = F.softplus(dt) if dt_softplus else dt
    read, key = (t.to(dtype).repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (C, B))
    written, decay = x.to(dtype) * dt[..., None], dt * A
    state = None if initial_states is None else initial_states.to(dtype).mT
    y, state = _over_chunks(_linear_attention, chunk_size, state, read, key, written, decay)
    if D is not None:
        y = y + x * (D if D.dim() == 2 else D[:, None])
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return (y.to(x.dtype), state.mT) if return_final_states else y.to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None = None,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    """Splits [b, l, z x B C dt], convolves x B C along l, scans, and gates with silu(z).

    Args:
        conv1d_weight: [x B C, width]; D: [h] with `headdim`, else [h, p].
        norm_before_gate: has no part in it: the host's norm comes after.

    Returns:
        [b, l, h * p].

    Raises:
        NotImplementedError: the sequences are packed.
    """
    _refuse_packed(seq_idx)
    num_heads = dt_bias.shape[0]
    headdim = D.shape[1] if headdim is None else headdim
    inner = num_heads * headdim
    z, convolved, dt = zxbcdt.split([inner, conv1d_weight.shape[0], num_heads], dim=-1)
    convolved, _ = causal_conv1d(convolved, conv1d_weight, conv1d_bias, activation=activation)
    states = (conv1d_weight.shape[0] - inner) // 2
    x, B, C = convolved.split([inner, states, states], dim=-1)
    x, z = (t.unflatten(-1, (num_heads, headdim)) for t in (x, z))
    B, C = (t.unflatten(-1, (ngroups, -1)) for t in (B, C))
    y = mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D=D, z=z, dt_bias=dt_bias, dt_softplus=True
    )
    assert isinstance(y, torch.Tensor), "the last state is not asked for"
    return y.flatten(-2)


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight in groups of channels, gated by silu(z) after the norm or before it."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.norm_before_gate = eps, norm_before_gate
        self.group_size = hidden_size if group_size is None else group_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """x, z: [..., hidden_size] -> the same, in the dtype of x."""
        gate = 1.0 if z is None else F.silu(z.to(_sum_dtype(z)))
        before, after = (1.0, gate) if self.norm_before_gate else (gate, 1.0)
        groups = (x.to(_sum_dtype(x)) * before).unflatten(-1, (-1, self.group_size))
        normed = F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2)
        return (normed * self.weight * after).to(x.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Each channel of x [b, l, d] convolved along l with its row of weight [d, width]; no state.

    Raises:
        NotImplementedError: the sequences are packed.
    """
    _refuse_packed(cu_seqlens)
    channels, width = weight.shape
    padded = F.pad(x.mT, (width - 1, 0))
    y = F.conv1d(padded, weight[:, None], bias, groups=channels).mT
    return (F.silu(y) if activation in ("silu", "swish") else y), None


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum of squares + eps) along the last dimension."""
    wide = x.to(_sum_dtype(x))
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T;  o_t = scale S_t^T q_t.

    Args:
        q, k: [b, l, h, K]; v: [b, l, h, V]; g, beta: [b, l, h]; initial_state: [b, h, K, V].
        scale: 1 / sqrt(K) unless given.

    Returns:
        o [b, l, h, V] in the dtype of v, and the last state if it is asked for.

    Raises:
        NotImplementedError: the sequences are packed.
    """
    _refuse_packed(cu_seqlens)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    dtype = _sum_dtype(v, g)
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    arguments = (t.to(dtype) for t in (q, k, v, g, beta))
    out, state = _over_chunks(_delta_rule, chunk_size, initial_state, *arguments)
    return out.to(v.dtype), state if output_final_state else None


def _sum_dtype(*tensors: Tensor) -> torch.dtype:
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def _over_chunks(
    chunk: Callable[..., tuple[Tensor, Tensor]],
    chunk_size: int,
    state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *features: Tensor,
) -> tuple[Tensor, Tensor]:
    """[b, l, h, ...] each, to out [b, l, h, V] and the last state [b, h, K, V]."""
    tensors = [tensor.transpose(1, 2) for tensor in (q, k, v, *features)]
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    outputs = []
    for parts in zip(*(tensor.split(chunk_size, dim=2) for tensor in tensors), strict=True):
        out, state = chunk(state, *parts)
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2), state


def _linear_attention(
    state: Tensor, q: Tensor, k: Tensor, u: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk: state [b, h, K, V]; q, k [b, h, l, K]; u [b, h, l, V]; log of the decay g."""
    gamma = g.cumsum(-1)[..., None]
    out = _scores(q, k, gamma) @ u + (q * gamma.exp()) @ state
    last = gamma[..., -1:, :]
    return out, state * last.exp() + (k * (last - gamma).exp()).mT @ u


def _delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk, as `_linear_attention` of u, which (1 + beta strictly-lower(scores)) u gives."""
    gamma, beta = g.cumsum(-1)[..., None], beta[..., None]
    unknown = beta * (v - (k * gamma.exp()) @ state)
    system = beta * _scores(k, k, gamma)
    u = torch.linalg.solve_triangular(system, unknown, upper=False, unitriangular=True)
    return _linear_attention(state, q, k, u, g)


def _scores(q: Tensor, k: Tensor, gamma: Tensor) -> Tensor:
    """exp(gamma_t - gamma_s) (q_t . k_s) for s <= t, zero above: [b, h, l, l]."""
    later = torch.ones(2 * (q.shape[-2],), dtype=torch.bool, device=q.device).triu(1)
    return (gamma - gamma.mT).masked_fill(later, -torch.inf).exp() * (q @ k.mT)


def _refuse_packed(*bounds: Tensor | bool | None) -> None:
    if any(bound is not None for bound in bounds):
        raise NotImplementedError(
            "the CPU host's kernels of Mamba and Gated DeltaNet take no packed sequences (seq_idx "
            "or cu_seqlens was given): pad the sequences, or run on a GPU with the real packages."
        )
