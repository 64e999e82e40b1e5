# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Stage layouts: against literal tables, and against the host's own functions."""

from __future__ import annotations

import itertools
import random
import warnings
from types import ModuleType, SimpleNamespace

import pytest

from megatron_residuals.pipeline.layout import ATTENTION, GPT_LAYER, MLP, StageLayout

LAYOUT_STRINGS = [
    ("Et*3|(tt|)*29,m|L", 16),
    ("Et*3|(tt|)*29,m|L", 32),
    ("EtttL", 1),
    ("Ett|t|ttL", 1),
    ("Ett|tt|tt|ttL", 2),
    ("E|tt|t*4|ttL", 4),
    ("E||t|tt||t|L|", 4),
    ("E|(t|)*6L", 4),
    ("Et*2|(t*2|)*2,t|mL", 5),
    ("E,t*12|(t*12|)*4(t*11|)*2t*11,L", 8),
    ("(E)*1t|tL", 2),
    ("Et|t*0|t|L", 2),
    ("|Et|t|L", 2),
    ("Et|(t|)*2*3L", 3),
    ("Et*1,0|tL", 2),
    ("Ett|tt|tmm|L", 2),
    ("Ett|tt|tmm|L", 4),
]
REFUSED_LAYOUT_STRINGS = [
    ("", 1),
    ("tt|tL", 2),
    ("Ett|tt", 2),
    ("tE|tL", 2),
    ("EEt|tL", 2),
    ("Et|LtL", 2),
    ("Et|tL|t", 3),
    ("Ett|tt|tL", 2),
    ("Ett|xL", 2),
    ("Ett |tL", 2),
    ("E((tt|)*2t|)*2L", 7),
    ("E(tt)|tL", 2),
    ("Et*|tL", 2),
    ("Et*2*3|tL", 2),
    ("Et|mt|L", 3),
    ("Ett|tm|mL", 3),
    ("Em|tt|t|L", 2),
    ("Et|tm|t|L", 2),
    ("Et|tm||L", 2),
]


