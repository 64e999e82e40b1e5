# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hyper-Connections and their constrained forms: one module, several ways to coefficients."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_residuals.functional import (
    MhcOptions,
    MhcWeights,
    StreamCoefficients,
    StreamUpdate,
    contract_streams,
)
from megatron_residuals.functional.streams import HC_NORM_EPS
from megatron_residuals.kernels import (
    hc_coefficients,
    mhc_coefficients,
    mhc_head_weights,
    read_streams,
    update_and_read,
)
from megatron_residuals.kernels.common.dispatch import check_choice
from megatron_residuals.modules.base import ResidualHead, SublayerResidual, new_parameter
from megatron_residuals.modules.state import StreamState

# Biases of mHC, appendix A.6: sigmoid(3) = 0.95 of the home stream, near-identity mixing.
A6_PRE = 3.0
A6_RES_DIAGONAL, A6_RES_OFF_DIAGONAL = 3.0, -3.0
# Logits of permutations other than the identity (mHC-lite and KromHC); that of the identity is 0.
OTHER_PERMUTATIONS = -8.0
HC_SCALE_INIT = 0.01


class PendingWrite(NamedTuple):
    """What a read leaves for the write: the streams, and how to read and update them.

    ``reads`` are weights for the next sublayer, where this one predicts them.
    """

    streams: Tensor
    h_pre: Tensor
    h_post: Tensor
    h_res: Tensor | None
    reads: Tensor | None = None


class StreamResidual(SublayerResidual[StreamState, PendingWrite]):
    """x = h_pre streams;  streams' = h_res streams + h_post y; coefficients from the streams.

    ``kernels`` says what computes it, as ``ResidualConfig.kernels``.

    Attributes:
        libraries: the external ones that have kernels for it.

    Raises:
        ValueError: ``kernels`` names something that has no kernels for it.
    """

    libraries: tuple[str, ...] = ()

    def __init__(self, kernels: str = "auto") -> None:
        super().__init__()
        self.kernels = check_choice(kernels, f"a {type(self).__name__}", self.libraries)

    @abstractmethod
    def coefficients(self, streams: Tensor) -> StreamCoefficients:
        """h_pre, h_post [..., n] and h_res [..., n, n], or None, for streams [..., n, d]."""

    def forward(self, state: StreamState) -> tuple[Tensor, PendingWrite]:
        """``read``: the weighted sum of the streams."""
        streams = state.settled().streams
        pending = PendingWrite(streams, *self.coefficients(streams))
        return self.reread(pending), pending

    def reread(self, pending: PendingWrite) -> Tensor:
        """The weighted sum again, with the coefficients of the first time."""
        return read_streams(pending.streams, pending.h_pre, backend=self.kernels)

    def write(self, pending: PendingWrite, output: Tensor) -> StreamState:
        """Streams to be mixed among themselves, with the sublayer's output added to each."""
        streams, _, h_post, h_res, reads = pending
        update = StreamUpdate(streams, output, h_post, h_res)
        return StreamState(streams, update, self.kernels, reads)


