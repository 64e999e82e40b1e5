# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hyper-Connections: n parallel residual streams, read, written and mixed by small matrices.

Shapes: streams [..., n, d]; h_pre and h_post [..., n]; h_res [..., n, n], indexed [new, old], or
None where it is the identity: the streams are not mixed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_residuals.functional.permutations import mix_permutations
from megatron_residuals.functional.precision import wide, without_autocast
from megatron_residuals.functional.sinkhorn import sinkhorn_dsv4, sinkhorn_paper
from megatron_residuals.mixing import factors, num_logits

CONVENTIONS = ("paper", "dsv4", "identity", "permutations", "kronecker")
HC_NORM_EPS = 1e-5  # of the norm in front of HC's dynamic projections
PAPER_EPS = 1e-20  # of the norm in a learned head that no option sets


class StreamCoefficients(NamedTuple):
    """What one sublayer does to the streams, in at least float32."""

    h_pre: Tensor
    h_post: Tensor
    h_res: Tensor | None = None


class StreamUpdate(NamedTuple):
    """A write that is still to be done.

    Attributes:
        streams: as they are before it [..., n, d].
        output: what the sublayer computed [..., d].
        h_post, h_res: its coefficients [..., n] and [..., n, n].
    """

    streams: Tensor
    output: Tensor
    h_post: Tensor
    h_res: Tensor | None = None

    def each(self, function: Callable[[Tensor], Tensor]) -> StreamUpdate:
        """A function of every tensor there is."""
        streams, output, h_post, h_res = self
        parts = function(streams), function(output), function(h_post)
        return StreamUpdate(*parts, None if h_res is None else function(h_res))


class StreamRead(NamedTuple):
    """What lies between two sublayers: the streams there, the next input x and its coefficients."""

    streams: Tensor
    x: Tensor
    h_pre: Tensor
    h_post: Tensor
    h_res: Tensor | None = None


class MhcWeights(NamedTuple):
    """What mHC learns for one sublayer, ordered pre, post, res (row-major), K coefficients in all.

    Attributes:
        mapping: [K, n d], where K is 2n + n^2 or what ``MhcOptions.sizes`` come to.
        bias: [K].
        alpha: [3], or [2].
    """

    mapping: Tensor
    bias: Tensor
    alpha: Tensor


class MhcOptions(NamedTuple):
    """How mHC gets from logits to coefficients.

    Attributes:
        convention: ``paper``: h_res[new, old] as projected. ``dsv4`` (DeepSeek-V4): the projected
            matrix is comb[old, new], transposed to h_res; eps is added to h_pre and in the Sinkhorn
            steps. ``identity`` (Hy4): no matrix; eps is added to h_pre and h_post.
            ``permutations`` and ``kronecker``: the matrices of ``megatron_residuals.mixing``.
        iterations: of Sinkhorn.
        eps: of the norm, and where the convention adds it.
        gate_eps: what the convention adds, where that is another one.
    """

    convention: str
    iterations: int
    eps: float
    gate_eps: float | None = None

    @property
    def is_dsv4(self) -> bool:
        """Whether the projected matrix is [old, new], and eps enters sums and gates."""
        return self.convention == "dsv4"

    @property
    def mixes(self) -> bool:
        """Whether streams are mixed by a matrix."""
        return self.convention != "identity"

    def factors(self, num_streams: int) -> tuple[int, ...]:
        """Sizes of the factors of a matrix that is a product of sums of permutations."""
        return factors(self.convention, num_streams)

    @property
    def step_eps(self) -> float:
        """The eps of h_pre and of divisions."""
        if self.convention not in ("dsv4", "identity"):
            return 0.0
        return self.eps if self.gate_eps is None else self.gate_eps

    @property
    def post_eps(self) -> float:
        """The eps of h_post."""
        return 0.0 if self.mixes else self.step_eps

    def sizes(self, num_streams: int) -> tuple[int, ...]:
        """Coefficients for each alpha: of pre, of post, and of res where streams are mixed."""
        n = num_streams
        return (n, n, num_logits(self.convention, n)) if self.mixes else (n, n)

    def checked(self) -> MhcOptions:
        """Itself.

        Raises:
            ValueError: the convention is unknown.
        """
        if self.convention not in CONVENTIONS:
            allowed = ", ".join(CONVENTIONS)
            raise ValueError(f"convention is {self.convention!r}; allowed: {allowed}")
        return self


