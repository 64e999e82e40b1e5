# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What replaces the residual connection: one frozen value, one validation, one text form."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast, get_args, get_type_hints

from megatron_residuals.depth import DepthMap
from megatron_residuals.text import fault_list

MECHANISMS = ("residual", "hc", "mhc", "attnres", "block_attnres")
STREAM_MECHANISMS = ("hc", "mhc")
SOURCE_MECHANISMS = ("attnres", "block_attnres")
CONVENTIONS = ("paper", "dsv4")
CONTRACTIONS = ("auto", "mean", "sum", "learned")
INITIALISATIONS = ("a6", "symmetric")
HC_NORMS = ("layernorm", "rmsnorm")
TRANSPORTS = ("full", "delta")
LIBRARIES = ("fla", "liger")  # they read AttnRes sources for one sublayer at a time
KERNELS = ("auto", "torch", "triton", *LIBRARIES)
TWO_PHASE = ("auto", "on", "off")
RECOMPUTE = {  # policy: the mechanisms it is defined for
    "none": MECHANISMS,
    "mix": (*STREAM_MECHANISMS, *SOURCE_MECHANISMS),
    "group": STREAM_MECHANISMS,
    "block": SOURCE_MECHANISMS,
    "block+layer": SOURCE_MECHANISMS,
}

# Around eight blocks recover most of the gain (Attention Residuals, section 5; Kimi-K3 uses eight).
DEFAULT_NUM_BLOCKS = 8


