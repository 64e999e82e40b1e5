# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a report draws of AttnRes."""

from __future__ import annotations

from megatron_residuals.diagnostics.journal import Journal
from megatron_residuals.diagnostics.page import Panel, depth_panel, matrix_panel
from megatron_residuals.diagnostics.panels import draw_summaries


def panels(run: Journal, prefix: str) -> list[Panel]:
    """The weights, what they come to over time, and the queries."""
    return [
        matrix_panel(run, f"{prefix}/weights", "What is read: weights"),
        Panel(
            lambda axes: draw_summaries(
                axes,
                run,
                [f"{prefix}/{name}" for name in ("entropy", "peak", "embedding_mass", "open_mass")],
                "Depth attention over time",
            ),
            needs=f"{prefix}/entropy",
        ),
        depth_panel(
            run,
            None,
            f"{prefix}/entropy",
            "Entropy of the weights (1: all alike)",
            at_least=(0, 1.05),
        ),
        depth_panel(run, None, f"{prefix}/query_norm", "Norm of the queries"),
    ]
