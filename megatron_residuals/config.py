# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What replaces the residual connection: one frozen value, one validation, one text form."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_residuals.depth import DepthMap
from megatron_residuals.mechanisms import (
    LIBRARIES,
    TABLE,
    Mechanism,
    NoOptions,
    Option,
    Setting,
    mechanism_named,
    option,
    options_of,
)
from megatron_residuals.text import fault_list

MECHANISMS = tuple(entry.name for entry in TABLE)
TRANSPORTS = ("full", "delta")
KERNELS = ("auto", "torch", "triton", *LIBRARIES)
RECOMPUTE = {  # policy: the mechanisms it is defined for
    "none": MECHANISMS,
    **{
        policy: tuple(entry.name for entry in TABLE if policy in entry.recompute)
        for policy in ("mix", "group", "block", "block+layer")
    },
}

_TEXT = re.compile(r"\s*(?P<name>(?:[\w.]+:)?[^\W\d]\w*)\s*(?P<call>\(.*)?$", re.DOTALL)


@dataclass(frozen=True, init=False)
class ResidualConfig:
    """A residual mechanism and its options: ``ResidualConfig("mhc", streams=2)``.

    Every option is also a command-line flag (``--residual-<option>`` with dashes; the mechanism is
    ``--residual``). The mechanism's own are declared in its entry (``mechanisms``) and read as
    attributes like the others; one that the mechanism does not read must keep its default.

    Args:
        mechanism: a built-in name, or ``module:NAME`` of your own.
        options: a mechanism's own options as one value, as ``dataclasses.replace`` hands over;
            options given by name overrule it.
        given: options by name.

    Raises:
        ValueError: listing every fault at once: unknown names, values out of range, options given
            to a mechanism that does not read them, both block lengths at the same time.
    """

    mechanism: str
    options: Any
    transport: str = option(
        "delta",
        "what AttnRes sends between pipeline stages: delta (only sources the receiver lacks) or "
        "full (the whole prefix; bitwise equal to no pipeline)",
        choices=TRANSPORTS,
        binds=False,
    )
    recompute: str = option(
        "none",
        "what is worked out again in backward: none, mix (inputs of sublayers), group[:r] (streams "
        "between every r-th sublayer; without r the best for the stage), block (all layers of an "
        "AttnRes block), block+layer (the same, one layer at a time)",
        binds=False,
    )
    kernels: str = option(
        "auto",
        "what computes the mechanism: torch, triton, fla (single AttnRes reads by "
        "flash-linear-attention), liger (the same by liger-kernel, and mHC of the convention dsv4) "
        "or auto (triton for 16- and 32-bit tensors on a GPU where it is installed, else torch)",
        choices=KERNELS,
        binds=False,
    )
    check_messages: bool = option(
        False,
        "send a header ahead of every pipeline message and check that it is the one expected "
        "(for bringing up a new cluster; costs a small message and a wait for each)",
        binds=False,
    )
    connect_early: bool = option(
        False,
        "have neighbouring pipeline ranks exchange a number when the model is built: NCCL then "
        "allocates what it needs for messages before the first step, not in the midst of it",
        binds=False,
    )
    log_interval: int = option(
        0,
        "record what the mechanism does in every K-th step and write it to a JSON lines file, and "
        "to Megatron's wandb run and TensorBoard where there are any (0: never)",
        minimum=0,
        allowed="a number of iterations, or 0 for never",
        binds=False,
    )
    log_image_interval: int | None = option(
        None,
        "iterations between heatmaps in wandb and TensorBoard (default: every tenth recorded step; "
        "0: none)",
        minimum=0,
        allowed="a number of iterations, or 0 for never",
        binds=False,
    )

    def __init__(
        self, mechanism: str = "residual", *, options: object = None, **given: object
    ) -> None:
        faults: list[str] = []
        entry: Mechanism | None = None
        try:
            entry = mechanism_named(mechanism)
        except ValueError as error:
            faults.append(str(error))
        given = {**(vars(options) if options is not None else {}), **given}
        known = options_for(entry)
        unknown = sorted(given.keys() - {each.name for each in known} - {"mechanism"})
        if unknown:
            names = ", ".join(["mechanism", *(each.name for each in known)])
            raise ValueError(f"unknown residual option(s) {', '.join(unknown)}; known: {names}")
        own = _own_names(entry)
        values = {each: given.get(each.name, each.default) for each in known}
        faults.extend(fault for each in known if (fault := _misread(each, values[each], entry)))
        ranges = [each.fault(values[each]) for each in known if each.choices is None]
        faults.extend(fault for fault in ranges if fault)
        kind = NoOptions if entry is None else entry.options
        chosen = kind(**{name: value for name, value in given.items() if name in own})
        object.__setattr__(self, "mechanism", mechanism)
        object.__setattr__(self, "options", chosen)
        for each in COMMON:
            object.__setattr__(self, each.name, given.get(each.name, each.default))
        faults.extend(self._recompute_faults(entry))
        if entry is not None:
            faults.extend(entry.faults(self))
        if faults:
            raise ValueError(fault_list("invalid residual configuration", faults))

    def __getattr__(self, name: str) -> Any:
        """An option of the mechanism."""
        if name.startswith("__") or name == "options":  # a value that is being copied has none yet
            raise AttributeError(name)
        try:
            return getattr(self.options, name)
        except AttributeError:
            raise AttributeError(f"{self.mechanism!r} has no option {name!r}") from None

    def _recompute_faults(self, entry: Mechanism | None) -> list[str]:
        if not isinstance(self.recompute, str):  # said already
            return []
        policy, _, length = self.recompute.partition(":")
        known = f"allowed: {', '.join(RECOMPUTE)}, group:r, group:auto"
        if policy not in RECOMPUTE or (length and policy != "group"):
            return [f"recompute is {self.recompute!r}; {known}"]
        if length and length != "auto" and not (length.isdecimal() and int(length) > 0):
            return [f"recompute is {self.recompute!r}; r is a number of sublayers, at least 1"]
        if entry is None or policy in ("none", *entry.recompute):
            return []
        return [
            f"recompute is {self.recompute!r}, which is for {', '.join(RECOMPUTE[policy])}; "
            f"{self.mechanism!r} allows {', '.join(('none', *entry.recompute))}"
        ]

    @property
    def entry(self) -> Mechanism:
        """What the mechanism says about itself."""
        return mechanism_named(self.mechanism)

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
    def rows(self) -> int:
        """Rows [s, b, h] of the state between two sublayers, where it has no depth sources."""
        return self.entry.rows(self)

    def depth_map(self, num_layers: int, sublayers_per_layer: int = 2) -> DepthMap | None:
        """Blocks over the depth of a model of ``num_layers`` layers; None without depth sources."""
        return self.entry.depth_map(self, num_layers, sublayers_per_layer)

    def items(self) -> Iterator[tuple[str, Setting | None]]:
        """Every option the mechanism reads, and its value."""
        for each in options_for(self.entry, only_own=True):
            yield each.name, getattr(self, each.name)

    def as_mapping(self) -> dict[str, Setting | None]:
        """The mechanism and all its options: what ``from_mapping`` takes."""
        return {"mechanism": self.mechanism, **dict(self.items())}

    def binding_options(self) -> dict[str, Setting]:
        """The mechanism's options that a model's weights depend on."""
        own = options_of(self.entry.options)
        return {each.name: getattr(self, each.name) for each in own if each.binds}

    def __str__(self) -> str:
        """Text form: the mechanism and every option that differs from its default."""
        changed = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in options_for(self.entry, only_own=True)
            if getattr(self, each.name) != each.default
        ]
        return f"{self.mechanism}({', '.join(changed)})"

    @classmethod
    def parse(cls, text: str) -> ResidualConfig:
        """Inverse of ``str``: ``"mhc(streams=2)"`` or just ``"mhc"``.

        Raises:
            ValueError: the text is not of that form, names an unknown option, or is invalid.
        """
        found = _TEXT.match(text)
        try:
            if found is None:
                raise SyntaxError("not of the form mechanism(option=value, …)")
            node = ast.parse(f"mechanism{found['call'] or '()'}", mode="eval").body
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
        return cls.from_mapping({"mechanism": found["name"], **options})

    @classmethod
    def from_mapping(cls, options: Mapping[str, object]) -> ResidualConfig:
        """Build from a mapping of option names, refusing names that are not options.

        Raises:
            ValueError: unknown names, or an invalid configuration.
        """
        return cls(**options)  # type: ignore[arg-type]


