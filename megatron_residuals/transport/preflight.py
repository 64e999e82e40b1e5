# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Before the first message, ranks make sure that all are there and neighbours mean the same thing.

Point-to-point transports check at most the number of bytes: two ranks that disagree about a payload
hang, or compute with a truncated one. So every rank publishes what it is about to send and expect
in the key-value store of the process group, reads what its neighbours published, and compares.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_residuals._version import __version__
from megatron_residuals.config import ResidualConfig
from megatron_residuals.pipeline.plan import TransferPlan
from megatron_residuals.text import fault_list

PATIENCE = timedelta(minutes=10)

Terms = dict[str, Any]


def terms(
    residual: ResidualConfig, plan: TransferPlan, row_shape: Sequence[int] | None, dtype: object
) -> Terms:
    """What both ends of a hop must agree on, as plain JSON values.

    ``row_shape`` is [s, b, h] of one row, or None where lengths vary.
    """
    return {
        "version": __version__,
        "residual": str(residual),
        "plan": plan.digest(),
        "dtype": str(dtype),
        "row_shape": None if row_shape is None else list(row_shape),
        "rows": {str(boundary.stage): boundary.rows for boundary in plan.boundaries},
    }


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


def _appears(store: dist.Store, key: str) -> bool:
    """Whether somebody sets a key in time."""
    try:
        store.wait([key], PATIENCE)
    except RuntimeError:  # each kind of store has its own error for a time that is over
        return bool(store.check([key]))
    return True


def agree(pp_group: dist.ProcessGroup, serial: int, mine: Terms) -> None:
    """Compare terms with both neighbours in the ring of pipeline ranks.

    Every rank publishes before it reads, so a disagreement is an error on both sides.

    Args:
        serial: which model of this process it is; the same number on all ranks.

    Raises:
        RuntimeError: a neighbour has other terms, or none within ten minutes; names the rank, the
            stage and chunk, what is expected and what was got.
    """
    store = _get_default_store()
    members = dist.get_process_group_ranks(pp_group)
    rank, size = pp_group.rank(), pp_group.size()
    key = f"megatron_residuals/{serial}/{{}}"
    store.set(key.format(members[rank]), json.dumps(mine))
    faults = []
    for neighbour in sorted({(rank - 1) % size, (rank + 1) % size}):
        theirs = _read(store, key.format(members[neighbour]), neighbour)
        faults += _differences(rank, neighbour, size, mine, theirs)
    if faults:
        heading = (
            "neighbouring pipeline ranks disagree; nothing was sent. Start all ranks with the same "
            "model, residual and parallel options"
        )
        raise RuntimeError(fault_list(heading, faults))


def _read(store: dist.Store, key: str, neighbour: int) -> Terms:
    if not _appears(store, key):
        raise RuntimeError(
            f"pipeline rank {neighbour} did not tell its transfer plan within {PATIENCE}; is its "
            "P2PCommunicator ours (see the start-up report)?"
        )
    return json.loads(store.get(key))


def _differences(
    rank: int, neighbour: int, num_ranks: int, mine: Terms, theirs: Terms
) -> list[str]:
    faults = [
        f"{name}: pipeline rank {rank} has {mine[name]}, rank {neighbour} has {theirs.get(name)}"
        for name in ("version", "residual", "dtype", "row_shape", "plan")
        if mine[name] != theirs.get(name)
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
