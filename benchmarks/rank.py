# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""One rank of the transport benchmark: three models in one process, timed, metered and counted.

Imports Megatron-Core: call ``cpu_host.install()`` first.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.meter import OWN_WORK, CopyCounter, Meter
from megatron_residuals.mcore.compat import stage_layout
from megatron_residuals.mcore.route import Route, route_of
from megatron_residuals.mcore.stage_io import _Pack
from megatron_residuals.pipeline.plan import TransferPlan
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import ToyGPT, build_chunks, setup_parallel, train_step

WARM_UP_STEPS = 2
HEAD_SIZE = 32


class Measured(NamedTuple):
    """One model on one rank. Rows are of [s, b, h]; counts are of one training step.

    Attributes:
        wall_s, cpu_s: a step, one entry per round, taken without the meter; cpu_s of all threads.
        own_shares: transport's own work over the step, both in CPU time of the training thread; one
            entry per round, each by kind of work.
        planning_share: planning, which happens once, over one step.
        bytes_received, bytes_planned: forward and backward.
        rows_sent, rows_copied: forward: what was due, and what was written to new memory for it.
        gradient_rows_sent, gradient_rows_joined: backward: due, and joined by autograd for it.
        rows_copied_on_receive: written to new memory between the wire and the first layer.
        most_sends: how often a row of the same content left this rank at most.
        messages: sent by this rank.
    """

    wall_s: list[float]
    cpu_s: list[float]
    own_shares: list[dict[str, float]]
    planning_share: float
    bytes_received: int
    bytes_planned: int
    rows_sent: int
    rows_copied: float
    gradient_rows_sent: int
    gradient_rows_joined: float
    rows_copied_on_receive: float
    most_sends: int
    messages: int


def measure_rank(args: argparse.Namespace, residuals: Mapping[str, str]) -> dict[str, Measured]:
    """Everything that one rank of `run_ranks` measures, by the name of the model."""
    bench = RankBench(args, residuals)
    for _ in range(WARM_UP_STEPS):
        for name in residuals:
            bench.step(name)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in residuals}
    shares: dict[str, list[dict[str, float]]] = {name: [] for name in residuals}
    for turn in range(args.rounds):
        for name in rotated(list(residuals), turn):
            times[name].append(bench.step(name))
    for turn in range(args.rounds):
        for name in rotated(list(residuals), turn):
            shares[name].append(bench.own_shares(name))
    return {
        name: Measured(
            wall_s=[wall for wall, _ in times[name]],
            cpu_s=[cpu for _, cpu in times[name]],
            own_shares=shares[name],
            planning_share=bench.planning_share(name),
            **bench.counts(name),
        )
        for name in residuals
    }


def rotated(names: list[str], turn: int) -> list[str]:
    """The names, each in its turn the first: none always runs right behind the same other."""
    start = turn % len(names)
    return names[start:] + names[:start]


class RankBench:
    """The models of one rank, by name, and what can be measured of a step of one of them."""

    def __init__(self, args: argparse.Namespace, residuals: Mapping[str, str]) -> None:
        self.toy = ToyGPT(
            num_layers=args.layers,
            hidden_size=args.hidden_size,
            num_heads=max(1, args.hidden_size // HEAD_SIZE),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            num_microbatches=args.microbatches,
            pp=args.pp,
            vpp=args.vpp if args.vpp > 1 else None,
        )
        setup_parallel(self.toy)
        self.chunks = {
            name: build_chunks(self.toy, spec_for(residual)) for name, residual in residuals.items()
        }
        self.step_cpu_s: dict[str, float] = {}

    def route(self, name: str) -> Route:
        route = route_of(self.chunks[name][0].config)
        assert route is not None, "every model of the benchmark has a residual spec"
        return route

    def step(self, name: str) -> tuple[float, float]:
        """One training step: wall seconds, and CPU seconds of all threads of this rank."""
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        train_step(self.chunks[name], self.toy)
        return time.perf_counter() - wall, time.process_time() - cpu

    def own_shares(self, name: str) -> dict[str, float]:
        """One metered step: CPU time of each kind of the transport's own work, over the step's."""
        dist.barrier()
        with Meter().install() as meter:
            began = time.thread_time()
            train_step(self.chunks[name], self.toy)
            self.step_cpu_s[name] = time.thread_time() - began
        return {kind: meter.seconds[kind] / self.step_cpu_s[name] for kind in OWN_WORK}

    def planning_share(self, name: str) -> float:
        """The plan made anew with all that is derived from it once, over the last metered step."""
        began = time.thread_time()
        route = self.route(name)
        layout = stage_layout(self.chunks[name][0].config, self.toy.pp)
        plan = TransferPlan.for_residual(route.residual, layout)
        plan.digest()
        for stage in range(plan.layout.num_stages):
            for source in plan.stashes(stage):
                plan.expected_deposits(stage, source)
        return (time.thread_time() - began) / self.step_cpu_s[name]

    def counts(self, name: str) -> dict[str, Any]:
        """One counted step: bytes and rows that moved, were due, and were copied."""
        contents: Counter[bytes] = Counter()
        row_shape = (self.toy.seq_length, self.toy.micro_batch_size, self.toy.hidden_size)
        row_size = row_shape[0] * row_shape[1] * row_shape[2]
        dist.barrier()
        with (
            Meter().install() as meter,
            mock.patch.object(_Pack, "forward", staticmethod(recording(_Pack.forward, contents))),
            CopyCounter(meter, row_shape) as copies,
        ):
            train_step(self.chunks[name], self.toy)
        route = self.route(name)
        ahead = [hop.rows for hop in route.plan.boundaries if hop.sender_rank == route.rank]
        behind = [hop.rows for hop in route.plan.boundaries if hop.receiver_rank == route.rank]
        row_bytes = row_size * self.toy.dtype.itemsize
        return dict(
            bytes_received=sum(route.step.received.values()),
            bytes_planned=sum(ahead + behind) * row_bytes * self.toy.num_microbatches,
            rows_sent=sum(ahead) * self.toy.num_microbatches,
            rows_copied=(copies.written["pack"] + copies.written["bookkeeping"]) / row_size,
            gradient_rows_sent=sum(behind) * self.toy.num_microbatches,
            gradient_rows_joined=copies.joined_by_autograd / row_size,
            rows_copied_on_receive=(copies.written["unpack"] + copies.written["cache"]) / row_size,
            most_sends=max(contents.values(), default=1),
            messages=(len(ahead) + len(behind)) * self.toy.num_microbatches,
        )


def recording(pack: Any, contents: Counter[bytes]) -> Any:
    """`_Pack.forward`, which also counts the rows it is given by their content."""

    def forward(ctx: Any, returns: Any, num_rows: int, *tensors: torch.Tensor) -> torch.Tensor:
        contents.update(row.detach().numpy().tobytes() for row in tensors[:num_rows])
        return pack(ctx, returns, num_rows, *tensors)

    return forward