def _weighted(equation: str, coefficients: Tensor, streams: Tensor) -> Tensor:
    """einsum in the wider of the two dtypes, at least float32, whatever autocast says."""
    dtype = torch.promote_types(coefficients.dtype, wide(streams).dtype)
    with without_autocast(streams):
        return torch.einsum(equation, coefficients.to(dtype), streams.to(dtype))


def _project(inputs: Tensor, mapping: Tensor) -> Tensor:
    """mapping x in the wider of the two dtypes, whatever autocast says."""
    dtype = torch.promote_types(inputs.dtype, mapping.dtype)
    with without_autocast(inputs):
        return torch.nn.functional.linear(inputs.to(dtype), mapping.to(dtype))


def expand_streams(embedding: Tensor, num_streams: int) -> Tensor:
    """streams[n] = embedding for every n.    [..., d] -> [..., n, d], contiguous."""
    shape = (*embedding.shape[:-1], num_streams, embedding.shape[-1])
    return embedding.unsqueeze(-2).expand(shape).contiguous()


def read_streams(streams: Tensor, h_pre: Tensor) -> Tensor:
    """x = sum_n h_pre[n] streams[n].    -> [..., d] in the dtype of the streams (mHC, eq. 1)"""
    mixed = _weighted("...n,...nd->...d", h_pre, streams)
    return mixed.to(streams.dtype)


def write_streams(update: StreamUpdate) -> Tensor:
    """streams'[j] = sum_i h_res[j, i] streams[i] + h_post[j] output.    (mHC, eq. 1)

    The result has the shape and dtype of the streams.
    """
    streams, output, h_post, h_res = update
    mixed = wide(streams) if h_res is None else _weighted("...ji,...id->...jd", h_res, streams)
    written = h_post.unsqueeze(-1) * wide(output).unsqueeze(-2)
    return (mixed + written).to(streams.dtype)


def contract_streams(streams: Tensor, how: str, weights: Tensor | None = None) -> Tensor:
    """One hidden state from n streams: their mean, sum, or a weighted sum (weights [..., n]).

    Raises:
        ValueError: ``how`` is not mean, sum or learned, or learned comes without weights.
    """
    if how == "mean":
        return wide(streams).mean(-2).to(streams.dtype)
    if how == "sum":
        return wide(streams).sum(-2).to(streams.dtype)
    if how == "learned" and weights is not None:
        return read_streams(streams, weights)
    raise ValueError(f"contraction is {how!r}; allowed: mean, sum, learned (with weights)")


def mhc_coefficients(
    streams: Tensor, weights: MhcWeights, options: MhcOptions
) -> StreamCoefficients:
    """Coefficients of mHC from one RMS-normalised projection of all streams (mHC, eq. 7-9).

        rstd = 1 / sqrt(mean(vec(x)^2) + eps),  h = alpha rstd (mapping vec(x)) + bias
        h_pre = sigmoid(h), h_post = 2 sigmoid(h), h_res = Sinkhorn(h)

    With ``identity`` the streams are not mixed (iHC: Hy4, and an ablation of mHC).

    Raises:
        ValueError: the convention is unknown.
    """
    logits = mhc_logits(streams, weights, options)
    return mhc_activations(logits, streams.shape[-2], options)


def mhc_logits(streams: Tensor, weights: MhcWeights, options: MhcOptions) -> Tensor:
    """h = alpha rstd (mapping vec(x)) + bias.    -> [..., K], as in ``mhc_coefficients``"""
    sizes = options.sizes(streams.shape[-2])
    gates = torch.cat([gate.expand(size) for gate, size in zip(weights.alpha, sizes, strict=True)])
    return _normed_projection(streams, weights.mapping, options.eps) * gates + weights.bias


def _normed_projection(streams: Tensor, mapping: Tensor, eps: float) -> Tensor:
    flat = wide(streams).flatten(-2)
    rstd = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    return rstd * _project(flat, mapping)


def mhc_activations(logits: Tensor, num_streams: int, options: MhcOptions) -> StreamCoefficients:
    """Gates and mixing matrix from their logits, the second half of ``mhc_coefficients``.

    Raises:
        ValueError: the convention is unknown.
    """
    pre, post, *res = logits.split(options.checked().sizes(num_streams), dim=-1)
    return StreamCoefficients(
        torch.sigmoid(pre) + options.step_eps,
        2 * torch.sigmoid(post) + options.post_eps,
        _mixing(res[0], num_streams, options) if res else None,
    )