class HyperConnection(StreamResidual):
    """HC (arXiv 2409.19606), static or dynamic. Initially every sublayer reads its home stream.

    Parameters (float32): static_pre, static_post [n]; static_res [n^2], [new, old] row-major; when
    dynamic mapping_weight [n + 2, d] (read, write, mix) and scale [2] (s_alpha, s_beta). What is
    1-D optimizers of the host neither decay nor hand to Muon, hence the flat matrix.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_streams: int,
        home_stream: int,
        dynamic: bool,
        norm: str,
        kernels: str = "auto",
        device: torch.device | None = None,
    ) -> None:
        super().__init__(kernels)
        self.home_stream, self.norm = home_stream, norm
        self.static_pre = new_parameter(num_streams, device=device)
        self.static_post = new_parameter(num_streams, device=device)
        self.static_res = new_parameter(num_streams**2, device=device)
        self.mapping_weight = self.scale = None
        if dynamic:
            self.mapping_weight = new_parameter(num_streams + 2, hidden_size, device=device)
            self.scale = new_parameter(2, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Read the home stream, write to all, mix nothing: exactly the plain residual."""
        nn.init.zeros_(self.static_pre)
        nn.init.ones_(self.static_post)
        nn.init.zeros_(self.static_res)
        with torch.no_grad():
            self._res().fill_diagonal_(1.0)
            self.static_pre[self.home_stream] = 1.0
        if self.mapping_weight is not None and self.scale is not None:
            nn.init.zeros_(self.mapping_weight)
            nn.init.constant_(self.scale, HC_SCALE_INIT)

    def _res(self) -> Tensor:
        n = len(self.static_pre)
        return self.static_res.view(n, n)

    def coefficients(self, streams: Tensor) -> StreamCoefficients:
        """Static matrices plus, when dynamic, a bounded function of each stream."""
        static = StreamCoefficients(self.static_pre, self.static_post, self._res())
        return hc_coefficients(
            streams, static, self.mapping_weight, self.scale, norm=self.norm, eps=HC_NORM_EPS
        )

    def write(self, pending: PendingWrite, output: Tensor) -> StreamState:
        """The same at once: no coefficients come from the next read."""
        return super().write(pending, output).settled()


class ManifoldHyperConnection(StreamResidual):
    """mHC (arXiv 2512.24880): mixing constrained to (nearly) doubly stochastic matrices.

    Parameters (float32): mapping_weight [K, n d] and bias [K], ordered pre, post, res (row-major,
    or a logit for each permutation); alpha_pre, alpha_post, alpha_res [1]. K is 2n + n^2, or what
    the options come to.
    """

    libraries: tuple[str, ...] = ("liger",)

    def __init__(
        self,
        hidden_size: int,
        *,
        num_streams: int,
        home_stream: int,
        options: MhcOptions,
        alpha_init: float,
        initialisation: str,
        kernels: str = "auto",
        device: torch.device | None = None,
    ) -> None:
        super().__init__(kernels)
        self.num_streams, self.home_stream, self.options = num_streams, home_stream, options
        self.alpha_init, self.initialisation = alpha_init, initialisation
        columns = sum(options.sizes(num_streams))
        self.mapping_weight = new_parameter(columns, num_streams * hidden_size, device=device)
        self.bias = new_parameter(columns, device=device)
        self.alpha_pre = new_parameter(1, device=device)
        self.alpha_post = new_parameter(1, device=device)
        self.alpha_res = new_parameter(1, device=device) if options.mixes else None
        self.reset_parameters()

    @property
    def alphas(self) -> list[Tensor]:
        """The gating factors, that of mixing where streams are mixed."""
        found = (self.alpha_pre, self.alpha_post, self.alpha_res)
        return [alpha for alpha in found if alpha is not None]

    def reset_parameters(self) -> None:
        """Zero mapping; biases of appendix A.6 (one home stream per sublayer) or all zero."""
        nn.init.zeros_(self.mapping_weight)
        nn.init.zeros_(self.bias)
        for alpha in self.alphas:
            nn.init.constant_(alpha, self.alpha_init)
        if self.initialisation == "symmetric":
            return
        n = self.num_streams
        with torch.no_grad():
            self.bias[:n] = -A6_PRE
            self.bias[self.home_stream] = A6_PRE
            if self.options.mixes:
                self._start_mixing(self.bias[2 * n :])

    def _start_mixing(self, bias: Tensor) -> None:
        """Near the identity."""
        if sizes := self.options.factors(self.num_streams):
            for part in bias.split([math.factorial(size) for size in sizes]):
                part.fill_(OTHER_PERMUTATIONS)
                part[0] = 0.0
            return
        res = bias.view(self.num_streams, self.num_streams)
        res.fill_(A6_RES_OFF_DIAGONAL)
        res.fill_diagonal_(A6_RES_DIAGONAL)

    def coefficients(self, streams: Tensor) -> StreamCoefficients:
        """Sigmoid gates and a Sinkhorn-normalised mixing matrix from all streams together."""
        return mhc_coefficients(streams, self._weights(), self.options)

    def forward(self, state: StreamState) -> tuple[Tensor, PendingWrite]:
        """``read``, with the write that is still to be done and the coefficients in one step."""
        before = state.streams if state.update is None else state.update
        streams, x, h_pre, h_post, h_res = update_and_read(
            before, self._weights(), self.options, backend=self.kernels
        )
        return x, PendingWrite(streams, h_pre, h_post, h_res)

    def _weights(self) -> MhcWeights:
        return MhcWeights(self.mapping_weight, self.bias, torch.cat(self.alphas))


