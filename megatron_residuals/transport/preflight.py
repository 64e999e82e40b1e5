# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Before the first message, ranks make sure that all are there and neighbours mean the same thing.

Point-to-point transports check at most the number of bytes: two ranks that disagree about a payload
hang, or compute with a truncated one; two that walk through a step in different ways wait for each
other. So every rank publishes what it is about to do in the key-value store of the process group,
reads what its neighbours published, and compares. A step on the terms of the one before asks
nobody, for what changes them (a growing batch, an evaluation) does so on all ranks at once.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from megatron_residuals._version import __version__
from megatron_residuals.config import ResidualConfig
from megatron_residuals.pipeline.plan import TransferPlan
from megatron_residuals.text import fault_list
from megatron_residuals.transport.message_order import Walk

PATIENCE = timedelta(minutes=10)

Terms = dict[str, Any]
"""What both ends of a hop must agree on, as plain JSON values."""


class Payloads(NamedTuple):
    """How the payloads of a step look and travel."""

    dtype: str
    row_shape: tuple[int, ...] | None
    """[s, b, h] of one row, or None where lengths vary."""
    batch_p2p_comm: bool
    """Whether messages are posted in batches, which NCCL sends another way than single ones."""


def meet(number: int) -> None:
    """Wait until every rank of the world is here, about to make process groups together.

    Args:
        number: which meeting of this process it is; the same on all ranks.

    Raises:
        RuntimeError: some ranks did not come within ten minutes; names them.
    """
    store, rank, size = _get_default_store(), dist.get_rank(), dist.get_world_size()
    key = f"megatron_residuals/meeting/{number}"
    store.set(f"{key}/{rank}", "here")
    if store.add(f"{key}/count", 1) == size:
        store.set(f"{key}/all", "here")
    if not _appears(store, f"{key}/all"):
        missing = [other for other in range(size) if not store.check([f"{key}/{other}"])]
        raise RuntimeError(
            f"ranks {missing} did not build a model with a residual within {PATIENCE} of rank "
            f"{rank}, and all must; start every rank with the same spec and options"
        )


def _appears(store: Store, key: str) -> bool:
    """Whether somebody sets a key in time."""
    try:
        store.wait([key], PATIENCE)
    except RuntimeError:  # each kind of store has its own error for a time that is over
        return bool(store.check([key]))
    return True


class Agreement:
    """What a rank of one model and its neighbours in the ring of pipeline ranks agreed on last.

    Args:
        model: a name of the model on this pipeline, the same on all of its ranks.
    """

    def __init__(self, residual: ResidualConfig, plan: TransferPlan, model: str) -> None:
        self._model: Terms = {
            "version": __version__,
            "residual": str(residual),
            "layers_per_stage": list(plan.layout.layers),
            "rows": {str(boundary.stage): boundary.rows for boundary in plan.boundaries},
        }
        self._name, self._number = model, 0
        self._agreed: tuple[Walk, Payloads] | None = None

    def renew(self, pp_group: dist.ProcessGroup, walk: Walk, payloads: Payloads) -> None:
        """Compare terms with both neighbours, where they are not those of the step before.

        Every rank publishes before it reads, so a disagreement is an error on both sides.

        Raises:
            RuntimeError: a neighbour has other terms, or none within ten minutes; names the rank,
                what is expected and what was got.
        """
        if self._agreed == (walk, payloads):
            return
        text = json.dumps({**self._model, **walk._asdict(), **payloads._asdict()})
        store, rank, size = _get_default_store(), pp_group.rank(), pp_group.size()
        members = dist.get_process_group_ranks(pp_group)
        store.set(self._key(members[rank], self._number), text)
        faults = []
        for neighbour in sorted({(rank - 1) % size, (rank + 1) % size}):
            theirs = self._read(store, members[neighbour], neighbour)
            faults += _differences(rank, neighbour, size, json.loads(text), theirs)
        if faults:
            heading = (
                "neighbouring pipeline ranks disagree; nothing of this step was sent. Start all "
                "ranks with the same model, residual, parallel options and batch sizes"
            )
            raise RuntimeError(fault_list(heading, faults))
        if self._number > 0:  # who asks for these terms has read the ones before
            store.delete_key(self._key(members[rank], self._number - 1))
        self._number += 1
        self._agreed = (walk, payloads)

    def _key(self, rank: int, number: int) -> str:
        return f"megatron_residuals/{self._name}/{number}/{rank}"

    def _read(self, store: Store, rank: int, neighbour: int) -> Terms:
        key = self._key(rank, self._number)
        if not _appears(store, key):
            raise RuntimeError(
                f"pipeline rank {neighbour} did not say within {PATIENCE} how it begins a step that"
                " differs here from the one before; either it goes on as before (its number of "
                "micro-batches, say, did not change), or its P2PCommunicator is not ours (see the "
                "start-up report)"
            )
        terms: Terms = json.loads(store.get(key))
        return terms


def _differences(
    rank: int, neighbour: int, num_ranks: int, mine: Terms, theirs: Terms
) -> list[str]:
    faults = [
        f"{name}: pipeline rank {rank} has {mine[name]}, rank {neighbour} has {theirs.get(name)}"
        for name in mine
        if name != "rows" and mine[name] != theirs.get(name)
    ]
    stages = sorted({*mine["rows"], *theirs["rows"]}, key=int)
    for stage in stages:
        expected, got = mine["rows"].get(stage), theirs["rows"].get(stage)
        ends = {int(stage) % num_ranks, (int(stage) - 1) % num_ranks}
        if expected != got and {rank, neighbour} == ends:
            faults.append(
                f"hop into stage {stage} (pipeline rank {int(stage) % num_ranks}, chunk "
                f"{int(stage) // num_ranks}): rank {rank} expects {expected} rows of [s, b, h], "
                f"rank {neighbour} has {got}"
            )
    return faults
