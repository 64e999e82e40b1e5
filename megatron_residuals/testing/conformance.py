# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a mechanism has to keep to, tried on small models: for its author, before a long run.

Each check is a function of a configuration that returns what it saw, or raises what is wrong.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mechanisms import Mechanism, options_of
from megatron_residuals.modules import (
    ResidualState,
    RowState,
    SourceState,
    build_head,
    build_sublayer_residual,
    open_state,
)
from megatron_residuals.modules.packing import slots_of
from megatron_residuals.pipeline.payload import payload_length
from megatron_residuals.recompute.steps import MixStep, Step, plain_step
from megatron_residuals.settings import settings_of

LAYERS, HIDDEN, TOKENS, BATCH = 3, 8, 4, 2
CLOSE = 1e-10  # float64
SAME_START = 1e-4


class Outcome(NamedTuple):
    """One check: ok, note (it holds, but look) or fault, and what was seen."""

    verdict: str
    check: str
    seen: str


class Chain(nn.Module):
    """Sublayers of a few numbers, float64, joined by the mechanism; F_i(x) = tanh(W_i norm(x))."""

    def __init__(self, config: ResidualConfig, *, noise: float = 0.0) -> None:
        super().__init__()
        self.config, depth = config, config.depth_map(LAYERS)
        generator = torch.Generator().manual_seed(1)
        self.num_sublayers = depth.num_sublayers if depth is not None else 2 * LAYERS
        shape = (self.num_sublayers, HIDDEN, HIDDEN)
        weights = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.weights = nn.Parameter(weights / HIDDEN**0.5)
        self.residuals = nn.ModuleList(
            build_sublayer_residual(config, depth, hidden_size=HIDDEN, sublayer=i)
            for i in range(self.num_sublayers)
        ).double()
        self.head = build_head(config, depth, hidden_size=HIDDEN).double()
        with torch.no_grad():
            for parameter in (*self.residuals.parameters(), *self.head.parameters()):
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise * drawn)

    def sublayer(self, i: int, x: Tensor) -> Tensor:
        """The bare sublayer."""
        norm = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-30)
        return torch.tanh(norm @ self.weights[i])

    def run(self, embedding: Tensor, step: Step = plain_step) -> Iterator[ResidualState]:
        """The state in front of every sublayer and of the head."""
        state = open_state(self.config, embedding)
        yield state
        for i, residual in enumerate(self.residuals):
            readers: Any = [residual]
            state = readers[0].begin(readers, state)
            state = step(readers[0], state, lambda x, i=i: self.sublayer(i, x))  # type: ignore[misc]
            yield state

    def forward(self, embedding: Tensor, step: Step = plain_step) -> Tensor:
        """The hidden state in front of the final norm, normalised."""
        *_, last = self.run(embedding, step)
        hidden: Tensor = self.head(last)
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-30)


