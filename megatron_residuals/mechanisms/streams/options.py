# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options of the mechanisms with parallel streams."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_residuals.mechanisms.options import option

CONVENTIONS = ("paper", "dsv4")
MIXINGS = ("sinkhorn", "permutations", "kronecker")
CONTRACTIONS = ("auto", "mean", "sum", "learned")
INITIALISATIONS = ("a6", "symmetric")
HC_NORMS = ("layernorm", "rmsnorm")


@dataclass(frozen=True)
class StreamCount:
    """What all forms read."""

    streams: int = option(
        4,
        "number n of parallel residual streams",
        minimum=1,
        advice="weights of another number of streams do not fit: give the saved number",
    )


@dataclass(frozen=True)
class StreamOptions(StreamCount):
    """Streams and their contraction. ``contraction_default`` is what ``auto`` stands for."""

    contraction: str = option(
        "auto",
        "how the streams become one hidden state at the end (auto: HC sum, mHC paper mean, "
        "mHC dsv4 and iHC learned)",
        choices=CONTRACTIONS,
    )

    @property
    def resolved_contraction(self) -> str:
        """``mean``, ``sum`` or ``learned``: the contraction with ``auto`` replaced."""
        return self.contraction_default if self.contraction == "auto" else self.contraction

    @property
    def contraction_default(self) -> str:
        """HC's."""
        return "sum"

    @property
    def resolved_mhc_eps(self) -> float:
        """Of the norm in a learned head."""
        return PAPER_EPS

    @property
    def resolved_gate_eps(self) -> float | None:
        """What gates have added, where that is not the eps of the norm."""
        return None


PAPER_EPS, DSV4_EPS, HY4_EPS = 1e-20, 1e-6, 1e-5


@dataclass(frozen=True)
class HcOptions(StreamOptions):
    """Options of HC."""

    hc_dynamic: bool = option(True, "add the input-dependent (tanh) part to the HC matrices")
    hc_norm: str = option(
        "layernorm",
        "normalisation in front of the dynamic HC projections: layernorm (HC) or rmsnorm (as "
        "restated by mHC)",
        choices=HC_NORMS,
    )


@dataclass(frozen=True)
class GateOptions(StreamCount):
    """Options of sigmoid gates."""

    mhc_eps: float | None = option(
        None,
        "eps of the norm in front of mHC's and iHC's coefficients and, with dsv4, of the Sinkhorn "
        "steps and gates (default: 1e-20 paper, 1e-6 dsv4, 1e-5 iHC)",
        above=0.0,
    )
    mhc_alpha_init: float = option(
        0.01, "initial value of the gating factors of mHC and iHC", binds=False
    )
    mhc_init: str = option(
        "a6",
        "initial biases of mHC and iHC: a6 (one home stream per sublayer, near-identity H_res) or "
        "symmetric (all zero; streams then never separate unless another parameter breaks the tie)",
        choices=INITIALISATIONS,
        binds=False,
    )


@dataclass(frozen=True)
class ManifoldOptions(GateOptions):
    """Options of constrained mixing."""

    mhc_convention: str = option(
        "paper",
        "mHC formula: paper (x' = H_res x) or dsv4 (DeepSeek-V4 layout, eps and head)",
        choices=CONVENTIONS,
        advice="the same weights are another function under the other convention: give the saved "
        "one",
    )
    mhc_sinkhorn_iterations: int = option(20, "column+row normalisations of H_res", minimum=1)
    mhc_mixing: str = option(
        "sinkhorn",
        "what makes H_res doubly stochastic: sinkhorn (approximately), permutations (a weighted "
        "sum of all of them, mHC-lite) or kronecker (a product of small such sums, KromHC)",
        choices=MIXINGS,
        advice="weights of another mixing do not fit: give the saved one",
    )

    @property
    def resolved_mhc_eps(self) -> float:
        """``mhc_eps`` with the convention's default filled in."""
        if self.mhc_eps is not None:
            return self.mhc_eps
        return DSV4_EPS if self.mhc_convention == "dsv4" else PAPER_EPS


@dataclass(frozen=True)
class MhcOptions(ManifoldOptions, StreamOptions):
    """Options of mHC."""

    @property
    def contraction_default(self) -> str:
        """DeepSeek-V4 learns its head."""
        return "learned" if self.mhc_convention == "dsv4" else "mean"


@dataclass(frozen=True)
class IhcOptions(GateOptions, StreamOptions):
    """Options of iHC."""

    ihc_gate_eps: float = option(1e-6, "what iHC adds to its gates", above=0.0)

    @property
    def contraction_default(self) -> str:
        """Hy4 learns its head."""
        return "learned"

    @property
    def resolved_mhc_eps(self) -> float:
        """``mhc_eps``, or Hy4's."""
        return HY4_EPS if self.mhc_eps is None else self.mhc_eps

    @property
    def resolved_gate_eps(self) -> float:
        """``ihc_gate_eps``."""
        return self.ihc_gate_eps
