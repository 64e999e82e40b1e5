# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parity of the fast paths with the specification in float64, at full size.

    python -m benchmarks.parity [--device cuda] [--tokens 32768 --hidden 7168]

The reference goes through the tokens in pieces, since every operation is local to a token; only the
gradients of parameters are summed. An error passes below its bound or, since a chain of sublayers
rounds its planes, below 1.5 times that of the naive version in the same dtype (of parameters, whose
sums cancel, its largest). Two runs must agree in every bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from benchmarks import attnres, mhc
from benchmarks.clock import Candidate

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
NAIVE, OF_NAIVE = "naive eager", 1.5
PIECE = 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Print the errors of every variant; 1 if one is too large."""
    args = parse(argv)
    failed = 0
    for name in args.dtype:
        dtype = getattr(torch, name)
        for mechanism, case in cases(args, dtype):
            exact = case.exact()
            naive: list[float] = []
            for variant, candidate in case.candidates.items():
                errors, same = compare(candidate, exact)
                print(line(mechanism, args, dtype, variant, errors, same, exact), flush=True)
                naive = naive or errors
                allowed = limits(naive, exact, args.tokens, BOUNDS[dtype])
                failed += sum(not e <= most for e, most in zip(errors, allowed, strict=True))
                failed += not same
            del case, exact
    return int(failed > 0)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The sizes of the run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=100)
    return parser.parse_args(argv)


class Case:
    """Candidates on the same leaves, and the specification's result on them in float64."""

    def __init__(
        self,
        candidates: dict[str, Candidate],
        token_leaves: int,
        reference: Callable[[Sequence[Tensor]], Tensor],
    ) -> None:
        names = [NAIVE, *(name for name in candidates if name.startswith("ours"))]
        self.candidates = {name: candidates[name] for name in names}
        self._token_leaves, self._reference = token_leaves, reference

    def exact(self) -> list[Tensor]:
        """The output and the gradient of every leaf, in float64."""
        one = next(iter(self.candidates.values()))
        tokens = one.leaves[0].shape[0]
        outputs: list[Tensor] = []
        local: list[list[Tensor]] = [[] for _ in range(self._token_leaves)]
        summed = [
            torch.zeros_like(p, dtype=torch.float64) for p in one.leaves[self._token_leaves :]
        ]
        for start in range(0, tokens, PIECE):
            piece = slice(start, start + PIECE)
            leaves = [
                (leaf[piece] if index < self._token_leaves else leaf)
                .detach()
                .double()
                .requires_grad_()
                for index, leaf in enumerate(one.leaves)
            ]
            output = self._reference(leaves)
            found = torch.autograd.grad(output, leaves, one.cotangents[0][piece].double())
            outputs.append(output.detach().float())
            for index, gradient in enumerate(found):
                if index < self._token_leaves:
                    local[index].append(gradient.float())
                else:
                    summed[index - self._token_leaves] += gradient
        return [torch.cat(outputs), *[torch.cat(parts) for parts in local], *summed]


def cases(args: argparse.Namespace, dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    """Both mechanisms."""
    common = dict(tokens=args.tokens, hidden=args.hidden, dtype=dtype, device=args.device)
    found = mhc.candidates(streams=4, **common)

    def chain(leaves: Sequence[Tensor]) -> Tensor:
        streams, *weights = leaves
        for index in range(mhc.CHAIN):
            mapping, bias, *alphas = weights[5 * index : 5 * index + 5]
            streams = mhc._naive(streams, mapping, bias, *alphas)
        return streams

    yield "mhc", Case(found, 1, chain)
    sources = 8
    found = attnres.candidates(sources=sources, sublayers=4, **common)

    def block(leaves: Sequence[Tensor]) -> Tensor:
        *closed, partial = leaves[:sources]
        weights = leaves[sources:]
        pairs = list(zip(weights[::2], weights[1::2], strict=True))
        return attnres.reference(closed, partial, pairs)

    yield "attnres", Case(found, sources, block)


def compare(candidate: Candidate, exact: Sequence[Tensor]) -> tuple[list[float], bool]:
    """Relative errors of the output and all gradients, and whether two runs agree in every bit."""
    first, second = run(candidate), run(candidate)
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return [_relative(got, want) for got, want in zip(first, exact, strict=True)], same


def limits(
    naive: Sequence[float], exact: Sequence[Tensor], tokens: int, bound: float
) -> list[float]:
    """The largest error that each result may have."""
    local = [want.shape[:1] == (tokens,) for want in exact]
    worst = max(error for error, is_local in zip(naive, local, strict=True) if not is_local)
    pairs = zip(naive, local, strict=True)
    return [max(bound, OF_NAIVE * (error if is_local else worst)) for error, is_local in pairs]


def line(
    mechanism: str,
    args: argparse.Namespace,
    dtype: torch.dtype,
    variant: str,
    errors: Sequence[float],
    same: bool,
    exact: Sequence[Tensor],
) -> str:
    """The largest errors of one variant."""
    local = [e for e, want in zip(errors, exact, strict=True) if want.shape[:1] == (args.tokens,)]
    summed = [e for e, want in zip(errors, exact, strict=True) if want.shape[:1] != (args.tokens,)]
    return (
        f"{mechanism:8} {str(dtype)[6:]:9} {args.tokens} x {args.hidden}  {variant:24}"
        f" output {errors[0]:.1e}  token gradients {max(local[1:]):.1e}"
        f"  parameter gradients {max(summed):.1e}  repeats {'bitwise' if same else 'DIFFER'}"
    )


def run(candidate: Candidate) -> list[Tensor]:
    """The output and the gradients of all leaves."""
    outputs = candidate.forward()
    gradients = torch.autograd.grad(
        list(outputs), list(candidate.leaves), list(candidate.cotangents)
    )
    return [*[output.detach() for output in outputs], *gradients]


def _relative(got: Tensor, want: Tensor) -> float:
    difference = (got.double() - want.double()).norm()
    return float(difference / want.double().norm().clamp_min(1e-30))


if __name__ == "__main__":
    sys.exit(main())
