# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a report draws of HC and mHC."""

from __future__ import annotations

from megatron_residuals.diagnostics.journal import Journal
from megatron_residuals.diagnostics.page import Panel, depth_panel, matrix_panel
from megatron_residuals.diagnostics.panels import draw_composite_over_time, draw_stream_distance


def panels(run: Journal, prefix: str) -> list[Panel]:
    """Gains over depth and time, the distance between streams, and the matrices."""
    around_one = (0.9, 1.1)
    chosen = [
        depth_panel(run, None, f"{prefix}/composite_{direction}", title, at_least=around_one)
        for direction, title in (
            ("forward", "Composite forward gain, input to here"),
            ("backward", "Composite backward gain, output to here"),
        )
    ]
    chosen += [
        Panel(
            lambda axes: draw_composite_over_time(axes, run), needs=f"{prefix}/composite_forward"
        ),
        Panel(lambda axes: draw_stream_distance(axes, run), needs=f"{prefix}/stream_cosine"),
    ]
    return chosen + [
        matrix_panel(run, f"{prefix}/{name}", title)
        for name, title in (
            ("mixing", "How streams are mixed: H_res"),
            ("read_weights", "Which streams are read"),
            ("write_weights", "Which streams are written to"),
            ("stream_rms", "RMS of the streams"),
        )
    ]
