# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""No setting of a host's is passed over in silence, also of one that we have not seen yet."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
from megatron.core.transformer.heterogeneous.heterogeneous_config import (
    HeterogeneousTransformerConfig,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_residuals.mcore.training.passed_over import is_known, passed_over

pytestmark = pytest.mark.host


def unknown_fields() -> list[str]:
    """Fields of this host's configurations that no list of ours has."""
    kinds = (MLATransformerConfig, HeterogeneousTransformerConfig)
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    return sorted(name for name in names if not is_known(name))


def test_every_field_of_the_hosts_configuration_has_been_looked_at() -> None:
    # mlp_chunks_for_training is 1 where there are none: it is named when it differs from that. The
    # others are of 0.16, whose wheel reads no launch.
    of_0_16 = {
        "async_tensor_model_parallel_allreduce",
        "moe_extended_tp",
        "moe_use_legacy_grouped_gemm",
    }
    assert set(unknown_fields()) <= {"mlp_chunks_for_training", *of_0_16}


def test_a_field_of_a_newer_host_is_named() -> None:
    fields = [("wide_residual", bool, False), ("narrow_residual", bool, False)]
    kind = dataclasses.make_dataclass("Newer", fields, bases=(TransformerConfig,))
    config = kind(
        num_layers=2, hidden_size=8, num_attention_heads=2, hidden_dropout=0, wide_residual=True
    )
    assert passed_over(argparse.Namespace(), config) == ["wide_residual = True"]
