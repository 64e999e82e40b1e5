# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What neighbours agree on before a step: asked when it changes, and only then."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron_residuals.config import ResidualConfig
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.plan import TransferPlan
from megatron_residuals.testing import RankFailure, run_ranks
from megatron_residuals.transport import preflight
from megatron_residuals.transport.message_order import Walk
from megatron_residuals.transport.preflight import Agreement, Payloads

FEW, MORE = Walk(4, 4, False), Walk(6, 6, False)
EVALUATION = Walk(4, 4, True)
PAYLOADS = Payloads("torch.float32", (16, 2, 32), False)


class CountingStore:
    """The store of the process group, and the names of the calls that it gets."""

    def __init__(self) -> None:
        self._store, self.calls = dist.distributed_c10d._get_default_store(), []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._store, name)


def agreement_over(layers: tuple[int, ...] = (2, 2)) -> Agreement:
    plan = TransferPlan.for_streams(StageLayout(2, 1, layers), 3)
    return Agreement(ResidualConfig(mechanism="mhc", streams=3), plan, "model")


def renew(walks: Sequence[tuple[Walk, Walk]]) -> list[list[str]]:
    """Steps whose walks are given for each rank; what each asked of the store."""
    store, agreement, asked = CountingStore(), agreement_over(), []
    preflight._get_default_store = lambda: store
    for by_rank in walks:
        agreement.renew(dist.group.WORLD, by_rank[dist.get_rank()], PAYLOADS)
        asked.append(store.calls)
        store.calls = []
    keys = [f"megatron_residuals/model/{number}/{dist.get_rank()}" for number in range(4)]
    return [*asked, [key for key in keys if store.check([key])]]


def test_the_store_is_asked_when_terms_change_and_never_keeps_more_than_two_of_them() -> None:
    steps = [FEW, FEW, MORE, MORE, EVALUATION]
    for *asked, kept in run_ranks(2, renew, [(walk, walk) for walk in steps]):
        first = ["set", "wait", "get"]
        again = [*first, "delete_key"]
        assert asked == [first, [], again, [], again]
        assert kept == ["megatron_residuals/model/2/" + kept[0][-1]]


def test_ranks_that_change_to_different_terms_both_refuse_the_step() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, renew, [(FEW, FEW), (MORE, EVALUATION)])
    said = str(failure.value)
    assert said.count("nothing of this step was sent") == 2
    assert "num_microbatches: pipeline rank 0 has 6, rank 1 has 4" in said
    assert "forward_only: pipeline rank 1 has True, rank 0 has False" in said


def renew_impatiently(walks: Sequence[tuple[Walk, Walk]]) -> None:
    preflight.PATIENCE = timedelta(seconds=1)
    renew(walks)
    dist.barrier()  # as the rank that goes on waits for a message


def test_a_rank_that_goes_on_as_before_is_named_by_one_that_does_not() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, renew_impatiently, [(FEW, FEW), (FEW, MORE)])
    said = "pipeline rank 0 did not say within 0:00:01 how it begins a step that differs here"
    assert said in str(failure.value)


def other_layers_on_rank_one() -> None:
    layers = (2, 2) if dist.get_rank() == 0 else (1, 3)
    agreement_over(layers).renew(dist.group.WORLD, FEW, PAYLOADS)


def test_layers_that_are_split_otherwise_are_refused_where_every_hop_has_equal_rows() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, other_layers_on_rank_one)
    said = str(failure.value)
    assert "layers_per_stage: pipeline rank 0 has [2, 2], rank 1 has [1, 3]" in said
    assert "hop into stage" not in said