def embedding() -> Tensor:
    """[s, b, d] float64."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(TOKENS, BATCH, HIDDEN, generator=generator, dtype=torch.float64)


def _gradients(chain: Chain, step: Step = plain_step) -> list[Tensor]:
    x = embedding().requires_grad_()
    out = chain(x, step)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).double()
    wanted = [x, *chain.parameters()]
    found = torch.autograd.grad(out, wanted, cotangent, allow_unused=True)
    pairs = zip(found, wanted, strict=True)
    return [torch.zeros_like(w) if g is None else g for g, w in pairs]


def check_entry(config: ResidualConfig) -> Outcome:
    """Names that would hide something of the configuration, and the text form."""
    entry = config.entry
    taken = [o.name for o in options_of(entry.options) if hasattr(ResidualConfig, o.name)]
    if taken:
        raise AssertionError(
            f"options {', '.join(taken)} have the name of something that "
            "ResidualConfig has already; call them otherwise"
        )
    if ResidualConfig.parse(str(config)) != config:
        raise AssertionError(f"{config} does not read back as itself; options must be literals")
    settings = settings_of(config, LAYERS)
    return Outcome("ok", "options", f"{config}; a checkpoint remembers {settings}")


def check_parameters(config: ResidualConfig) -> Outcome:
    """Initial values that depend on nothing but the configuration; every parameter is used."""
    first, second = Chain(config), Chain(config)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        if not torch.equal(a, b):
            raise AssertionError(
                f"{name} has other initial values each time; set them in "
                "reset_parameters, and without random numbers"
            )
        if not torch.isfinite(a).all():
            raise AssertionError(f"{name} is not initialised; set it in reset_parameters")
    x = embedding()
    out = Chain(config, noise=0.1)
    grads = torch.autograd.grad(out(x).square().sum(), list(out.parameters()), allow_unused=True)
    names = [name for name, _ in out.named_parameters()]
    unused = [name for name, grad in zip(names, grads, strict=True) if grad is None]
    if unused:
        raise AssertionError(
            f"{', '.join(unused)} take no part in a step; data parallelism that "
            "overlaps the reduction of gradients would wait for them"
        )
    shapes = [
        {name: tuple(parameter.shape) for name, parameter in residual.named_parameters()}
        for residual in out.residuals
    ]
    if any(of_one != shapes[0] for of_one in shapes):
        raise AssertionError(
            "parameters have other names or shapes in some sublayers; checkpoints stack them over "
            "the layers: give all the largest shape, and use the front of it"
        )
    added = sum(p.numel() for name, p in out.named_parameters() if name != "weights")
    return Outcome("ok", "parameters", f"{added} in {out.num_sublayers} sublayers of {HIDDEN}")


def check_start(config: ResidualConfig) -> Outcome:
    """How far the model at initialisation is from the plain one."""
    plain, ours = Chain(ResidualConfig("residual")), Chain(config)
    difference = (plain(embedding()) - ours(embedding())).abs().max().item()
    if difference <= SAME_START:
        return Outcome("ok", "start", f"is the plain model (largest difference {difference:.1e})")
    return Outcome(
        "note",
        "start",
        f"is not the plain model (largest difference {difference:.1e}): --finetune from a plain "
        "checkpoint starts at another loss",
    )


def check_gradients(config: ResidualConfig) -> Outcome:
    """Backward against differences in float64, away from the initial values."""
    chain = Chain(config, noise=0.1)
    found, names = _gradients(chain), ["embedding", *(name for name, _ in chain.named_parameters())]
    for name, gradient, tensor in zip(names, found, [None, *chain.parameters()], strict=True):
        direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(4)).double()
        measured = _difference(chain, tensor, direction)
        expected = (gradient * direction).sum().item()
        if not math.isclose(measured, expected, rel_tol=1e-5, abs_tol=1e-7):
            raise AssertionError(
                f"the gradient of {name} along a random direction is {expected:.8g}"
                f", differences say {measured:.8g}"
            )
    return Outcome("ok", "gradients", f"equal differences in float64 for {len(names)} tensors")


def _difference(chain: Chain, tensor: Tensor | None, direction: Tensor, h: float = 1e-6) -> float:
    cotangent = torch.randn(
        TOKENS, BATCH, HIDDEN, generator=torch.Generator().manual_seed(3)
    ).double()
    values = []
    with torch.no_grad():
        for sign in (1, -1):
            moved, x = copy.deepcopy(chain), embedding()
            if tensor is None:
                x = x + sign * h * direction
            else:
                index = next(i for i, p in enumerate(chain.parameters()) if p is tensor)
                list(moved.parameters())[index].add_(sign * h * direction)
            values.append((moved(x) * cotangent).sum().item())
    return float(values[0] - values[1]) / (2 * h)


def check_state(config: ResidualConfig) -> Outcome:
    """A state survives the wire: what is packed unpacks to the same."""
    chain, rows = Chain(config, noise=0.1), config.rows
    with torch.no_grad():
        states = list(chain.run(embedding()))
    if isinstance(states[0], SourceState):
        return Outcome("ok", "state", "depth sources: what the receiver lacks is sent, each once")
    for state in states:
        assert not isinstance(state, SourceState)
        _survives(config, state, rows)
    return Outcome("ok", "state", f"{rows} row(s) of [s, b, h] on every hop")


def _survives(config: ResidualConfig, state: RowState, rows: int) -> None:
    payload, numbers = state.pack(), config.entry.numbers(config)
    length = payload_length(rows, numbers, TOKENS, HIDDEN, slots_of(payload.dtype))
    if payload.shape != (length, BATCH, HIDDEN):
        raise AssertionError(
            f"pack() gives {list(payload.shape)}; rows() says {rows} and numbers() {numbers}, "
            f"which is [{length}, {BATCH}, {HIDDEN}]"
        )
    again = config.entry.unpack(config, payload.clone())
    if not torch.equal(again.pack(), payload):
        raise AssertionError("unpack(pack(state)) is another state")


def check_replay(config: ResidualConfig) -> Outcome:
    """Reading again gives the same bits, and so do gradients with inputs given up."""
    if "mix" not in config.entry.recompute:
        return Outcome("note", "recompute", "mix is not among its policies")
    kept, replayed = (
        _gradients(Chain(config, noise=0.1)),
        _gradients(Chain(config, noise=0.1), MixStep()),
    )
    if not all(map(torch.equal, kept, replayed)):
        raise AssertionError(
            "gradients under --residual-recompute mix differ: reread() does not "
            "give what read() gave"
        )
    policies = ", ".join(("none", *config.entry.recompute))
    return Outcome("ok", "recompute", f"policies {policies}; reading again is exact")


def check_precision(config: ResidualConfig) -> Outcome:
    """Parameters stay float32 in a 16-bit model."""
    residuals = Chain(config).float().bfloat16().residuals
    lowered = [name for name, p in residuals.named_parameters() if p.dtype == torch.bfloat16]
    if lowered:
        raise AssertionError(
            f"{', '.join(lowered)} become bfloat16 with the model; derive their "
            "modules from Float32Module, as SublayerResidual does"
        )
    state = open_state(config, embedding().bfloat16())
    first: Any = residuals[0]
    x, _ = first.read(state)
    if x.dtype != torch.bfloat16:
        raise AssertionError(f"a sublayer of a bfloat16 model reads {x.dtype}; cast in read()")
    return Outcome("ok", "16 bit", "parameters stay float32, activations bfloat16")


def check_pipeline(config: ResidualConfig) -> Outcome:
    """Two ranks with two virtual stages each, the host's own schedule, against one process."""
    from megatron_residuals.testing.residual_toy import spec_for
    from megatron_residuals.testing.toy_gpt import ToyGPT, run_toy

    one = run_toy(ToyGPT(dtype=torch.float64), spec_for(config))
    pipeline = ToyGPT(dtype=torch.float64, pp=2, vpp=2)
    worst = 0.0
    for policy in ("none", *config.entry.recompute):
        two = run_toy(pipeline, spec_for(dataclasses.replace(config, recompute=policy)))
        apart = [abs(a - b) for a, b in zip(one.losses, two.losses, strict=True)]
        apart += [(one.grads[name] - two.grads[name]).abs().max().item() for name in one.grads]
        worst = max(worst, *apart)
        if worst > CLOSE:
            raise AssertionError(
                f"PP2 x VPP2 with --residual-recompute {policy} differs from one process by "
                f"{worst:.1e}"
            )
    return Outcome(
        "ok",
        "pipeline",
        f"PP2 x VPP2 under every policy is one process (largest difference {worst:.1e})",
    )


