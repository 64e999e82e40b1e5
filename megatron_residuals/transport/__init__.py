# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What moves between pipeline ranks, and what a rank keeps meanwhile: torch.distributed, no host.

preflight      ranks meet, and neighbours agree, before the first message
wire           process groups of a pipeline, one for each direction of travel
message_order  which message comes next, known to both ends without telling each other
step           what a rank has under way in one step, made anew for each
late           messages with a header ahead, and the tensors that wait for them
source_cache   sources that a rank keeps for its later stages, and their gradients' way home
"""
