# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The AttnRes kernels as they are launched, described for compilation without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_residuals.kernels.triton import attnres_closed, attnres_closed_backward, attnres_tiles
from megatron_residuals.kernels.triton.attnres_merge import merge_backward_kernel, merge_kernel
from megatron_residuals.kernels.triton.attnres_read import read_backward_kernel, read_kernel
from megatron_residuals.kernels.triton.attnres_table import SLOTS, address_kernel
from megatron_residuals.kernels.triton.attnres_tiles import Tile
from megatron_residuals.kernels.triton.common import POINTER_TYPES, AotCase, power_of_two

SOURCES, READERS = 9, 8
HIDDEN_SIZES = (7168, 2880)
COUNTS = ("size", "num_sources", "tokens", "per_program", "first", "present")
TABLES = ("p_table", "p_sources", "p_values", "p_gradients", "p_totals", "p_fresh")
PLANES = ("p_x", "p_like", "p_gradient", "p_partial", "p_output", "p_total", "p_d_partial")


def _types(kernel: object, plane: str, planes: tuple[str, ...] = PLANES) -> dict[str, str]:
    """Triton's type of every argument that is not a constant, by the names that kernels use."""
    types = {}
    for name in kernel.arg_names:  # type: ignore[attr-defined]
        if name in COUNTS:
            types[name] = "i32"
        elif name == "eps":
            types[name] = "fp32"
        elif name in TABLES and name not in planes:
            types[name] = "*i64"
        elif name.startswith("p_"):
            types[name] = plane if name in planes else "*fp32"
    return types


def _case(
    name: str, kernel: object, plane: str, tile: Tile, constants: dict[str, object]
) -> AotCase:
    sizes = dict(BS=tile.readers, BT=tile.tokens, BC=tile.channels, ALIGNED=True)
    types = _types(kernel, plane)
    return AotCase(name, kernel, types, {**constants, **sizes}, tile.num_warps, tile.num_stages)


def _rows(name: str, kernel: object, plane: str, d: int, **constants: object) -> AotCase:
    chosen = attnres_tiles.merge_rows if kernel is merge_kernel else attnres_tiles.rows
    size, num_warps = chosen(d)
    planes = (*PLANES, "p_values", "p_d_values", "p_d_total") if "merge" in name else PLANES
    return AotCase(
        name, kernel, _types(kernel, plane, planes), dict(D=d, BD=size, **constants), num_warps
    )


def aot_cases() -> Iterator[AotCase]:
    """Every kernel, for hidden sizes that are no powers of two and both kinds of element."""
    table = {f"p_{i}": "*bf16" for i in range(SLOTS)}
    types = {**_types(address_kernel, "*bf16"), **table}
    yield AotCase("attnres addresses", address_kernel, types, {}, 1)
    for d in HIDDEN_SIZES:
        for dtype in (torch.bfloat16, torch.float32):
            plane, width = POINTER_TYPES[dtype], dtype.itemsize
            where = f"{d} {plane[1:]}"
            yield _rows(f"attnres read {where}", read_kernel, plane, d, ALIGNED=True)
            groups = dict(BM=power_of_two(SOURCES, 8), ALIGNED=True)
            yield _rows(f"attnres read backward {where}", read_backward_kernel, plane, d, **groups)
            yield _rows(f"attnres merge {where}", merge_kernel, plane, d, ADD=True)
            name = f"attnres merge backward {where}"
            yield _rows(name, merge_backward_kernel, plane, d, ADD=True)
            for name, kernel, tile, more in (
                ("scores", attnres_closed.scores_kernel, attnres_tiles.score_tile(d), {}),
                ("mix", attnres_closed.mix_kernel, attnres_tiles.mix_tile(d), {}),
                (
                    "products",
                    attnres_closed_backward.products_kernel,
                    attnres_tiles.product_tile(d),
                    {"BM": power_of_two(SOURCES, 8)},
                ),
                (
                    "accumulate",
                    attnres_closed_backward.accumulate_kernel,
                    attnres_tiles.accumulate_tile(d, width, READERS),
                    {},
                ),
            ):
                yield _case(f"attnres {name} {where}", kernel, plane, tile, dict(D=d, **more))


AOT_CASES = list(aot_cases())
