# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The stages of a hybrid pattern are those that the host selects for every rank and chunk."""

from __future__ import annotations

import contextlib
import importlib
import random
from types import SimpleNamespace

import pytest
import torch

from megatron_residuals.mcore.compat import HYBRID_MODEL, host_version
from megatron_residuals.pipeline.pattern import KINDS, pattern_layout

host = pytest.mark.host
has_stages = pytest.mark.skipif(
    host_version().release < (0, 17), reason="patterns of 0.16 have none"
)


def allocation():
    """The host's module of patterns."""
    name = "models.hybrid.hybrid" if "hybrid" in HYBRID_MODEL else "ssm.mamba_hybrid"
    return importlib.import_module(f"megatron.core.{name}_layer_allocation")


@host
@has_stages
def test_every_stage_is_the_one_that_the_host_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    module = allocation()
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: group.at)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: group.ranks)
    monkeypatch.setattr(module, "log_on_each_pipeline_stage", lambda *_, **__: None)
    monkeypatch.setattr(module, "log_single_rank", lambda *_, **__: None)
    rng = random.Random(5)
    compared = refused = 0
    for _ in range(300):
        ranks, parts = rng.choice([(1, 1), (2, 1), (2, 2), (3, 3), (2, 4), (4, 8), (2, 3)])
        pattern = "|".join("".join(rng.choices("M*-E", k=rng.randint(0, 3))) for _ in range(parts))
        first, last = (rng.choice([None, None, 1, 2]) for _ in range(2))
        layout = None
        with contextlib.suppress(ValueError):
            layout = pattern_layout(pattern, ranks, first=first, last=last)
        for stage in range(max(ranks, parts)):
            rank, chunk = stage % ranks, stage // ranks
            try:
                group = SimpleNamespace(at=rank, ranks=ranks)
                virtual = chunk if parts > ranks else None
                symbols, offset = module.select_pipeline_segment(
                    pattern, group, virtual, first_stage_layers=first, last_stage_layers=last
                )
            except ValueError:
                refused += 1
                continue
            if layout is None:
                continue  # what no training run would get to: no layers, or stages left over
            compared += 1
            assert layout.first_layer(stage) == offset
            kinds = [KINDS[symbol] for symbol in symbols]
            assert [layout.kind(i) for i in layout.sublayers(stage)] == kinds
    assert compared > 200 and refused > 20


def test_patterns_that_the_host_cannot_train_are_refused() -> None:
    for pattern, ranks, said in (
        ("M*Q-", 1, "'Q' is no layer"),
        ("*-|*-|*-", 2, "3 stages do not divide by 2"),
        ("*-|*-", 1, "Use one chunk"),
        ("|", 2, "no stage has a layer"),
        ("*-*", 2, "do not divide"),
    ):
        with pytest.raises(ValueError, match=said.replace("|", r"\|")):
            pattern_layout(pattern, ranks)
    with pytest.raises(ValueError, match=r"beside '\|', which ends stages itself"):
        pattern_layout("*|-", 2, first=1)