def test_stages_run_over_the_ranks_before_the_next_chunk() -> None:
    layout = StageLayout(3, 2, (1, 0, 2, 3, 1, 1))
    assert [layout.rank(g) for g in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [layout.chunk(g) for g in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [layout.first_layer(g) for g in range(6)] == [0, 1, 1, 3, 6, 7]
    assert [layout.stage(rank, chunk) for chunk in (0, 1) for rank in (0, 1, 2)] == list(range(6))
    assert (layout.num_stages, layout.num_layers) == (6, 8)


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (StageLayout.even(8, 2, 2), (2, 2, 2, 2)),
        (StageLayout.even(7, 4, account_for_embedding=True), (1, 2, 2, 2)),
        (StageLayout.even(7, 2, 2, account_for_embedding=True), (1, 2, 2, 2)),
        (StageLayout.even(2, 4, account_for_embedding=True, account_for_loss=True), (0, 1, 1, 0)),
        (StageLayout.uneven(8, 2, 2), (2, 2, 2, 2)),
        (StageLayout.uneven(14, 4, 2, first=2), (1, 2, 2, 2, 1, 2, 2, 2)),
        (StageLayout.uneven(10, 3, 2, first=2, last=4), (1, 2, 2, 1, 2, 2)),
        (StageLayout.uneven(5, 2, last=4), (1, 4)),
        (StageLayout.uneven(5, 2, first=2, last=3), (2, 3)),
        (StageLayout.uneven(4, 1, first=4), (4,)),
        (StageLayout.parse("Et*3|(tt|)*2m|L", 5), (3, 2, 2, 0, 0)),
        (StageLayout.parse("E||tt|t,L", 2, num_layers=3), (0, 0, 2, 1)),
    ],
)  # fmt: skip
def test_constructors_give_these_layers(layout: StageLayout, layers: tuple[int, ...]) -> None:
    assert layout.layers == layers


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StageLayout(2, 2, (1, 1, 1)), "3 entries in layers; 2 ranks x 2 chunks need 4"),
        (lambda: StageLayout(2, 1, (0, 0)), "no stage has a layer"),
        (lambda: StageLayout(1, 2, (1, 1)), "2 virtual chunks on one rank"),
        (lambda: StageLayout(2, 1, (1, -1)), r"layers\[1\] is -1"),
        (lambda: StageLayout.even(7, 2, 2), "7 layers .* do not divide into 2 ranks x 2 chunks"),
        (lambda: StageLayout.even(0, 2), "num_layers is 0"),
        (lambda: StageLayout.uneven(8, 3, first=3), "the 5 layers left do not divide into 2 ranks"),
        (lambda: StageLayout.uneven(8, 2, first=3, last=4), "1 of 8 layers are left for 0 of 2"),
        (lambda: StageLayout.uneven(8, 1, first=4, last=4), "0 of 8 layers are left for -1 of 1"),
        (lambda: StageLayout.uneven(8, 2, 2, first=4, last=4), "both given for 2 ranks of 2"),
        (lambda: StageLayout.uneven(8, 3, first=9), "-1 of 8 layers are left for 2 of 3"),
        (lambda: StageLayout.uneven(9, 3, 2, first=3, last=2), "first is 3, not a multiple of"),
        (lambda: StageLayout.uneven(8, 2, first=0), "first is 0"),
        (lambda: StageLayout.parse("Et|tL", 2, num_layers=3), "2 layers 't', the model has 3"),
        (lambda: StageLayout.parse("Et|tL", 0), "num_ranks is 0"),
        (lambda: StageLayout.even(4, 2).rank(2), "stages 0 to 1"),
        (lambda: StageLayout.even(4, 2).first_layer(-1), "stages 0 to 1"),
        (lambda: StageLayout.even(4, 2).stage(0, 1), "rank 0, chunk 1 is not in a layout"),
    ],
)  # fmt: skip
def test_layouts_that_cannot_be_are_refused(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        make()


def test_all_faults_of_a_layout_string_are_reported_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        StageLayout.parse("tx|m|t", 2, num_layers=5)
    for words in ("'x' is left", "3 stages do not divide by 2", "'E' must", "'L' must", "2 layers"):
        assert words in str(caught.value)


def test_lists_and_tuples_of_layers_make_equal_layouts() -> None:
    assert StageLayout(2, 1, [1, 2]) == StageLayout(2, 1, (1, 2))  # type: ignore[arg-type]
    assert hash(StageLayout(2, 1, [1, 2])) == hash(StageLayout(2, 1, (1, 2)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def host() -> SimpleNamespace:
    """The three host modules that cut a model into stages."""
    names = ("transformer_block", "transformer_layer", "pipeline_parallel_layer_layout")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules: dict[str, ModuleType] = {
            name: pytest.importorskip(f"megatron.core.transformer.{name}") for name in names
        }
    return SimpleNamespace(**modules)


def host_config(layout: StageLayout, **options: object) -> SimpleNamespace:
    stock = {
        "pipeline_model_parallel_layout": None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
    }
    return SimpleNamespace(
        num_layers=layout.num_layers,
        pipeline_model_parallel_size=layout.num_ranks,
        virtual_pipeline_model_parallel_size=layout.num_chunks if layout.num_chunks > 1 else None,
        **stock | options,
    )


def assert_the_host_agrees(host: SimpleNamespace, layout: StageLayout, **options: object) -> None:
    config = host_config(layout, **options)
    for g in range(layout.num_stages):
        rank, chunk = layout.rank(g), layout.chunk(g)
        vp_stage = chunk if layout.num_chunks > 1 else None
        count = host.transformer_block.get_num_layers_to_build(config, vp_stage, rank)
        offset = host.transformer_layer.get_transformer_layer_offset(config, vp_stage, rank)
        assert (layout.layers[g], layout.first_layer(g)) == (count, offset), (layout, g)


@pytest.mark.host
def test_accounted_embeddings_and_losses_agree_with_the_host(host: SimpleNamespace) -> None:
    checked = 0
    for ranks, chunks, per_stage in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3)):
        for embedding, loss in itertools.product((False, True), repeat=2):
            num_layers = ranks * chunks * per_stage - embedding - loss
            if (ranks == 1 and chunks > 1) or num_layers < 1:
                continue
            layout = StageLayout.even(
                num_layers, ranks, chunks, account_for_embedding=embedding, account_for_loss=loss
            )
            assert_the_host_agrees(
                host,
                layout,
                account_for_embedding_in_pipeline_split=embedding,
                account_for_loss_in_pipeline_split=loss,
            )
            checked += 1
    assert checked > 100


@pytest.mark.host
def test_first_and_last_rank_counts_agree_with_the_host(host: SimpleNamespace) -> None:
    checked = 0
    for ranks, chunks, middle in itertools.product((2, 3, 4), (1, 2, 3), (1, 2)):
        for first, last in itertools.product((None, 1, 2, 3), repeat=2):
            counts = [first or middle, *[middle] * (ranks - 2), last or middle]
            ends = {"first": first and first * chunks, "last": last and last * chunks}
            options = {f"num_layers_in_{end}_pipeline_stage": n for end, n in ends.items()}
            if ranks == 2 and chunks > 1 and first and last:
                # The host's own offsets divide by its number of middle ranks, 0 here.
                with pytest.raises(ValueError, match="whose layers the host cannot number"):
                    StageLayout.uneven(chunks * sum(counts), ranks, chunks, **ends)
                layout = StageLayout(ranks, chunks, tuple(counts) * chunks)
                with pytest.raises(ZeroDivisionError):
                    assert_the_host_agrees(host, layout, **options)
                continue
            layout = StageLayout.uneven(chunks * sum(counts), ranks, chunks, **ends)
            assert_the_host_agrees(host, layout, **options)
            checked += 1
    assert checked > 200


def host_layers(host: SimpleNamespace, text: str, num_ranks: int) -> tuple[int, ...]:
    """Layers per stage in stage order, as the host's parser and its validation give them."""
    parsed = host.pipeline_parallel_layer_layout.PipelineParallelLayerLayout(text, num_ranks)
    decoder = host.pipeline_parallel_layer_layout.LayerType.decoder
    mtp = parsed.flatten_layout.count(host.pipeline_parallel_layer_layout.LayerType.mtp)
    parsed.validate_layer_layout(parsed.flatten_layout.count(decoder), mtp)
    return tuple(
        parsed.layout[rank][chunk].count(decoder)
        for chunk in range(parsed.virtual_pipeline_model_parallel_size)
        for rank in range(num_ranks)
    )


@pytest.mark.host
@pytest.mark.parametrize(("text", "num_ranks"), LAYOUT_STRINGS)
def test_layout_strings_mean_what_the_host_reads_in_them(
    host: SimpleNamespace, text: str, num_ranks: int
) -> None:
    expected = host_layers(host, text, num_ranks)
    if num_ranks == 1 and len(expected) > 1:
        with pytest.raises(ValueError, match="virtual chunks on one rank"):
            StageLayout.parse(text, num_ranks)
    else:
        assert StageLayout.parse(text, num_ranks).layers == expected


@pytest.mark.host
@pytest.mark.parametrize(("text", "num_ranks"), REFUSED_LAYOUT_STRINGS)
def test_layout_strings_that_the_host_refuses_are_refused(
    host: SimpleNamespace, text: str, num_ranks: int
) -> None:
    with pytest.raises((AssertionError, IndexError)):
        host_layers(host, text, num_ranks)
    with pytest.raises(ValueError):
        StageLayout.parse(text, num_ranks)


@pytest.mark.host
def test_random_layout_strings_are_read_or_refused_like_the_host_does(
    host: SimpleNamespace,
) -> None:
    generator = random.Random(20260401)
    pieces = (
        "t",
        "t",
        "t*2",
        "(t|)*2",
        "(tt|t)*3",
        "|",
        "|",
        "m",
        ",",
        "L",
        "t*0",
        "(t*2|)*1",
        "*2",
    )
    accepted = 0
    for _ in range(3000):
        middle = "".join(generator.choices(pieces, k=generator.randint(1, 7)))
        text = f"E{middle}{generator.choice(('L', '|L', ''))}"
        num_ranks = generator.randint(2, 4)
        try:
            expected: tuple[int, ...] | None = host_layers(host, text, num_ranks)
        except (AssertionError, IndexError):
            expected = None
        if expected is None or not sum(expected):
            with pytest.raises(ValueError):
                StageLayout.parse(text, num_ranks)
        else:
            assert StageLayout.parse(text, num_ranks).layers == expected, (text, num_ranks)
            accepted += 1
    assert accepted > 250


def test_a_layer_has_attention_and_mlp_unless_the_layout_says_otherwise() -> None:
    layout = StageLayout(2, 2, (1, 0, 2, 1))
    assert layout.num_sublayers == 8
    assert [layout.first_sublayer(g) for g in range(4)] == [0, 2, 2, 6]
    assert [layout.sublayers(g) for g in range(4)] == [
        range(0, 2),
        range(2, 2),
        range(2, 6),
        range(6, 8),
    ]
    assert [layout.kind(i) for i in range(8)] == [ATTENTION, MLP] * 4
    assert [layout.layer_of(i) for i in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert layout.sublayers_of_layer(2) == range(4, 6)


def test_layers_of_a_hybrid_stack_have_the_sublayers_that_are_named() -> None:
    kinds = (("mamba",), GPT_LAYER, ("mamba",), ("moe",), (ATTENTION, "cross", MLP))
    layout = StageLayout(2, 1, (2, 3), kinds)
    assert layout.num_layers == 5 and layout.num_sublayers == 8
    assert [layout.sublayers(g) for g in range(2)] == [range(0, 3), range(3, 8)]
    assert [layout.kind(i) for i in range(8)] == [kind for layer in kinds for kind in layer]
    assert [layout.layer_of(i) for i in range(8)] == [0, 1, 1, 2, 3, 4, 4, 4]
    assert [layout.sublayers_of_layer(i) for i in range(5)] == [
        range(0, 1),
        range(1, 3),
        range(3, 4),
        range(4, 5),
        range(5, 8),
    ]


def test_layouts_of_gpt_layers_are_equal_however_their_kinds_are_given() -> None:
    layers = (1, 2)
    assert StageLayout(2, 1, layers, (GPT_LAYER,) * 3) == StageLayout(2, 1, layers)
    assert StageLayout(2, 1, layers, ((MLP, ATTENTION),) * 3) != StageLayout(2, 1, layers)


def test_kinds_that_do_not_fit_the_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 entries in layer_kinds for 3 layers"):
        StageLayout(2, 1, (1, 2), (GPT_LAYER,) * 2)
    with pytest.raises(ValueError, match=r"layer 1 has no sublayer[\s\S]*layer 2 has no sublayer"):
        StageLayout(2, 1, (1, 2), (GPT_LAYER, (), ()))
    layout = StageLayout(2, 1, (1, 2))
    for ask in (layout.kind, layout.layer_of):
        for sublayer in (-1, 6):
            with pytest.raises(ValueError, match=f"sublayer is {sublayer}; .* has 0 to 5"):
                ask(sublayer)
    with pytest.raises(ValueError, match="layer is 3; this layout has 0 to 2"):
        layout.sublayers_of_layer(3)
