# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction reads the one hidden state behind the decoder, with the host's own layers.

The states of the depths do not become sources or streams: the residual is closed by its head and
the final norm, and what follows is the stock module.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mcore.compat import prediction_can_be_recomputed
from megatron_residuals.mcore.layer import ResidualLayerMixin
from megatron_residuals.mcore.spec import replace_residual
from megatron_residuals.mcore.support import check_model
from megatron_residuals.testing import RankFailure, run_ranks
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    ToyResult,
    build_chunks,
    micro_batches,
    run_toy,
    setup_parallel,
    transformer_config,
)
from megatron_residuals.testing.toy_training import train_toy
from megatron_residuals.testing.toy_weights import full_grads
from tests.mcore.parallel.cases import (
    BLOCKS,
    MHC,
    MHC_DSV4,
    PLAIN,
    SMALL,
    assert_mechanism_trains,
    assert_same,
    assert_same_step,
    block_spec_for,
)

pytestmark = [pytest.mark.host, pytest.mark.timeout(120)]

FACTOR = 0.3
TWO_DEPTHS = dict(mtp_num_layers=2, mtp_loss_scaling_factor=FACTOR)
# float32: the host's loss, which alone knows the further tokens, computes in nothing wider
SIZES = dict(SMALL, num_layers=4, num_microbatches=4)
LAYOUTS = {
    "pp2-vpp2": dict(pp=2, vpp=2),
    "pp2-dp2": dict(pp=2, dp=2),
    "tp2-sp": dict(tp=2, sequence_parallel=True),
    "stand-alone embedding": dict(pp=2, vpp=2, cut="E|tt|t|tmmL"),
    "behind the last layer": dict(pp=2, vpp=2, cut="Et|tt|t|mmL"),
}


def toy(cut: str | None = None, tied: bool = False, **layout: Any) -> ToyGPT:
    overrides = dict(TWO_DEPTHS, **({"pipeline_model_parallel_layout": cut} if cut else {}))
    return ToyGPT(**SIZES, tied_embeddings=tied, config_overrides=overrides, **layout)


@functools.cache
def one_process(residual: str | None, tied: bool = False) -> ToyResult:
    return run_toy(toy(tied=tied), block_spec_for(residual))


CASES = [
    (MHC, "pp2-dp2"),
    (MHC, "tp2-sp"),
    (MHC, "behind the last layer"),
    (BLOCKS, "pp2-vpp2"),
    (BLOCKS, "tp2-sp"),
    (BLOCKS, "stand-alone embedding"),
]


@pytest.mark.parametrize(("residual", "layout"), CASES)
def test_a_layout_equals_one_process(residual: str, layout: str) -> None:
    actual = train_toy(toy(**LAYOUTS[layout]), block_spec_for(residual))
    assert_same_step(actual, one_process(residual), torch.float32)
    assert_mechanism_trains(actual.grads)
    assert sum(name.startswith("mtp.") and "eh_proj" in name for name in actual.grads) == 2


RECOMPUTED = [
    (BLOCKS.replace(")", ", recompute='block')"), {}),
    (MHC.replace(")", ", recompute='group:3')"), {}),
    (
        BLOCKS,
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    ),
]


@pytest.mark.parametrize(("residual", "recompute"), RECOMPUTED, ids=["block", "group", "full"])
def test_recomputation_changes_nothing(residual: str, recompute: dict[str, Any]) -> None:
    recomputed = ToyGPT(**SIZES, pp=2, config_overrides=dict(TWO_DEPTHS, **recompute))
    if recompute and not prediction_can_be_recomputed():
        with pytest.raises(RankFailure, match="fails under its own full recompute"):
            run_toy(recomputed, block_spec_for(residual))
        return
    actual = run_toy(recomputed, block_spec_for(residual))
    expected = one_process(MHC if residual.startswith("mhc") else BLOCKS)
    assert actual.losses == expected.losses
    assert_same(actual.grads, expected.grads, torch.float32)


@pytest.mark.parametrize(
    ("layout", "tied"), [({}, False), (dict(pp=2), False), (dict(pp=2), True)], ids=str
)
def test_with_the_plain_residual_it_is_the_stock_model(layout: dict[str, int], tied: bool) -> None:
    ours, stock = (run_toy(toy(tied=tied, **layout), block_spec_for(r)) for r in (PLAIN, None))
    assert ours.losses == stock.losses
    assert ours.grads.keys() == stock.grads.keys()
    assert all(torch.equal(ours.grads[name], grad) for name, grad in stock.grads.items())