MISSING: tuple[tuple[str, str], ...] = (
    ("probe", "diagnostics show what every mechanism has, and nothing of its own"),
    ("metrics", "no figures of its own in wandb, TensorBoard and the report"),
    ("kept_numbers", "`memory` counts the state, not what read and write keep per token"),
    ("planes", "`simulate` takes its traffic for that of the plain residual"),
    ("public_layout", "`convert` has no public names for it"),
)


def check_missing(config: ResidualConfig) -> Outcome:
    """What the entry leaves to the defaults, and what that costs."""
    kind = type(config.entry)
    own = [
        name
        for name, _ in MISSING
        if getattr(kind, name, None) is not getattr(Mechanism, name, None)
    ]
    left = [f"{name}: {cost}" for name, cost in MISSING if name not in own]
    return Outcome("note" if left else "ok", "left out", "; ".join(left) or "nothing")


Check = Callable[[ResidualConfig], Outcome]
CHECKS: tuple[Check, ...] = (
    check_entry,
    check_parameters,
    check_start,
    check_gradients,
    check_state,
    check_replay,
    check_precision,
    check_pipeline,
    check_missing,
)


def conform(config: ResidualConfig) -> Iterator[Outcome]:
    """Every check in turn; one that raises is a fault, and the rest goes on."""
    for check in CHECKS:
        try:
            yield check(config)
        except Exception as error:  # the author's code may raise anything
            name = check.__name__.removeprefix("check_")
            said = (
                str(error)
                if isinstance(error, AssertionError)
                else f"{type(error).__name__}: {error}"
            )
            yield Outcome("fault", name, said)
