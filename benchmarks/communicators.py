# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Device memory that the communicators of pipeline messages take, between two ranks.

    torchrun --nproc_per_node 2 -m benchmarks.communicators

The host's way is one process group for both directions; ours has four at two ranks. Each is
connected by one number, as ``--residual-connect-early`` does. On a CPU no memory is counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_residuals.pipeline.messages import Message
from megatron_residuals.transport.wire import Lane, Parcel, open_wire


def used_mib(device: torch.device) -> float:
    """What all programs on the device have taken, in MiB; 0 on a CPU."""
    if device.type == "cpu":
        return 0.0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def by_one_group(number: Tensor, batched: bool) -> None:
    """Both directions on one group of their own, as the host's communicator posts them."""
    group, peer = dist.new_group(), 1 - dist.get_rank()
    received = torch.empty_like(number)
    calls = [(dist.isend, number), (dist.irecv, received)]
    if dist.get_rank():
        calls.reverse()
    if batched:
        works = dist.batch_isend_irecv([dist.P2POp(op, x, peer, group) for op, x in calls])
    else:
        works = [op(x, peer, group=group) for op, x in calls]
    for work in works:
        work.wait()


def by_a_wire(number: Tensor, batched: bool) -> None:
    """Every lane of a wire, there and back."""
    wire = open_wire(dist.new_group())

    def parcel(lane: Lane) -> Parcel:
        return Parcel(Message(lane.direction, 1, 0), number.clone())

    for lane in (wire.forward, wire.backward):
        for delivery in lane.exchange(parcel(lane), parcel(lane), batched=batched):
            delivery.wait()


def main() -> None:
    """Print a line for each way of posting messages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    kind = parser.parse_args().device
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    if kind == "cuda":
        torch.cuda.set_device(dist.get_rank())
    device = torch.device(kind)
    number = torch.ones(1, device=device)
    ways: list[tuple[str, Callable[[Tensor, bool], None]]]
    ways = [("one group, as the host", by_one_group), ("a wire", by_a_wire)]
    for batched in (False, True):
        for name, connect in ways:
            before = used_mib(device)
            connect(number, batched)
            taken = used_mib(device) - before
            if dist.get_rank() == 0:
                posted = "in batches" if batched else "singly"
                print(f"{name}, messages {posted}: {taken:.0f} MiB on rank 0", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
