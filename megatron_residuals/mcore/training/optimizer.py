# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parameter groups of the mechanism, through the host's own overrides of groups.

The defaults need no override: the host decays and hands to Muon what is 2-D, and decays nothing
that is 1-D. Hence every gate, bias, query, key gain and static matrix of a mechanism is stored 1-D,
and its projections (``mapping_weight``, ``head_weight``) are 2-D.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamKey,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

from megatron_residuals.flags import LR_MULT, WD_MULT, flag_name
from megatron_residuals.mcore.arguments import global_args

_FLAGS = (LR_MULT, WD_MULT)
_OWNERS = ("self_attention_residual.", "mlp_residual.", "residual_head.")


def is_residual_parameter(name: str) -> bool:
    """Whether a parameter with this name, in any wrapping of the model, is the mechanism's."""
    return any(owner in name for owner in _OWNERS)


def residual_overrides(
    config: OptimizerConfig, *, lr_mult: float = 1.0, wd_mult: float = 1.0
) -> dict[ParamKey, ParamGroupOverride]:
    """Overrides for the mechanism's parameters, to be merged with others'.

    ::

        overrides = {**get_standard_config_overrides(config), **residual_overrides(config, …)}
        get_megatron_optimizer(config, chunks, config_overrides=overrides)

    Args:
        config: the host's optimizer configuration, whose ``lr`` and ``min_lr`` are scaled.
        lr_mult: multiplies the learning rate of all parameters of the mechanism.
        wd_mult: multiplies the weight decay of its projections; 0 switches it off. What is 1-D has
            none in any case.

    Raises:
        ValueError: a multiplier is negative or no finite number, or there is no ``lr``.
    """
    for name, value in (("lr_mult", lr_mult), ("wd_mult", wd_mult)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} is {value!r}; give a finite number of at least 0")
    overrides: dict[ParamKey, ParamGroupOverride] = {}
    if lr_mult != 1.0:
        if config.lr is None:
            raise ValueError(f"lr_mult is {lr_mult!r} and multiplies lr, which is None; give one")
        scaled = ParamGroupOverride(max_lr=config.lr * lr_mult)
        if config.min_lr is not None:
            scaled["min_lr"] = config.min_lr * lr_mult
        overrides[_key("residual", lambda parameter: True)] = scaled
    if wd_mult != 1.0:
        projections = _key("residual_projection", lambda parameter: parameter.dim() > 1)
        overrides[projections] = ParamGroupOverride(wd_mult=wd_mult)
    return overrides


def _key(label: str, takes: Callable[[torch.nn.Parameter], bool]) -> ParamKey:
    def matches(parameter: torch.nn.Parameter, name: str) -> bool:
        return is_residual_parameter(name) and takes(parameter)

    return ParamKey(with_name_predicate=ParamWithNamePredicate(name=label, fn=matches))


def with_residual_overrides(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The training loop's ``get_megatron_optimizer_config`` with what our flags ask for."""

    @functools.wraps(stock)
    def get_megatron_optimizer_config(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        config, overrides = stock(*args, **kwargs)
        ours = residual_overrides(config, **_multipliers())
        if ours:
            if overrides is None:
                overrides = get_standard_config_overrides(config)
            overrides = {**overrides, **ours}
        return config, overrides

    return get_megatron_optimizer_config


def check_multipliers_are_heard(seam_taken: bool) -> None:
    """Refuse flags that nothing would read.

    Raises:
        RuntimeError: a multiplier is given, and the training loop has no place to put it.
    """
    if _multipliers() and not seam_taken:
        flags = " and ".join(flag_name(f"residual_{name}") for name in _multipliers())
        raise RuntimeError(
            f"{flags} cannot take effect: this training loop has no get_megatron_optimizer_config. "
            "Leave the flag out and pass residual_overrides(…) to get_megatron_optimizer"
        )


def _multipliers() -> dict[str, float]:
    args = global_args()
    given = {name.removeprefix("residual_"): getattr(args, name, None) for name in _FLAGS}
    return {name: value for name, value in given.items() if value is not None}
