# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What the study runs, in which order, and how a learning rate is chosen; `docs/study.md` says why.

A cell is one training run. Cells are paired by seed: with the same seed the batches and the first
weights of everything but the residual connection are the same. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

PLAIN = "plain"
RATES = (2e-3, 4e-3, 8e-3)
TUNING_SEED = 100
"""In no table."""

ITERATIONS, TUNING_ITERATIONS = 1000, 500
TOKENS_PER_ITERATION = 16 * 128
SIZES = {
    "HIDDEN_SIZE": "64",
    "FFN_HIDDEN_SIZE": "168",
    "NUM_ATTENTION_HEADS": "2",
    "SEQ_LENGTH": "128",
    "MICRO_BATCH_SIZE": "16",
    "GLOBAL_BATCH_SIZE": "16",
    "INIT_STD": "0.06",
}
"""As variables of `launch/pretrain.sh`; the rest of the recipe is that script's own."""


@dataclass(frozen=True)
class Arm:
    """One residual connection.

    Attributes:
        title: how tables and pictures name it.
        words: the value of `--residual`, then flags.
        rate_of: name of the arm whose learning rate it takes; its own name if empty.
    """

    title: str
    words: tuple[str, ...]
    rate_of: str = ""


ARMS = {
    PLAIN: Arm("plain residual", ("residual",)),
    "mhc": Arm("mHC", ("mhc",)),
    "block": Arm("Block AttnRes", ("block_attnres", "--residual-block-layers", "2")),
    "hc": Arm("HC", ("hc",)),
    "full": Arm("Full AttnRes", ("attnres",)),
    "ihc": Arm("iHC", ("ihc",)),
    "single": Arm("Single-Pass mHC", ("single_pass_mhc",)),
    "permutations": Arm("mHC-lite", ("mhc", "--residual-mhc-mixing", "permutations")),
    "kronecker": Arm("KromHC", ("mhc", "--residual-mhc-mixing", "kronecker")),
    "heads": Arm(
        "Block MHAR, 4 heads",
        ("block_attnres", "--residual-block-layers", "2", "--residual-attnres-heads", "4"),
    ),
    "additive": Arm(
        "Block Delta AttnRes",
        ("block_attnres", "--residual-block-layers", "2", "--residual-attnres-additive"),
    ),
    "block1": Arm(
        "Block AttnRes, 1 layer", ("block_attnres", "--residual-block-layers", "1"), "block"
    ),
    "block4": Arm(
        "Block AttnRes, 4 layers", ("block_attnres", "--residual-block-layers", "4"), "block"
    ),
    "streams2": Arm("mHC, 2 streams", ("mhc", "--residual-streams", "2"), "mhc"),
    "streams8": Arm("mHC, 8 streams", ("mhc", "--residual-streams", "8"), "mhc"),
}

FIRST = (PLAIN, "mhc", "block")
"""The arms that the question is about: five seeds."""

OTHERS = ("hc", "full", "ihc", "single", "permutations", "kronecker", "heads", "additive")
"""The rest of the main table: three seeds."""

SAME = "plain again"
"""Name of the A/A arm in tables: the plain residual of seeds 11 to 15 beside that of 1 to 5."""

SEEDS, SAME_OFFSET = (1, 2, 3, 4, 5), 10
FEWER = SEEDS[:3]
DEPTHS = (6, 24)
"""Beside the 12 layers of the main table."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    arm: str
    seed: int
    rate: float
    layers: int = 12
    iterations: int = ITERATIONS

    @property
    def name(self) -> str:
        """Of its folder; also what tells two cells apart."""
        return f"{self.arm}-L{self.layers}-{self.iterations}it-lr{self.rate:g}-seed{self.seed}"

    @classmethod
    def parse(cls, name: str) -> Cell:
        """The cell of a name.

        Raises:
            ValueError: no cell is called so.
        """
        found = re.fullmatch(r"(\w+)-L(\d+)-(\d+)it-lr([-.e\d]+)-seed(\d+)", name)
        if found is None or found[1] not in ARMS:
            raise ValueError(
                f"{name!r} names no cell: give ARM-LLAYERS-ITERATIONSit-lrRATE-seedSEED, as "
                f"mhc-L12-1000it-lr0.004-seed1, with an arm of {', '.join(ARMS)}"
            )
        arm, layers, iterations, rate, seed = found.groups()
        return cls(arm, int(seed), float(rate), int(layers), int(iterations))


Losses = dict[str, float]
"""Final validation loss by the name of the cell; infinite where a run failed."""


def tuning(arm: str) -> list[Cell]:
    """The three runs that choose an arm's learning rate."""
    return [Cell(arm, TUNING_SEED, rate, iterations=TUNING_ITERATIONS) for rate in RATES]


def rate_of(arm: str, losses: Losses) -> float | None:
    """The rate with the smallest loss of the three; None until all three are there."""
    cells = tuning(ARMS[arm].rate_of or arm)
    if any(cell.name not in losses for cell in cells):
        return None
    return min(cells, key=lambda cell: losses[cell.name]).rate


def paired(
    arms: tuple[str, ...], seeds: tuple[int, ...], losses: Losses, layers: int = 12
) -> Iterator[Cell]:
    """Learning rates first; then seed by seed, so that a study that is cut off has whole pairs."""
    for arm in arms:
        if rate_of(arm, losses) is None:
            yield from tuning(ARMS[arm].rate_of or arm)
    for seed in seeds:
        for arm in arms:
            rate = rate_of(arm, losses)
            if rate is not None:
                yield Cell(arm, seed, rate, layers)


def quick(losses: Losses) -> Iterator[Cell]:
    """A look: the three arms on one seed for a fifth of the tokens, with the middle rate."""
    for arm in FIRST:
        yield Cell(arm, SEEDS[0], RATES[1], iterations=ITERATIONS // 5)


def main(losses: Losses) -> Iterator[Cell]:
    """The main table and its noise floor."""
    yield from paired(FIRST, SEEDS, losses)
    yield from paired((PLAIN,), tuple(seed + SAME_OFFSET for seed in SEEDS), losses)
    for arm in OTHERS:
        yield from paired((arm,), FEWER, losses)


def depth(losses: Losses) -> Iterator[Cell]:
    """Depth at equal width, then the length of a block, then the number of streams."""
    for layers in DEPTHS:
        yield from paired(FIRST, FEWER, losses, layers)
    yield from paired(("block1", "block4", "streams2", "streams8"), FEWER, losses)


SCOPES: dict[str, Callable[[Losses], Iterator[Cell]]] = {
    "quick": quick,
    "main": main,
    "depth": depth,
}
