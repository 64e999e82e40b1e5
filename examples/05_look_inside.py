# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Use the mechanisms in a model of your own, and look at what they do.

    python examples/05_look_inside.py

The modules know nothing of Megatron: a state goes in front of every sublayer and comes out behind
it. Here a stack of small MLPs learns a task, once with each mechanism; then the weights over depth
and the mixing matrices are printed.
"""

import torch

from megatron_residuals import ResidualConfig
from megatron_residuals.functional import depth_weights
from megatron_residuals.mechanisms.streams import Streams
from megatron_residuals.modules import build_head, build_sublayer_residual, open_state

WIDTH, LAYERS, STEPS = 32, 4, 200


class Stack(torch.nn.Module):
    """2 * LAYERS sublayers, each a pre-norm MLP, around one residual mechanism."""

    def __init__(self, residual: ResidualConfig) -> None:
        super().__init__()
        self.residual = residual
        depth = residual.depth_map(LAYERS)
        self.sublayers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(WIDTH),
                torch.nn.Linear(WIDTH, 2 * WIDTH),
                torch.nn.GELU(),
                torch.nn.Linear(2 * WIDTH, WIDTH),
            )
            for _ in range(2 * LAYERS)
        )
        self.residuals = torch.nn.ModuleList(
            build_sublayer_residual(residual, depth, hidden_size=WIDTH, sublayer=index)
            for index in range(2 * LAYERS)
        )
        self.head = build_head(residual, hidden_size=WIDTH)

    def states(self, embedding: torch.Tensor):
        """The state in front of every sublayer, and the last one."""
        state = open_state(self.residual, embedding)
        for residual, sublayer in zip(self.residuals, self.sublayers, strict=True):
            yield state
            x, pending = residual.read(state)
            state = residual.write(pending, sublayer(x))
        yield state

    def forward(self, embedding: torch.Tensor) -> torch.Tensor:
        """The final hidden state."""
        *_, last = self.states(embedding)
        return self.head(last)


def main() -> None:
    """Train both, print what the deepest sublayers do."""
    torch.manual_seed(0)
    target = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
    for residual in (ResidualConfig("mhc"), ResidualConfig("block_attnres", block_layers=1)):
        torch.manual_seed(1)
        model = Stack(residual)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for step in range(STEPS):
            inputs = torch.randn(64, WIDTH)
            loss = (model(inputs) - target(inputs).detach()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step in (0, STEPS - 1):
                print(f"{residual}: step {step} loss {loss.item():.4f}")
        with torch.no_grad():
            states = list(model.states(torch.randn(256, WIDTH)))
            deepest = model.residuals[-1]
            if isinstance(residual.entry, Streams):
                _, pending = deepest(states[-2])
                print("mean H_res of the last sublayer (rows: new stream, columns: old):")
                print(pending.h_res.mean(0).numpy().round(3))
            else:
                sources = (*states[-2].sources, states[-2].partial)
                weights = depth_weights(sources, deepest.query, deepest.key_gain, eps=deepest.eps)
                print("mean weights of the last sublayer over embedding, blocks, running sum:")
                print(weights.mean(1).numpy().round(3))


if __name__ == "__main__":
    main()
