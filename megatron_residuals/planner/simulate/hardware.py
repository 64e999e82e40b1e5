# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Peak rates of GPUs and of what joins their nodes, as their makers state them.

Rates are those of dense bfloat16, of one GPU, links in one direction: half of an NVLink's stated
total. Latencies are assumptions of about the size that point-to-point calls of NCCL show, and
matter for small messages only.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_residuals.planner.simulate.links import Link


@dataclass(frozen=True)
class Gpu:
    """One GPU: dense bfloat16 FLOP/s, bytes/s of its memory, and its link inside a node."""

    flops_per_s: float
    memory_bytes_per_s: float
    inside: Link


NVLINK_LATENCY_S, NETWORK_LATENCY_S = 5e-6, 10e-6

GPUS = {
    # https://www.nvidia.com/en-us/data-center/a100/  312 TFLOP/s, 2.039 TB/s, NVLink 600 GB/s
    "a100": Gpu(312e12, 2.039e12, Link(300e9, NVLINK_LATENCY_S)),
    # https://www.nvidia.com/en-us/data-center/h100/  SXM: 1,979 TFLOP/s sparse, 3.35 TB/s, 900 GB/s
    "h100": Gpu(989.5e12, 3.35e12, Link(450e9, NVLINK_LATENCY_S)),
    # https://www.nvidia.com/en-us/data-center/h200/  SXM: 1,979 TFLOP/s sparse, 4.8 TB/s, 900 GB/s
    "h200": Gpu(989.5e12, 4.8e12, Link(450e9, NVLINK_LATENCY_S)),
    # https://www.nvidia.com/en-us/data-center/hgx/  for 8: 36 PFLOP/s sparse, 14.4 TB/s NVLink;
    # https://www.nvidia.com/en-us/data-center/dgx-b200/  64 TB/s of memory
    "b200": Gpu(2250e12, 8e12, Link(900e9, NVLINK_LATENCY_S)),
    # https://www.nvidia.com/en-us/data-center/gb200-nvl72/  for 72: 360 PFLOP/s sparse, 576 TB/s of
    # memory, 130 TB/s NVLink (1.8 TB/s each)
    "gb200": Gpu(2500e12, 8e12, Link(900e9, NVLINK_LATENCY_S)),
}

NETWORKS = {
    # One port for each GPU.
    # https://www.nvidia.com/en-us/networking/infiniband/qm8700/  HDR: 200 Gb/s
    "hdr": Link(25e9, NETWORK_LATENCY_S),
    # https://www.nvidia.com/en-us/networking/quantum2/  NDR: 400 Gb/s
    "ndr": Link(50e9, NETWORK_LATENCY_S),
    # https://www.nvidia.com/en-us/networking/products/infiniband/quantum-x800/  XDR: 800 Gb/s
    "xdr": Link(100e9, NETWORK_LATENCY_S),
    # https://www.nvidia.com/en-us/networking/spectrumx/  Ethernet (RoCE): 400 Gb/s
    "400gbe": Link(50e9, NETWORK_LATENCY_S),
    # 100 Gb/s, what a general-purpose cloud instance has
    "100gbe": Link(12.5e9, 3 * NETWORK_LATENCY_S),
}