def by_hand(toy: ToyGPT, residual: str) -> ToyResult:
    """Trunk, then each depth from what is in front of it and the token it is given, spelt out."""
    setup_parallel(toy)
    (chunk,) = build_chunks(toy, block_spec_for(residual))
    losses = []
    for batch in micro_batches(toy):
        tokens, labels, positions = batch["tokens"], batch["labels"], batch["positions"]
        rotary = chunk.rotary_pos_emb(toy.seq_length)
        embedded = chunk.embedding(tokens, positions)
        hidden = chunk.decoder(embedded, batch["mask"], rotary_pos_emb=rotary)
        main = cross_entropy(chunk.output_layer(hidden)[0], labels).mean()
        extra = 0.0
        for depth, layer in enumerate(chunk.mtp.layers, start=1):
            tokens, labels, positions = map(shifted, (tokens, labels, positions))
            following = layer.enorm(chunk.embedding(tokens, positions))
            joined = layer.eh_proj(torch.cat((following, layer.hnorm(hidden)), -1))[0]
            inner = getattr(layer, "mtp_model_layer", None) or layer.transformer_layer
            assert type(inner) is TransformerLayer, "not the host's own layer"
            hidden = layer.final_layernorm(inner(joined, batch["mask"], rotary_pos_emb=rotary)[0])
            known = cross_entropy(chunk.output_layer(hidden)[0], labels)[
                :, : toy.seq_length - depth
            ]
            # the host adds the depths' losses token by token; the mean is over known tokens
            extra = extra + FACTOR / len(chunk.mtp.layers) * known.mean()
        (main + extra).div(toy.num_microbatches).backward()
        losses.append(main.item())
    return ToyResult(losses, full_grads([chunk]))


def shifted(tokens: torch.Tensor) -> torch.Tensor:
    """The next token's at every position, zero at the last."""
    return torch.cat((tokens[:, 1:], torch.zeros_like(tokens[:, :1])), 1)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[s, b, v] and [b, s] -> [b, s]."""
    return torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")


@pytest.mark.parametrize("residual", [MHC_DSV4, BLOCKS])
def test_losses_and_gradients_are_those_of_the_construction_by_hand(residual: str) -> None:
    (expected,) = run_ranks(1, by_hand, toy(), residual)
    actual = one_process(residual)
    assert actual.losses == pytest.approx(expected.losses, rel=1e-6)
    assert_same(actual.grads, expected.grads, torch.float32, "reordered")
    without = run_toy(ToyGPT(**SIZES), block_spec_for(residual))
    name = "decoder.final_layernorm.weight"
    assert not torch.allclose(actual.grads[name], without.grads[name], rtol=1e-3)


def kinds_of_layers(toy: ToyGPT) -> list[bool]:
    setup_parallel(toy)
    (chunk,) = build_chunks(toy, block_spec_for(BLOCKS))
    blocks: Sequence[Any] = chunk.decoder.layers
    inner = [m for layer in chunk.mtp.layers for m in layer.modules() if is_layer(m)]
    assert len(inner) == 2
    return [isinstance(layer, ResidualLayerMixin) for layer in (*blocks, *inner)]


def is_layer(module: torch.nn.Module) -> bool:
    return isinstance(module, TransformerLayer)


def test_a_block_spec_with_a_residual_gives_the_host_its_own_layers_back() -> None:
    assert run_ranks(1, kinds_of_layers, toy()) == [[True] * 4 + [False] * 2]


@pytest.mark.parametrize("off", [0, None])
def test_zero_and_none_mean_off(off: int | None) -> None:
    model = ToyGPT(**SIZES, config_overrides=dict(mtp_num_layers=off))
    actual, expected = (run_toy(t, block_spec_for(MHC)) for t in (model, ToyGPT(**SIZES)))
    assert actual.losses == pytest.approx(expected.losses, rel=1e-6)
    assert_same(actual.grads, expected.grads, torch.float32)


def build(toy: ToyGPT) -> None:
    setup_parallel(toy)
    build_chunks(toy, block_spec_for(BLOCKS))


def test_a_stage_of_its_own_in_front_of_the_last_is_refused() -> None:
    with pytest.raises(RankFailure, match="put every m of the pipeline layout into the last"):
        run_ranks(2, build, toy(pp=2, cut="Ettttmm|L"))


def test_a_layer_spec_of_ours_is_not_taken_by_the_host_and_the_users_own_is() -> None:
    def specs(toy: ToyGPT) -> list[str]:
        setup_parallel(toy)
        config = transformer_config(toy)
        base = get_gpt_decoder_block_spec(config, use_transformer_engine=False).layer_specs[0]
        ours = replace_residual(base, ResidualConfig("mhc"))
        check_model(config, [ours], ResidualConfig("mhc"))
        get_gpt_mtp_block_spec(config, base, use_transformer_engine=False)
        with pytest.raises(ValueError) as error:
            get_gpt_mtp_block_spec(config, ours, use_transformer_engine=False)
        return [str(error.value)[:12]]

    assert run_ranks(1, specs, toy()) == [["Invalid spec"]]
