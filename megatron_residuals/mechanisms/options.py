# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options as fields of frozen dataclasses: default, help, range and meaning with the field."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast, get_args, get_type_hints


def option(
    default: object,
    text: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: int | None = None,
    above: float | None = None,
    allowed: str | None = None,
    binds: bool = True,
    advice: str = "give the saved value",
) -> Any:
    """A field of an options class; its annotation is the type of the flag.

    Args:
        default: the value where none is given.
        text: the help of the flag.
        choices: the strings allowed.
        minimum: the smallest integer allowed.
        above: what a number has to exceed.
        allowed: how an integer's range is said, in place of "an integer of at least minimum".
        binds: whether a model's weights depend on it, so that a checkpoint remembers it.
        advice: what to do where a checkpoint says another value.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "text": text,
            "choices": choices,
            "minimum": minimum,
            "above": above,
            "allowed": allowed,
            "binds": binds,
            "advice": advice,
        },
    )


@dataclass(frozen=True)
class Option:
    """An option as parsers, checks and checkpoints need it.

    Attributes:
        kind: the scalar type, without ``None``.
        is_optional: whether ``None`` is a value.
        others: as the keywords of ``option``.
    """

    name: str
    default: object
    kind: type
    is_optional: bool
    text: str
    choices: tuple[str, ...] | None
    minimum: int | None
    above: float | None
    allowed: str | None
    binds: bool
    advice: str

    def fault(self, value: object) -> str | None:
        """What is wrong with a value; None if nothing is."""
        if self.choices is not None:
            if value in self.choices:
                return None
            return f"{self.name} is {value!r}; allowed: {', '.join(self.choices)}"
        wanted = self._wanted(value)
        return None if wanted is None else f"{self.name} is {value!r}; give {wanted}"

    def _wanted(self, value: object) -> str | None:
        if value is None and self.is_optional:
            return None
        if self.kind is bool:
            return None if isinstance(value, bool) else "True or False"
        if self.kind is str:
            return None if isinstance(value, str) else "a string"
        number = isinstance(value, int if self.kind is int else (int, float))
        if self.kind is int:
            lowest = -math.inf if self.minimum is None else self.minimum
            fits = number and not isinstance(value, bool) and cast(int, value) >= lowest
            said = "an integer" + (f" of at least {lowest}" if self.minimum is not None else "")
            return None if fits else self.allowed or said
        least = -math.inf if self.above is None else self.above
        fits = number and not isinstance(value, bool) and least < cast(float, value) < math.inf
        said = "a finite number" + (f" above {least:g}" if self.above is not None else "")
        return None if fits else said


@functools.cache
def options_of(owner: type) -> tuple[Option, ...]:
    """The options that a dataclass declares with ``option``, in order."""
    return tuple(_read(owner))


def _read(owner: type) -> Iterator[Option]:
    hints = get_type_hints(owner)
    for field in dataclasses.fields(owner):
        if "text" not in field.metadata:
            continue
        members = get_args(hints[field.name])
        kinds = [member for member in members if member is not type(None)]
        yield Option(
            field.name,
            field.default,
            kinds[0] if kinds else hints[field.name],
            len(kinds) < len(members),
            **field.metadata,
        )
