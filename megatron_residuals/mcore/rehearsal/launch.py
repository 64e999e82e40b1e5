# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A launch that Megatron has read, rehearsed rank by rank and under one policy after another."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from megatron_residuals.config import ResidualConfig
from megatron_residuals.flags import MECHANISM_FLAG
from megatron_residuals.kernels.common.dispatch import triton_fault
from megatron_residuals.mcore.compat import host_version
from megatron_residuals.mcore.rehearsal import te_kernels
from megatron_residuals.mcore.rehearsal.devices import NO_TRITON, OWN_CLASSES, STAND_IN
from megatron_residuals.mcore.rehearsal.one_rank import RehearsalError, Rehearsed, rehearse
from megatron_residuals.mcore.rehearsal.ranks import RankKind, pipeline_rank, ranks_to_rehearse
from megatron_residuals.mcore.rehearsal.report import Rehearsal
from megatron_residuals.mcore.training.forecast import Forecast, forecast
from megatron_residuals.mcore.training.reading import (
    Printed,
    Reading,
    in_the_hosts_words,
    quiet,
    read_launch,
)
from megatron_residuals.planner.simulate.costs import Rates
from megatron_residuals.planner.simulate.hardware import GPUS, NETWORKS
from megatron_residuals.planner.simulate.links import Network
from megatron_residuals.planner.simulate.schemes import PLAIN, Scheme
from megatron_residuals.planner.simulate.simulator import Cluster, simulate
from megatron_residuals.text import format_bytes

RECOMPUTE_FLAG = f"{MECHANISM_FLAG}-recompute"
PATTERN = "hybrid_layer_pattern"
SCAN = """\
Mamba and gated delta net layers run as plain PyTorch here; the kernels of mamba-ssm and \
flash-linear-attention may keep something else"""
GPU, NETWORK = "h100", "ndr"
HEADERS = """\
variable_seq_lengths and --residual-check-messages send headers whose values say what follows, \
and a rehearsal has no values; leave them out: a header of a few numbers is all they add"""
EVEN_LOAD = "experts are evenly loaded; a rank whose experts get more tokens needs more"


