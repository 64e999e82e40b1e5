# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""How long the payloads of a step live: until they were sent, and not beyond the step."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import ToyGPT, build_chunks, setup_parallel, train_step
from megatron_residuals.transport.late import Outbox
from megatron_residuals.transport.wire import Lane

BLOCKS = "block_attnres(block_sublayers=3)"
CHECKED = "block_attnres(block_sublayers=3, check_messages=True)"
INTERLEAVED = dict(pp=2, vpp=2)
pytestmark = pytest.mark.host


def alive_after_steps(toy: ToyGPT) -> list[int]:
    """Payloads that are still alive after a step, forward only and with backward, in turns."""
    sent: list[weakref.ref[torch.Tensor]] = []
    send = Outbox.send

    def watched(outbox: Outbox, lane: Any, message: Any, payload: torch.Tensor) -> None:
        sent.append(weakref.ref(payload))
        send(outbox, lane, message, payload)

    Outbox.send = watched
    setup_parallel(toy)
    chunks = build_chunks(toy, spec_for(BLOCKS))
    alive = []
    for forward_only in (False, True, False):
        with torch.set_grad_enabled(not forward_only):
            train_step(chunks, toy, forward_only=forward_only)
        alive.append(sum(payload() is not None for payload in sent))
    assert len(sent) > 12
    return alive


# Twelve payloads once stayed after every step where groups are larger than the pipeline and the
# schedule overlaps its warm-up: it then waits for none of its sends.
def test_no_payload_with_a_header_outlives_its_step() -> None:
    options = dict(
        microbatch_group_size_per_vp_stage=4,
        overlap_p2p_comm_warmup_flush=True,
        deallocate_pipeline_outputs=True,
    )
    toy = ToyGPT(seq_lengths=(6, 1, 2, 5), config_overrides=options, **INTERLEAVED)
    assert run_ranks(2, alive_after_steps, toy) == [[0, 0, 0]] * 2


def emptied_while_they_are_sent(toy: ToyGPT, residual: str) -> list[bool]:
    """Whether each tensor that left this rank has its elements when the step is over."""
    sent: list[tuple[torch.Tensor, int]] = []
    start = Lane.start

    def watched(lane: Lane, verb: str, parcel: Any, **options: Any) -> Any:
        if verb == "send":
            sent.append((parcel.tensor, parcel.tensor.numel()))
        return start(lane, verb, parcel, **options)

    Lane.start = watched
    setup_parallel(toy)
    train_step(build_chunks(toy, spec_for(residual)), toy)
    return [tensor.numel() == before for tensor, before in sent]


# Hosts up to 0.17 empty an output while it is being sent; all hosts do where it leaves with a
# header. What is sent has to be a tensor of our own, or the neighbour gets what lies there now.
@pytest.mark.parametrize("residual", [BLOCKS, CHECKED], ids=["plain", "with headers"])
def test_an_output_that_the_schedule_empties_is_still_sent_whole(residual: str) -> None:
    toy = ToyGPT(config_overrides=dict(deallocate_pipeline_outputs=True), **INTERLEAVED)
    for whole in run_ranks(2, emptied_while_they_are_sent, toy, residual):
        assert len(whole) > 4 and all(whole)
