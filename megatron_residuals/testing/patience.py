# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""How slow this machine is: what a test's time-outs are multiplied by.

A time-out is there to end what hangs. On a machine with ten times more work than cores everything
takes ten times as long and nothing hangs, so a time-out in seconds alone says little.
"""

from __future__ import annotations

import functools
import time

_PROBE_STEPS = 500_000
_PROBE_S = 0.05
"""What the probe takes at most on a free core of a machine of these years."""
_VALID_S = 60.0


class _Patience:
    """The slowest probe so far: load that has come once may come again."""

    def __init__(self) -> None:
        self.slowest = 1.0
        self.measured_s = float("-inf")

    def measure(self) -> None:
        began = time.monotonic()
        functools.reduce(int.__xor__, range(_PROBE_STEPS))
        self.measured_s = time.monotonic()
        self.slowest = max(self.slowest, (self.measured_s - began) / _PROBE_S)


_patience = _Patience()


def patience(*, now: bool = False) -> float:
    """How many times longer than on a free machine to wait before something is said to hang.

    Never less than 1 and never less than before. Measured once a minute at most, for some
    hundredths of a second, in whatever process asks; forks go on from what their parent has seen.

    Args:
        now: measure in any case, since something is about to be given up.
    """
    if now or time.monotonic() - _patience.measured_s > _VALID_S:
        _patience.measure()
    return _patience.slowest


class Deadline:
    """Some seconds from now; when they are over, as many times more as the machine is slow."""

    def __init__(self, seconds: float) -> None:
        self._began, self._seconds = time.monotonic(), seconds

    def is_over(self) -> bool:
        """Whether what has not happened yet hangs: decided by a probe at the very end."""
        passed = time.monotonic() - self._began
        return passed > self._seconds * patience() and passed > self._seconds * patience(now=True)