@dataclass(frozen=True)
class Launch:
    """A script, its arguments, and what Megatron has made of them.

    Attributes:
        size: ranks of all nodes together.
        on_gpu: whether it dispatches as on a GPU.
    """

    script: Path
    argv: tuple[str, ...]
    size: int
    residual: ResidualConfig | None
    on_gpu: bool
    reading: Reading

    @classmethod
    def read(
        cls,
        script: str,
        argv: Sequence[str],
        size: int,
        residual: ResidualConfig | None,
        *,
        on_gpu: bool,
    ) -> Launch:
        """Let Megatron read it.

        Raises:
            HostRefusalError: what Megatron has against it.
            ValueError: messages are preceded by headers.
        """
        reading = read_launch(Path(script), argv, size, for_gpus=on_gpu)
        if reading.config.variable_seq_lengths or (residual and residual.check_messages):
            raise ValueError(HEADERS)
        return cls(Path(script), tuple(argv), size, residual, on_gpu, reading)

    def kinds(self, ranks: Sequence[int] | None = None) -> list[RankKind]:
        """One rank of each kind, or those that are asked for.

        Raises:
            HostRefusalError: what Megatron has against the split of its layers.
            ValueError: there is no such rank.
        """
        args, printed = self.reading.args, Printed()
        if ranks is None:
            with quiet(printed), in_the_hosts_words(printed):
                return ranks_to_rehearse(args, self.reading.config)
        wrong = [rank for rank in ranks if not 0 <= rank < self.size]
        if wrong:
            raise ValueError(f"--ranks {wrong}: this launch has ranks 0 to {self.size - 1}")
        return [RankKind(rank, pipeline_rank(args, rank), "as asked") for rank in ranks]

    def rehearse(self, kinds: Sequence[RankKind], policy: str | None = None) -> Rehearsal:
        """Some ranks, under the launch's own policy of recomputation or another.

        Raises:
            RehearsalError: a rank has ended in an error; says where.
        """
        argv = (*self.argv, *((RECOMPUTE_FLAG, policy) if policy else ()))
        ranks = [self._in_a_process(argv, kind.rank) for kind in kinds]
        return Rehearsal(self._heading(), self._step(), kinds, ranks, self._notes())

    def _in_a_process(self, argv: Sequence[str], rank: int) -> Rehearsed:
        """What the host sets up is one for a process, so every rank gets one of its own."""
        fork = multiprocessing.get_context("fork")
        here, there = fork.Pipe(duplex=False)
        process = fork.Process(target=self._as_rank, args=(there, argv, rank))
        process.start()
        there.close()
        try:
            found: Rehearsed | RehearsalError = here.recv()
        except EOFError:
            found = RehearsalError(f"rank {rank}: its process has ended without a word")
        process.join()
        if isinstance(found, RehearsalError):
            raise found
        return found

    def _as_rank(self, there: Connection, argv: Sequence[str], rank: int) -> None:
        # Threads of autograd make torch's thread pool anew in a fork, and two at once abort.
        torch.set_num_threads(1)
        printed = Printed()
        found: Rehearsed | RehearsalError
        try:
            with quiet(printed):
                found = rehearse(self.script, argv, rank, self.size, on_gpu=self.on_gpu)
        except RehearsalError as error:
            found = RehearsalError(str(error))
        except SystemExit as error:
            last = (printed.getvalue().strip().splitlines() or [f"status {error.code}"])[-1]
            found = RehearsalError(f"rank {rank}: the script ends itself: {last}")
        there.send(found)

    def _heading(self) -> str:
        args = self.reading.args
        return (
            f"{self.size} ranks, TP {args.tensor_model_parallel_size} x PP "
            f"{args.pipeline_model_parallel_size}, {max(self.reading.microbatches)} micro-batches, "
            f"{self.residual or 'stock residual'}, Megatron-Core {host_version().public}, as on "
            f"{'a GPU' if self.on_gpu else 'the CPU host'}"
        )

    def _step(self) -> str | None:
        """What the simulator says of it, beside the stock model."""
        if not self.on_gpu:
            return None
        try:
            found = forecast(self.reading, self.residual)
        except ValueError as error:
            return f"step: no estimate: {error}"
        return _step_time(found)

    def _notes(self) -> list[str]:
        notes = [] if self.on_gpu else list(self.reading.notes)
        if self.on_gpu and self.reading.args.transformer_impl == "transformer_engine":
            notes.append(OWN_CLASSES if te_kernels.are_here() else STAND_IN)
        if self.on_gpu and triton_fault() is not None:
            notes.append(NO_TRITON)
        if self.on_gpu and set("MG") & set(getattr(self.reading.args, PATTERN, None) or ""):
            notes.append(SCAN)
        if self.reading.config.num_moe_experts:
            notes.append(EVEN_LOAD)
        return notes

    def verdict(self, rehearsal: Rehearsal, budget_gib: float) -> str:
        """Whether the launch fits, or which policy makes it fit at the least extra work."""
        head, worst = f"{budget_gib:g} GiB: ", rehearsal.worst
        if rehearsal.fits(budget_gib):
            return f"{head}it fits, with {format_bytes(worst.total_bytes)} at most"
        fullest = [kind for kind in rehearsal.kinds if kind.rank == worst.rank]
        for policy in self._other_policies():
            if not self.rehearse(fullest, policy).fits(budget_gib):
                continue
            other = self.rehearse(rehearsal.kinds, policy)
            if other.fits(budget_gib):
                return (
                    f"{head}it does not fit; the cheapest recomputation that fits is "
                    f"{RECOMPUTE_FLAG} {policy}, with {format_bytes(other.worst.total_bytes)} on "
                    f"rank {other.worst.rank}"
                )
        return (
            f"{head}it does not fit, nor with another {RECOMPUTE_FLAG}; use more pipeline or "
            "tensor-parallel ranks, or smaller micro-batches"
        )

    def _other_policies(self) -> list[str]:
        """Those of the mechanism besides the launch's own, least extra work first."""
        if self.residual is None or self.reading.config.recompute_granularity == "full":
            return []
        known = ("none", *self.residual.entry.recompute)
        return [policy for policy in known if policy != self.residual.recompute]


def _step_time(found: Forecast) -> str:
    """A step of the launch as the simulator plays it, beside one of the stock model."""
    network = Network(GPUS[GPU].inside, NETWORKS[NETWORK])
    cluster = Cluster(Rates(GPUS[GPU]), network, found.overlap, found.waits_for_sends)
    plain = dataclasses.replace(found.plan, residual=ResidualConfig())
    launch, stock = (
        simulate(scheme, cluster, prediction=prediction).step_s
        for scheme, prediction in (
            (Scheme("launch", found.plan), found.prediction),
            (Scheme(PLAIN, plain), plain.stock_full if found.host_full else plain.stock),
        )
    )
    return (
        f"step: about {launch:.3g} s, {launch / stock:.3f} of the plain residual's, by the sizes; "
        f"{GPU} GPUs over {NETWORK}; for others, and what is in it: megatron-residuals simulate"
    )