COMMON = options_of(ResidualConfig)
"""The options that every mechanism reads."""


def options_for(entry: Mechanism | None = None, *, only_own: bool = False) -> tuple[Option, ...]:
    """Every option there is, the mechanism's and those of the built-in ones, each name once.

    ``only_own`` leaves out what the mechanism does not read.
    """
    entries = (entry,) if only_own else (entry, *TABLE)
    own = [each for one in entries if one is not None for each in options_of(one.options)]
    return tuple({each.name: each for each in (*own, *COMMON)}.values())


def readers_of(name: str, *entries: Mechanism) -> tuple[str, ...]:
    """The mechanisms that read an option, of the built-in ones and those given."""
    if name in {each.name for each in COMMON}:
        return MECHANISMS
    everyone = dict.fromkeys((*TABLE, *entries))
    return tuple(entry.name for entry in everyone if name in _own_names(entry))


def _own_names(entry: Mechanism | None) -> set[str]:
    return set() if entry is None else {each.name for each in options_of(entry.options)}


def _misread(each: Option, value: object, entry: Mechanism | None) -> str | None:
    """What is wrong with a word that is no choice, or with an option that nobody reads."""
    if each.choices is not None and (fault := each.fault(value)):
        return fault
    if entry is None or each in COMMON or each.name in _own_names(entry) or value == each.default:
        return None
    return (
        f"{each.name} is {value!r}, but {entry.name!r} does not read it "
        f"(only {', '.join(readers_of(each.name))}); leave it out"
    )
