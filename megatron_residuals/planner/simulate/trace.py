# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Timelines in Chrome's trace format, for chrome://tracing or Perfetto: one process per scheme."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.messages import BACKWARD, FORWARD
from megatron_residuals.planner.simulate.engine import MessageSpan, PassSpan, Timeline

US = 1e6
ROWS = ("compute", f"sends {FORWARD}", f"sends {BACKWARD}")


def chrome_trace(
    timelines: Iterable[tuple[str, StageLayout, Timeline]],
) -> dict[str, list[dict[str, object]]]:
    """Passes and messages as complete events; times in microseconds.

    Every rank has three rows: what it computes, what it sends forward and what it sends backward.
    """
    events: list[dict[str, object]] = []
    for process, (name, layout, timeline) in enumerate(timelines):
        events += _names(process, name, timeline.num_ranks)
        events += (_pass_event(process, layout, span) for span in timeline.passes)
        events += (_message_event(process, span) for span in timeline.messages)
    return {"traceEvents": events}


def _names(process: int, name: str, num_ranks: int) -> Iterator[dict[str, object]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for rank in range(num_ranks):
        for row, what in enumerate(ROWS):
            thread = {"ph": "M", "pid": process, "tid": len(ROWS) * rank + row}
            yield {**thread, "name": "thread_name", "args": {"name": f"rank {rank} {what}"}}
            yield {**thread, "name": "thread_sort_index", "args": {"sort_index": thread["tid"]}}


def _pass_event(process: int, layout: StageLayout, span: PassSpan) -> dict[str, object]:
    forward, micro_batch, stage = span.step
    return {
        "ph": "X",
        "name": f"{'F' if forward else 'B'}{micro_batch}.{stage}",
        "cat": FORWARD if forward else BACKWARD,
        "pid": process,
        "tid": len(ROWS) * span.rank,
        "ts": span.start_s * US,
        "dur": (span.end_s - span.start_s) * US,
        "args": {"micro_batch": micro_batch, "stage": stage, "chunk": layout.chunk(stage)},
    }


def _message_event(process: int, span: MessageSpan) -> dict[str, object]:
    direction, boundary, micro_batch = span.message
    return {
        "ph": "X",
        "name": f"{micro_batch}: r{span.sender} -> r{span.receiver}",
        "cat": "message",
        "pid": process,
        "tid": len(ROWS) * span.sender + 1 + (direction == BACKWARD),
        "ts": span.start_s * US,
        "dur": (span.end_s - span.start_s) * US,
        "args": {"micro_batch": micro_batch, "boundary": boundary, "bytes": span.bytes},
    }
