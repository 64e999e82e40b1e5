# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Generation with the host's inference wrappers: what arrives between stages, what is refused.

The host allocates one hidden state for what a pipeline rank receives, and its sender sends whatever
the block returned. The rows of a payload are known to the plan. Nothing is held between steps: one
token's state begins with its embedding, and only attention looks back, at the host's own cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_residuals.mcore.route import Route, route_of
from megatron_residuals.pipeline.pattern import KINDS
from megatron_residuals.text import fault_list

SCANS = frozenset((KINDS["M"], KINDS["G"]))


def receives_payloads(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What allocates the buffer of a pipeline rank: as long as the payload that will arrive."""

    @functools.wraps(stock)
    def allocate(wrapper: Any, batch_size: int, seq_len: int) -> Tensor:
        config = get_model_config(wrapper.model)
        if (route := route_of(config)) is not None:
            stage, row = wrapper.pp_group.rank(), (seq_len, batch_size, config.hidden_size)
            seq_len = route.payload_length(stage, row, wrapper.pipeline_communication_dtype)
        return stock(wrapper, batch_size, seq_len)

    return allocate


def checks_contexts(stock: Callable[..., None]) -> Callable[..., None]:
    """The constructor of an inference wrapper, which refuses what a residual cannot generate."""

    @functools.wraps(stock)
    def init(wrapper: Any, *args: Any, **arguments: Any) -> None:
        stock(wrapper, *args, **arguments)
        config = get_model_config(wrapper.model)
        route = route_of(config)
        if route is not None:
            check_context(wrapper.inference_context, config, route)

    return init


def check_context(context: object, config: Any, route: Route) -> None:
    """Refuse to generate where a replaced residual would run wrong or was never tried.

    Args:
        context: the inference context of the host.
        config: the host's ``TransformerConfig``.

    Raises:
        ValueError: listing every fault and what to do.
    """
    faults = []
    if not isinstance(context, StaticInferenceContext):
        faults.append(
            f"{type(context).__name__}: the dynamic engine, and speculative decoding with it, are "
            "not supported; give the wrapper a StaticInferenceContext, and the static engine "
            "legacy=True"
        )
    layout = route.plan.layout
    if scans := {kind for kinds in layout.layer_kinds or () for kind in kinds} & SCANS:
        faults.append(
            f"layers of kind {', '.join(sorted(scans))}: they keep states of their own between "
            "tokens, which is not tried here; attention, MLP and expert layers generate"
        )
    if layout.num_chunks > 1:
        faults.append(
            f"virtual_pipeline_model_parallel_size = {layout.num_chunks}: the host "
            "generates without virtual stages; load the checkpoint into a model without them"
        )
    if getattr(config, "mtp_num_layers", None):
        faults.append(
            f"mtp_num_layers = {config.mtp_num_layers}: multi-token prediction does not take part "
            "in generation; load the checkpoint into a model without it"
        )
    if faults:
        raise ValueError(fault_list("this model cannot generate with a replaced residual", faults))