def _option(
    default: object,
    text: str,
    *,
    applies: tuple[str, ...] = MECHANISMS,
    choices: tuple[str, ...] | None = None,
) -> object:
    metadata = {"help": text, "applies": applies, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ResidualConfig:
    """A residual mechanism and its options.

    Every field is also a command-line flag (``--residual-<field>`` with dashes; the mechanism is
    ``--residual``). An option that the mechanism does not read must keep its default.

    Raises:
        ValueError: listing every fault at once: unknown names, values out of range, options given
            to a mechanism that does not read them, both block lengths at the same time.
    """

    mechanism: str = _option(  # type: ignore[assignment]
        "residual", "what replaces the residual connection", choices=MECHANISMS
    )
    streams: int = _option(  # type: ignore[assignment]
        4, "number n of parallel residual streams", applies=STREAM_MECHANISMS
    )
    hc_dynamic: bool = _option(  # type: ignore[assignment]
        True, "add the input-dependent (tanh) part to the HC matrices", applies=("hc",)
    )
    hc_norm: str = _option(  # type: ignore[assignment]
        "layernorm",
        "normalisation in front of the dynamic HC projections: layernorm (HC) or rmsnorm (as "
        "restated by mHC)",
        applies=("hc",),
        choices=HC_NORMS,
    )
    mhc_convention: str = _option(  # type: ignore[assignment]
        "paper",
        "mHC formula: paper (x' = H_res x) or dsv4 (DeepSeek-V4 layout, eps and head)",
        applies=("mhc",),
        choices=CONVENTIONS,
    )
    mhc_sinkhorn_iterations: int = _option(  # type: ignore[assignment]
        20, "column+row normalisations of H_res", applies=("mhc",)
    )
    mhc_eps: float | None = _option(  # type: ignore[assignment]
        None,
        "eps of the mHC norm and, with dsv4, of its Sinkhorn steps and gates "
        "(default: 1e-20 paper, 1e-6 dsv4)",
        applies=("mhc",),
    )
    mhc_alpha_init: float = _option(  # type: ignore[assignment]
        0.01, "initial value of the three mHC gating factors", applies=("mhc",)
    )
    mhc_init: str = _option(  # type: ignore[assignment]
        "a6",
        "initial mHC biases: a6 (one home stream per sublayer, near-identity H_res) or symmetric "
        "(all zero; streams then never separate unless another parameter breaks the tie)",
        applies=("mhc",),
        choices=INITIALISATIONS,
    )
    contraction: str = _option(  # type: ignore[assignment]
        "auto",
        "how the streams become one hidden state at the end (auto: HC sum, mHC paper mean, "
        "mHC dsv4 learned)",
        applies=STREAM_MECHANISMS,
        choices=CONTRACTIONS,
    )
    block_layers: int | None = _option(  # type: ignore[assignment]
        None,
        "AttnRes block length in transformer layers (attention + MLP = 1)",
        applies=("block_attnres",),
    )
    block_sublayers: int | None = _option(  # type: ignore[assignment]
        None,
        "AttnRes block length in sublayers (attention = 1, MLP = 1)",
        applies=("block_attnres",),
    )
    attnres_eps: float = _option(  # type: ignore[assignment]
        1e-6, "eps of the RMS norm of the AttnRes keys", applies=SOURCE_MECHANISMS
    )
    transport: str = _option(  # type: ignore[assignment]
        "delta",
        "what AttnRes sends between pipeline stages: delta (only sources the receiver lacks) or "
        "full (the whole prefix; bitwise equal to no pipeline)",
        choices=TRANSPORTS,
    )
    recompute: str = _option(  # type: ignore[assignment]
        "none",
        "what is worked out again in backward: none, mix (inputs of sublayers), group[:r] (streams "
        "between every r-th sublayer; without r the best for the stage), block (all layers of an "
        "AttnRes block), block+layer (the same, one layer at a time)",
    )
    kernels: str = _option(  # type: ignore[assignment]
        "auto",
        "what computes the mechanism: torch, triton, fla (single AttnRes reads by "
        "flash-linear-attention), liger (the same by liger-kernel, and mHC of the convention dsv4) "
        "or auto (triton for 16- and 32-bit tensors on a GPU where it is installed, else torch)",
        choices=KERNELS,
    )
    two_phase: str = _option(  # type: ignore[assignment]
        "auto",
        "read the finished sources once for all sublayers of a block, then merge each with the "
        "running sum: on, off, or auto (where it moves fewer bytes)",
        applies=SOURCE_MECHANISMS,
        choices=TWO_PHASE,
    )
    check_messages: bool = _option(  # type: ignore[assignment]
        False,
        "send a header ahead of every pipeline message and check that it is the one expected "
        "(for bringing up a new cluster; costs a small message and a wait for each)",
    )
    log_interval: int = _option(  # type: ignore[assignment]
        0,
        "record what the mechanism does in every K-th step and write it to a JSON lines file, and "
        "to Megatron's wandb run and TensorBoard where there are any (0: never)",
    )
    log_image_interval: int | None = _option(  # type: ignore[assignment]
        None,
        "iterations between heatmaps in wandb and TensorBoard (default: every tenth recorded step; "
        "0: none)",
    )

    def __post_init__(self) -> None:
        faults = self._faults()
        if faults:
            raise ValueError(fault_list("invalid residual configuration", faults))

    def _faults(self) -> list[str]:
        faults = []
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), field.metadata["choices"]
            if choices is not None and value not in choices:
                faults.append(f"{field.name} is {value!r}; allowed: {', '.join(choices)}")
                continue
            applies = field.metadata["applies"]
            if self.mechanism in MECHANISMS and self.mechanism not in applies:
                if value != field.default:
                    faults.append(
                        f"{field.name} is {value!r}, but {self.mechanism!r} does not read it "
                        f"(only {', '.join(applies)}); leave it out"
                    )
        faults.extend(self._range_faults())
        return faults

    def _range_faults(self) -> list[str]:
        faults = []
        defaults = {field.name: field.default for field in dataclasses.fields(self)}

        def given(name: str) -> bool:
            return not (getattr(self, name) is None and defaults[name] is None)

        for name in ("streams", "mhc_sinkhorn_iterations", "block_layers", "block_sublayers"):
            value = getattr(self, name)
            if given(name) and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                faults.append(f"{name} is {value!r}; give an integer of at least 1")
        for name, above in (("mhc_eps", 0.0), ("attnres_eps", 0.0), ("mhc_alpha_init", -math.inf)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if given(name) and not (number and above < value < math.inf):
                allowed = "a finite number" + (" above 0" if above == 0 else "")
                faults.append(f"{name} is {value!r}; give {allowed}")
        for name in ("log_interval", "log_image_interval"):
            value = getattr(self, name)
            if given(name) and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                faults.append(f"{name} is {value!r}; give a number of iterations, or 0 for never")
        for name in ("hc_dynamic", "check_messages"):
            if not isinstance(getattr(self, name), bool):
                faults.append(f"{name} is {getattr(self, name)!r}; give True or False")
        faults.extend(self._recompute_faults())
        if self.two_phase == "on" and self.kernels in LIBRARIES:
            faults.append(
                f"two_phase is 'on', but kernels={self.kernels!r} reads for one sublayer at a "
                "time; leave two_phase out, or use kernels='auto'"
            )
        if self.block_layers is not None and self.block_sublayers is not None:
            faults.append(
                f"block_layers={self.block_layers} and block_sublayers={self.block_sublayers} are "
                "both given; a block has one length, give one of the two"
            )
        return faults

    def _recompute_faults(self) -> list[str]:
        policy, _, length = str(self.recompute).partition(":")
        known = f"allowed: {', '.join(RECOMPUTE)}, group:r, group:auto"
        if policy not in RECOMPUTE or (length and policy != "group"):
            return [f"recompute is {self.recompute!r}; {known}"]
        if length and length != "auto" and not (length.isdecimal() and int(length) > 0):
            return [f"recompute is {self.recompute!r}; r is a number of sublayers, at least 1"]
        if self.mechanism in MECHANISMS and self.mechanism not in RECOMPUTE[policy]:
            return [
                f"recompute is {self.recompute!r}, which is for {', '.join(RECOMPUTE[policy])}; "
                f"{self.mechanism!r} allows "
                + ", ".join(name for name, ours in RECOMPUTE.items() if self.mechanism in ours)
            ]
        return []

    @property
    def recompute_policy(self) -> str:
        """``recompute`` without a group length."""
        return self.recompute.partition(":")[0]

    @property
    def group_length(self) -> int | None:
        """r of ``group:r``; None where it is to be chosen for the stage."""
        length = self.recompute.partition(":")[2]
        return int(length) if length.isdecimal() else None

    @property
    def is_streams(self) -> bool:
        """Whether the state is n parallel streams (HC, mHC)."""
        return self.mechanism in STREAM_MECHANISMS

    @property
    def is_sources(self) -> bool:
        """Whether the state is a list of depth sources (Full and Block AttnRes)."""
        return self.mechanism in SOURCE_MECHANISMS

    @property
    def resolved_two_phase(self) -> str:
        """``two_phase``; ``off`` where a library reads, one sublayer at a time."""
        return "off" if self.kernels in LIBRARIES else self.two_phase

    @property
    def resolved_contraction(self) -> str:
        """``mean``, ``sum`` or ``learned``: the contraction with ``auto`` replaced."""
        if self.contraction != "auto":
            return self.contraction
        if self.mechanism == "hc":
            return "sum"
        return "learned" if self.mhc_convention == "dsv4" else "mean"

    @property
    def resolved_mhc_eps(self) -> float:
        """The mHC eps with the convention's default filled in."""
        if self.mhc_eps is not None:
            return self.mhc_eps
        return 1e-6 if self.mhc_convention == "dsv4" else 1e-20

    def depth_map(self, num_layers: int, sublayers_per_layer: int = 2) -> DepthMap | None:
        """Blocks over the depth of a model of ``num_layers`` layers; None without depth sources."""
        if not self.is_sources:
            return None
        if self.mechanism == "attnres":
            sublayers = 1
        elif self.block_sublayers is not None:
            sublayers = self.block_sublayers
        else:
            layers = self.block_layers or -(-num_layers // DEFAULT_NUM_BLOCKS)
            sublayers = layers * sublayers_per_layer
        return DepthMap(num_layers, sublayers, sublayers_per_layer)

    def __str__(self) -> str:
        """Text form: the mechanism and every option that differs from its default."""
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)[1:]
            if getattr(self, field.name) != field.default
        ]
        return f"{self.mechanism}({', '.join(changed)})"

    @classmethod
    def parse(cls, text: str) -> ResidualConfig:
        """Inverse of ``str``: ``"mhc(streams=2)"`` or just ``"mhc"``.

        Raises:
            ValueError: the text is not of that form, names an unknown option, or is invalid.
        """
        try:
            node = ast.parse(text.strip(), mode="eval").body
            if isinstance(node, ast.Name):
                return cls(mechanism=node.id)
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
                raise SyntaxError("not of the form mechanism(option=value, …)")
            names = [word.arg for word in node.keywords]
            if len(set(names)) < len(names) or "mechanism" in names:
                raise SyntaxError("an option is given twice")
            options = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
        except (SyntaxError, ValueError, TypeError) as error:
            raise ValueError(
                f"cannot read residual configuration {text!r} ({error}); write for example "
                "'block_attnres(block_layers=4)'"
            ) from None
        return cls.from_mapping({"mechanism": node.func.id, **options})

    @classmethod
    def from_mapping(cls, options: Mapping[str, object]) -> ResidualConfig:
        """Build from a mapping of field names, refusing names that are not fields.

        Raises:
            ValueError: unknown names, or an invalid configuration.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(
                f"unknown residual option(s) {', '.join(unknown)}; known: {', '.join(known)}"
            )
        return cls(**options)  # type: ignore[arg-type]

    @classmethod
    def option_type(cls, name: str) -> type:
        """The scalar type of a field, without ``None`` (for parsers of command lines)."""
        hint = get_type_hints(cls)[name]
        types: list[type] = [member for member in get_args(hint) if member is not type(None)]
        return types[0] if types else cast(type, hint)
