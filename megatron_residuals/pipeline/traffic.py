# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Planes that a residual path moves through memory: the one accounting of it.

A plane is one [s, b, h] tensor of 16 bit, read or written once; a float32 sum of gradients has two.
Counted is what the Triton kernels of this package, and autograd between them, move from the output
of one sublayer to the input of the next one's norm. Norms, attention and MLP are the same with
every mechanism and left out; so is what has a few numbers for each token.

n streams; a part of a block on one stage whose S sublayers read m finished sources:

                                    forward                  backward
    plain residual                  3                        3
    streams, first read             2n + 1                   4n + 2
             write and next read    3n + 2                   5n + 4
             last write             2n + 1                   3n + 2
    in a single pass, first read    n + 1                    4n + 2
             write and next read    2n + 2                   5n + 4
    sources, single read            m + 2                    5m + 6
             write                  3                        -
             phase 1                2m + S                   6m + 2S
             phase 2                3, with a write 5        8, with a write 6
             sum of a source        -                        5

Every gradient of a source is added to its float32 sum (2 read, 2 written), which is zeroed once and
rounded once. A gradient that autograd joins with another costs 3. The first sublayer of a block
has no running sum beside the finished sources: its single read is one of m - 1, its phase 2 and its
write are free. Phase 1 takes whole tiles of readers, each of which goes over the sources anew.
"""

from __future__ import annotations

from typing import NamedTuple

SUM = 2  # planes of a float32 sum of gradients
JOIN = 3  # autograd adds two gradients: two read, one written
READERS_OF_SCORES, READERS = 16, 8  # of one tile in phase 1: of its scores, of the rest


class Planes(NamedTuple):
    """Planes of one micro-batch."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both passes."""
        return self.forward + self.backward

    def plus(self, other: Planes, times: int = 1) -> Planes:
        """These, and ``times`` the others."""
        return Planes(self.forward + times * other.forward, self.backward + times * other.backward)


NOTHING = Planes(0, 0)
PLAIN = Planes(3, 3)
"""One sublayer of the plain residual: the sum forward, the join of its two gradients backward."""
WRITE = Planes(3, 0)
SUM_OF_SOURCE = Planes(0, 2 * SUM + 1)


def plain(num_sublayers: int) -> Planes:
    """Sublayers of the plain residual."""
    return NOTHING.plus(PLAIN, num_sublayers)


def streams(num_streams: int, num_sublayers: int, *, single_pass: bool = False) -> Planes:
    """The sublayers of a stage on n streams, the write of the last one included.

    ``single_pass``: reads that need no coefficients of the streams they read.
    """
    if num_sublayers == 0:
        return NOTHING
    n = num_streams
    again = 0 if single_pass else n  # streams gone over once more in front of a sublayer
    ends = Planes(n + 1 + again, 4 * n + 2).plus(Planes(2 * n + 1, 3 * n + 2))
    return ends.plus(Planes(2 * n + 2 + again, 5 * n + 4), num_sublayers - 1)


def contraction(num_streams: int) -> Planes:
    """n streams become one hidden state, by a weighted sum."""
    return Planes(num_streams + 1, 2 * num_streams + 1)


def single_read(num_summed: int) -> Planes:
    """One reader of sources that have sums, and of a running sum that others use as well."""
    m = num_summed
    return Planes(m + 2, (m + 2) + 2 * SUM * m + 1 + JOIN)


def final_read(num_summed: int) -> Planes:
    """The same at the end, where nobody else uses the running sum."""
    return single_read(num_summed).plus(Planes(0, -JOIN))


def one_pass(num_finished: int, num_readers: int, *, opens: bool = True) -> Planes:
    """A part of a block, every sublayer reading by itself; ``opens``: its first opens the block."""
    others = single_read(num_finished).plus(WRITE)
    first = single_read(num_finished - 1) if opens else others
    return first.plus(others, num_readers - 1)


def two_phases(num_finished: int, num_readers: int, *, opens: bool = True) -> Planes:
    """The same part, the finished sources read once for all of its sublayers."""
    m, merges = num_finished, num_readers - opens
    tiles, tiles_of_scores = -(-num_readers // READERS), -(-num_readers // READERS_OF_SCORES)
    phase_1 = Planes(
        (tiles_of_scores + tiles) * m + num_readers,
        (tiles + 1) * m + 2 * SUM * m + 2 * num_readers,
    )
    if merges == 0:
        return phase_1
    first, later = Planes(3, 5 + JOIN), Planes(5, 6)
    return phase_1.plus(first).plus(later, merges - 1).plus(WRITE)


def fewer_in_two_phases(num_finished: int, num_readers: int) -> bool:
    """Whether a whole block moves fewer planes in two phases."""
    one, two = (way(num_finished, num_readers) for way in (one_pass, two_phases))
    return two.total < one.total
