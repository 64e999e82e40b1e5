# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""One training step of a launch as one of its ranks, on fake tensors: no GPU, no memory, no peers.

world         a rank of a world in which every other rank says what this one says
values        integers that decide shapes (splits, counts) are computed for real
devices       what a GPU would dispatch, on fake tensors that lie on the CPU
ledger        every storage once: when it came and went, what it is, and where in the step
places        stage, micro-batch, layer and part that are at work
loop          the host's training loop with mock data, up to its first step
one_rank      the user's script from its first line to the end of that step
ranks         which ranks of a launch differ
launch        one rank after another, under one policy after another
report        what it prints
"""
