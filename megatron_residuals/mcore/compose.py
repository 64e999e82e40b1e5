# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Where the parts of a model with a residual meet: its blocks, the start-up report, the monitor.

None of them knows the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_residuals.mcore import hybrid, install
from megatron_residuals.mcore.block import ResidualBlockMixin, ResidualTransformerBlock
from megatron_residuals.mcore.spec import residual_of
from megatron_residuals.mcore.training import monitor, startup
from megatron_residuals.mcore.training.optimizer import check_multipliers_are_heard

BlockT = TypeVar("BlockT", bound=ResidualBlockMixin)


def block_factory(stock: Any) -> Callable[..., TransformerBlock]:
    """What the GPT model builds its decoder with: ours for specs with a residual, else stock's."""
    if stock is not TransformerBlock:
        raise install.taken("the GPT model's block", stock)

    @functools.wraps(stock, updated=())
    def build(*args: Any, **kwargs: Any) -> TransformerBlock:
        spec = kwargs["spec"] if "spec" in kwargs else args[1]
        return build_block(*args, **kwargs) if residual_of(spec) else stock(*args, **kwargs)

    return build


def build_block(*args: Any, **kwargs: Any) -> ResidualTransformerBlock:
    """A block with a residual, reported once for each model and recorded where that is asked for.

    The arguments are those of the host's ``TransformerBlock``.

    Raises:
        ValueError: the model uses something that a replaced residual does not support.
        RuntimeError: a flag is given that this host's training loop would not hear.
    """
    return _finished(ResidualTransformerBlock(*args, **kwargs))


def hybrid_model(stock: Callable[..., None]) -> Callable[..., None]:
    """What makes a hybrid model: with a stack of ours for specs with a residual."""
    return hybrid.hybrid_model(stock, _finished)


def _finished(block: BlockT) -> BlockT:
    records = block.residual.log_interval > 0
    # a training loop that was imported after us has its seams by now
    install.install([install.LOGGING] if records and install.LOGGING.is_imported else [])
    check_multipliers_are_heard(install.OPTIMIZER.state != "stock")
    startup.announce(block, install.report())
    if records:
        monitor.observe(block)
    return block