def _mixing(logits: Tensor, num_streams: int, options: MhcOptions) -> Tensor:
    if sizes := options.factors(num_streams):
        return mix_permutations(logits, sizes)
    logits = logits.unflatten(-1, (num_streams, num_streams))
    if not options.is_dsv4:
        return sinkhorn_paper(logits, iterations=options.iterations)
    comb = sinkhorn_dsv4(logits, iterations=options.iterations, eps=options.step_eps)
    return comb.transpose(-1, -2)


def update_and_read(
    before: StreamUpdate | Tensor,
    weights: MhcWeights,
    options: MhcOptions,
    reads: Tensor | None = None,
) -> StreamRead:
    """A write, then coefficients of mHC from what was written, and the read with them.

    Given streams alone, there is nothing to be written, and they are read as they are. With
    ``reads`` [..., n], those weights read in place of h_pre, which is for the next sublayer
    (Single-Pass mHC, DeepSeek-V4.1: X' = B_l X + C_l F(A_{l-1} X)).

    Raises:
        ValueError: the convention is unknown.
    """
    streams = write_streams(before) if isinstance(before, StreamUpdate) else before
    coefficients = mhc_coefficients(streams, weights, options)
    x = read_streams(streams, coefficients.h_pre if reads is None else reads)
    return StreamRead(streams, x, *coefficients)


def mhc_head_weights(
    streams: Tensor,
    mapping: Tensor,
    bias: Tensor,
    scale: Tensor,
    *,
    eps: float,
    gate_eps: float | None = None,
) -> Tensor:
    """w = sigmoid(scale rstd (mapping vec(x)) + bias) + eps: DeepSeek-V4's learned contraction.

    mapping [n, n d], bias [n], scale [1]  ->  [..., n] in at least float32. ``gate_eps`` is what is
    added, where that is not the eps of the norm.
    """
    added = eps if gate_eps is None else gate_eps
    return torch.sigmoid(scale * _normed_projection(streams, mapping, eps) + bias) + added


def hc_coefficients(
    streams: Tensor,
    static: StreamCoefficients,
    mapping: Tensor | None,
    scale: Tensor | None,
    *,
    norm: str,
    eps: float,
) -> StreamCoefficients:
    """Coefficients of Hyper-Connections (arXiv 2409.19606, eq. 10-13).

        A_m(H) = s_alpha tanh(norm(H) W_m) + A_m        read
        B(H)   = s_beta  tanh(norm(H) W_b) + B          write
        A_r(H) = s_alpha tanh(norm(H) W_r) + A_r        mix; A_r[old, new] acts transposed

    static holds (A_m, B, A_r transposed to [new, old]); mapping [n + 2, d] stacks W_m, W_b and the
    n rows of W_r; scale [2] is (s_alpha, s_beta). Without mapping the matrices are static. norm is
    over d, one stream at a time: ``layernorm`` (HC) or ``rmsnorm`` (as restated by mHC); a gain
    would fold into mapping.
    """
    if norm not in ("layernorm", "rmsnorm"):
        raise ValueError(f"norm is {norm!r}; allowed: layernorm, rmsnorm")
    assert static.h_res is not None, "HC mixes streams"
    lead = (*streams.shape[:-2], streams.shape[-2])
    if mapping is None or scale is None:
        return StreamCoefficients(
            static.h_pre.expand(lead),
            static.h_post.expand(lead),
            static.h_res.expand(*lead, lead[-1]),
        )
    inputs = wide(streams)
    if norm == "layernorm":
        normed = torch.nn.functional.layer_norm(inputs, inputs.shape[-1:], eps=eps)
    else:
        normed = inputs * torch.rsqrt(inputs.square().mean(-1, keepdim=True) + eps)
    dynamic = torch.tanh(_project(normed, mapping))
    pre, post, res = dynamic[..., 0], dynamic[..., 1], dynamic[..., 2:]
    return StreamCoefficients(
        scale[0] * pre + static.h_pre,
        scale[1] * post + static.h_post,
        scale[0] * res.transpose(-1, -2) + static.h_res,
    )
