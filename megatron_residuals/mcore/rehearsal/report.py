# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a rehearsal prints: a table of ranks, the worst, hops beside the plan, its limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_residuals.mcore.rehearsal.ledger import PAYLOADS
from megatron_residuals.mcore.rehearsal.one_rank import GRADIENTS, OPTIMIZER, WEIGHTS, Rehearsed
from megatron_residuals.mcore.rehearsal.places import ACTIVATIONS, LOGITS, RESIDUAL_PATH
from megatron_residuals.mcore.rehearsal.ranks import RankKind
from megatron_residuals.text import format_bytes, table

KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, RESIDUAL_PATH, PAYLOADS, LOGITS)
UNSEEN = """\
not seen: what the allocator rounds up or cannot use (fragments), the work space of kernels inside \
an operation, buffers of NCCL communicators, the CUDA context and its libraries. They depend on \
the machine, not on the model: leave a margin of some GiB"""
GIB = 2**30


@dataclass(frozen=True)
class Rehearsal:
    """The rehearsed ranks of a launch.

    Attributes:
        heading: the launch, in one line.
        step: what a step may take on GPUs, in one line; None on the CPU host.
        notes: what was assumed, a line each.
    """

    heading: str
    step: str | None
    kinds: Sequence[RankKind]
    ranks: Sequence[Rehearsed]
    notes: Sequence[str]

    @property
    def worst(self) -> Rehearsed:
        """The rank with most bytes at its peak."""
        return max(self.ranks, key=lambda rank: rank.total_bytes)

    def fits(self, budget_gib: float) -> bool:
        """Whether every rank stays within so many GiB."""
        return self.worst.total_bytes <= budget_gib * GIB


def rendered(rehearsal: Rehearsal, verdict: str | None) -> str:
    """The whole, for people."""
    worst = rehearsal.worst
    lines = [
        rehearsal.heading,
        "",
        *table([_row(*pair) for pair in zip(rehearsal.kinds, rehearsal.ranks, strict=True)]),
        "",
        f"most: rank {worst.rank}, {format_bytes(worst.total_bytes)}: {worst.place}",
        *_hops(rehearsal.ranks),
        *_messages(worst),
        *([rehearsal.step] if rehearsal.step else []),
        *(f"note: {note}" for note in rehearsal.notes),
        UNSEEN,
    ]
    return "\n".join([*lines, "", verdict] if verdict else lines)


def _row(kind: RankKind, rank: Rehearsed) -> dict[str, str]:
    sizes = {name: format_bytes(rank.bytes.get(name, 0)) for name in KINDS}
    peak = format_bytes(rank.total_bytes)
    return {
        "rank": str(rank.rank),
        "has": kind.name,
        "peak": peak,
        **sizes,
        "at the peak": rank.place,
    }


def _hops(ranks: Sequence[Rehearsed]) -> Iterator[str]:
    hops = [hop for rank in ranks for hop in rank.hops]
    if not hops:
        return
    total = sum(hop.bytes for hop in hops)
    wrong = [hop for hop in hops if hop.bytes != hop.planned_bytes]
    yield (
        f"hops: {format_bytes(total)} arrived at these ranks over {len(hops)}, "
        f"{'as planned' if not wrong else 'otherwise than planned'}"
    )
    for hop in wrong:
        yield (
            f"  {hop.direction} into stage {hop.boundary}: {format_bytes(hop.bytes)}, planned "
            f"{format_bytes(hop.planned_bytes)}"
        )


def _messages(rank: Rehearsed) -> Iterator[str]:
    sent = ", ".join(
        f"{count} {name} ({format_bytes(rank.message_bytes[name])})"
        for name, count in sorted(rank.messages.items())
    )
    yield f"messages of rank {rank.rank} in {rank.groups} process groups: {sent or 'none'}"


def fields(rehearsal: Rehearsal, verdict: str | None) -> dict[str, Any]:
    """The whole, for JSON; bytes."""
    return {
        "launch": rehearsal.heading,
        "step": rehearsal.step,
        "worst_rank": rehearsal.worst.rank,
        "peak_bytes": rehearsal.worst.total_bytes,
        "ranks": [
            {"has": kind.name, "peak_bytes": rank.total_bytes, **dataclasses.asdict(rank)}
            for kind, rank in zip(rehearsal.kinds, rehearsal.ranks, strict=True)
        ],
        "notes": list(rehearsal.notes),
        "verdict": verdict,
    }
