# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles every Triton kernel for NVIDIA GPUs without having one, and looks at what came out.

    python -m benchmarks.aot --write docs/benchmarks/kernels_aot.md

Registers, shared memory and the widths of loads and stores of each kernel, for sm_80, sm_90 and
sm_100. Ends with an error where a kernel keeps registers in memory.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from benchmarks.aot_cases import AotCase

ARCHITECTURES = (80, 90, 100)
POINTER_ALIGNMENT = [["tt.divisibility", 16]]
LOAD = re.compile(r"\b(?:ld\.global|cp\.async\.c[ag]\.shared\.global)([\w.:]*)[^;\n]*")
STORE = re.compile(r"\bst\.global([\w.:]*)")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


class Compiled(NamedTuple):
    """One kernel on one architecture; widths are bytes of one access of a thread."""

    name: str
    architecture: int
    num_warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    load_widths: Counter[int]
    store_widths: Counter[int]


def compile_case(case: AotCase, architecture: int) -> Compiled:
    """Through Triton's compiler and NVIDIA's assembler."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: case.types.get(name, "constexpr") for name in names}
    aligned = {
        (i,): POINTER_ALIGNMENT for i, name in enumerate(names) if "*" in case.types.get(name, "")
    }
    constants = {name: value for name, value in case.constants.items() if name in names}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", architecture, 32)
    binary = triton.compile(source, target=target, options=dict(case.options))
    registers, stack, local = _usage(binary.asm["cubin"])
    return Compiled(
        case.name,
        architecture,
        case.options["num_warps"],
        registers,
        stack + local,
        binary.metadata.shared,
        Counter(map(_width, LOAD.finditer(binary.asm["ptx"]))),
        Counter(map(_width, STORE.finditer(binary.asm["ptx"]))),
    )


def _usage(cubin: bytes) -> tuple[int, int, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = USAGE.search(text)
    if found is None:
        raise RuntimeError(f"{tool} printed no resource usage:\n{text}")
    registers, stack, local = map(int, found.groups())
    return registers, stack, local


def _width(access: re.Match[str]) -> int:
    if access[0].startswith("cp.async"):
        sizes = re.findall(r"0x[0-9a-f]+|\d+", access[0].rsplit("]", 1)[-1])
        return int(sizes[0], 0) if sizes else 0
    vector = re.search(r"\.v(\d)", access[1])
    bits = re.search(r"\.[bfsu](\d+)", access[1])
    return (int(vector[1]) if vector else 1) * (int(bits[1]) if bits else 32) // 8


def table(found: Iterable[Compiled]) -> Iterator[str]:
    """Rows of Markdown: one kernel in a row, the architectures side by side."""
    yield "| kernel | warps | registers sm_80/90/100 | shared KiB | loads | stores |"
    yield "|---|---|---|---|---|---|"
    by_kernel: dict[tuple[str, int], list[Compiled]] = {}
    for each in found:
        by_kernel.setdefault((each.name, each.num_warps), []).append(each)
    for (name, num_warps), rows in by_kernel.items():
        registers = "/".join(str(row.registers) for row in rows)
        shared = "/".join(f"{row.shared_bytes / 1024:.3g}" for row in rows)
        loads, stores = _widths(rows[-1].load_widths), _widths(rows[-1].store_widths)
        yield f"| {name} | {num_warps} | {registers} | {shared} | {loads} | {stores} |"


def _widths(widths: Counter[int]) -> str:
    return ", ".join(f"{count} x {width} B" for width, count in sorted(widths.items())[::-1])


HEADER = """# Kernels compiled ahead of time

`python -m benchmarks.aot` compiles every Triton kernel, as it is launched, for sm_80, sm_90 and
sm_100, without a GPU. No kernel keeps registers in memory (no spills, no local memory), or the
command fails. Loads and stores are counted in the program text by the bytes that one thread moves
at once (the widest are 16 bytes; those of 4 are coefficients and sums of a token); sm_100's.

Triton {version}.

"""


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="Markdown file for the table")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--arch", type=int, nargs="*", default=ARCHITECTURES)
    args = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "0"
    import triton

    from benchmarks import aot_cases

    found = []
    for case in aot_cases.cases():
        if args.only in case.name:
            for architecture in args.arch:
                found.append(compile_case(case, architecture))
                spilled = found[-1].spilled_bytes
                note = f", {spilled} bytes spilled" if spilled else ""
                registers = found[-1].registers
                print(f"{case.name} sm_{architecture}: {registers} registers{note}", flush=True)
    text = HEADER.format(version=triton.__version__) + "\n".join(table(found)) + "\n"
    if args.write:
        args.write.write_text(text, encoding="utf-8")
    else:
        print(text)
    faults = [each for each in found if each.spilled_bytes]
    for each in faults:
        print(f"{each.name} spills {each.spilled_bytes} bytes on sm_{each.architecture}")
    return len(faults) > 0


if __name__ == "__main__":
    sys.exit(main())