class IdentityHyperConnection(ManifoldHyperConnection):
    """iHC: mHC whose streams are not mixed, as Hy4 has it; the options' convention is ``identity``.

    Parameters (float32): mapping_weight [2n, n d] and bias [2n], ordered pre, post; alpha_pre,
    alpha_post [1].
    """

    libraries = ()


class SinglePassHyperConnection(ManifoldHyperConnection):
    """mHC that reads with the weights of the sublayer before (DeepSeek-V4.1, arXiv 2609.19969).

    Streams are written, read and projected in one go. Parameters as mHC's; the part pre of a
    sublayer says how the next one reads, and so does ``home_stream``.
    """

    libraries = ()

    def forward(self, state: StreamState) -> tuple[Tensor, PendingWrite]:
        """``read``: with what the state says; what is predicted goes on with the write."""
        assert state.reads is not None, "the state says how to read"
        before = state.streams if state.update is None else state.update
        streams, x, following, h_post, h_res = update_and_read(
            before, self._weights(), self.options, state.reads, backend=self.kernels
        )
        return x, PendingWrite(streams, state.reads, h_post, h_res, following)


class SinglePassHead(ResidualHead[StreamState]):
    """The last sublayer's weights contract the streams."""

    def __init__(self, kernels: str = "auto") -> None:
        super().__init__()
        self.kernels = kernels

    def close(self, state: StreamState) -> Tensor:
        """One more read."""
        assert state.reads is not None, "the state says how to read"
        return read_streams(state.settled().streams, state.reads, backend=self.kernels)


class StreamHead(ResidualHead[StreamState]):
    """The contraction of n streams to one: their mean, their sum, or a learned weighted sum.

    With ``learned`` (DeepSeek-V4's head), float32 parameters head_weight [n, n d], head_bias [n],
    head_scale [1]; the initial weights are 1/n each, which is the mean.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_streams: int,
        contraction: str,
        eps: float,
        gate_eps: float | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.num_streams, self.contraction = num_streams, contraction
        self.eps, self.gate_eps = eps, gate_eps
        if contraction == "learned":
            self.head_weight = new_parameter(num_streams, num_streams * hidden_size, device=device)
            self.head_bias = new_parameter(num_streams, device=device)
            self.head_scale = new_parameter(1, device=device)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Equal weights that do not depend on the input."""
        if self.contraction == "learned":
            nn.init.zeros_(self.head_weight)
            nn.init.ones_(self.head_scale)
            # sigmoid(-log(n - 1)) = 1/n; one stream has no such bias, and its weight only scales
            nn.init.constant_(self.head_bias, -math.log(max(self.num_streams - 1, 1)))

    def close(self, state: StreamState) -> Tensor:
        """The contraction of the streams."""
        streams, weights = state.settled().streams, None
        if self.contraction == "learned":
            weights = mhc_head_weights(
                streams,
                self.head_weight,
                self.head_bias,
                self.head_scale,
                eps=self.eps,
                gate_eps=self.gate_eps,
            )
        return contract_streams(streams, self.contraction, weights)
