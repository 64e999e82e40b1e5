# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Mixing matrices that are Kronecker products of weighted sums of permutations: their sizes.

    permutations    one sum over all permutations of n streams (mHC-lite, arXiv 2601.05732)
    kronecker       a product over the prime factors of n (KromHC, arXiv 2601.21579)

Both are doubly stochastic whatever the weights are, which are a softmax for each factor. Depends on
the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

MAX_PERMUTATIONS = 120  # of one factor: those of five streams


def factors(mixing: str, num_streams: int) -> tuple[int, ...]:
    """Sizes of the factors; none where the matrix is no such product."""
    if mixing == "permutations":
        return (num_streams,)
    return (tuple(_primes(num_streams)) or (1,)) if mixing == "kronecker" else ()


def _primes(number: int) -> Iterator[int]:
    prime = 2
    while number > 1:
        while number % prime == 0:
            yield prime
            number //= prime
        prime += 1


def num_logits(mixing: str, num_streams: int) -> int:
    """Logits of one matrix: one for each permutation of a factor, or each entry of the matrix."""
    if mixing == "identity":
        return 0
    if mixing in ("permutations", "kronecker"):
        return sum(map(math.factorial, factors(mixing, num_streams)))
    return num_streams**2


def fault(mixing: str, num_streams: int) -> str | None:
    """Why there is no such mixing of so many streams; None if there is."""
    largest = max(factors(mixing, num_streams), default=1)
    if largest <= 5:
        return None
    return (
        f"mhc_mixing is {mixing!r}, which for {num_streams} streams sums over all permutations of "
        f"{largest}; at most {MAX_PERMUTATIONS} are taken: give streams whose "
        f"{'number is' if mixing == 'permutations' else 'prime factors are'} at most 5, or sinkhorn"
    )
