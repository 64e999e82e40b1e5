# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""ResidualConfig: its text form, all its faults at once, and the values it fills in."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_residuals.config import (
    MECHANISMS,
    RECOMPUTE,
    ResidualConfig,
    options_for,
    readers_of,
)
from megatron_residuals.mechanisms import BLOCK_ATTNRES

counts = st.integers(1, 10**6)
positive = st.floats(min_value=1e-300, max_value=1e300)
VALUES: dict[str, st.SearchStrategy[object]] = {
    "streams": counts,
    "hc_dynamic": st.booleans(),
    "hc_norm": st.sampled_from(["layernorm", "rmsnorm"]),
    "mhc_convention": st.sampled_from(["paper", "dsv4"]),
    "mhc_sinkhorn_iterations": counts,
    "mhc_mixing": st.just("sinkhorn"),
    "mhc_eps": st.none() | positive,
    "mhc_alpha_init": st.floats(allow_nan=False, allow_infinity=False),
    "mhc_init": st.sampled_from(["a6", "symmetric"]),
    "contraction": st.sampled_from(["auto", "mean", "sum", "learned"]),
    "block_layers": st.none() | counts,
    "block_sublayers": st.none() | counts,
    "ihc_gate_eps": positive,
    "attnres_eps": positive,
    "attnres_heads": counts,
    "attnres_additive": st.booleans(),
    "transport": st.sampled_from(["full", "delta"]),
    "recompute": st.sampled_from([*RECOMPUTE, "group:3", "group:auto"]),
    "kernels": st.sampled_from(["auto", "torch", "triton", "fla", "liger"]),
    "two_phase": st.sampled_from(["auto", "on", "off"]),
    "check_messages": st.booleans(),
    "connect_early": st.booleans(),
    "log_interval": st.integers(0, 10**6),
    "log_image_interval": st.none() | st.integers(0, 10**6),
}
OPTIONS = {option.name: option for option in options_for()}
quick = settings(max_examples=200, deadline=None, derandomize=True, database=None)


@st.composite
def configs(draw: st.DrawFn) -> ResidualConfig:
    """Any valid configuration: a mechanism and some of the options that it reads."""
    mechanism = draw(st.sampled_from(MECHANISMS))
    read = [name for name in VALUES if mechanism in readers_of(name)]
    chosen = draw(st.lists(st.sampled_from(read), unique=True)) if read else []
    options = {name: draw(VALUES[name]) for name in chosen}
    if options.get("block_layers") is not None:
        options.pop("block_sublayers", None)
    if options.get("two_phase") == "on" and options.get("kernels") in ("fla", "liger"):
        del options["kernels"]
    if options.get("attnres_additive") or options.get("attnres_heads", 1) != 1:
        options = {n: v for n, v in options.items() if n not in ("two_phase", "kernels")}
    policy = str(options.get("recompute", "none")).partition(":")[0]
    if mechanism not in RECOMPUTE[policy]:
        del options["recompute"]
    return ResidualConfig(mechanism, **options)  # type: ignore[arg-type]


def faults_of(**options: object) -> list[str]:
    """The lines of the message that a configuration is refused with."""
    with pytest.raises(ValueError) as caught:
        ResidualConfig(**options)  # type: ignore[arg-type]
    first, *faults = str(caught.value).split("\n")
    assert first == "invalid residual configuration:"
    assert all(fault.startswith("  - ") for fault in faults)
    return faults


def test_the_strategies_cover_every_option() -> None:
    assert VALUES.keys() == OPTIONS.keys()


@quick
@given(configs())
def test_the_text_form_reads_back_as_the_same_configuration(config: ResidualConfig) -> None:
    assert ResidualConfig.parse(str(config)) == config
    assert ResidualConfig.from_mapping(config.as_mapping()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert len({config, dataclasses.replace(config)}) == 1


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("residual()", ResidualConfig()),
        ("mhc(streams=2)", ResidualConfig("mhc", streams=2)),
        (
            "mhc(contraction='sum', mhc_eps=1e-08, mhc_convention='dsv4')",
            ResidualConfig("mhc", contraction="sum", mhc_eps=1e-8, mhc_convention="dsv4"),
        ),
        ("block_attnres(block_layers=4)", ResidualConfig("block_attnres", block_layers=4)),
        ("hc(hc_dynamic=False)", ResidualConfig("hc", hc_dynamic=False)),
    ],
)
def test_the_text_form_names_the_mechanism_and_what_differs(
    text: str, config: ResidualConfig
) -> None:
    assert str(config) == text
    assert ResidualConfig.parse(text) == config


@pytest.mark.parametrize("text", ["mhc", " mhc ", "mhc()", "mhc( )", "mhc(streams=4)"])
def test_a_mechanism_may_be_written_alone_or_with_its_defaults(text: str) -> None:
    assert ResidualConfig.parse(text) == ResidualConfig("mhc")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mhc(",
        "mhc(2)",
        "mhc(streams=n)",
        "mhc(streams=1+x)",
        "mhc(streams=print(1))",
        "mhc(streams={[]: 1})",
        "mhc; hc",
        "a.mhc()",
        "mhc(streams=2)(streams=3)",
        "3",
        "'mhc'",
    ],
)
def test_text_that_is_no_configuration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read residual configuration") as caught:
        ResidualConfig.parse(text)
    assert repr(text) in str(caught.value)
    assert "block_attnres(block_layers=4)" in str(caught.value)


@pytest.mark.parametrize("text", ["mhc(streams=2, streams=3)", "mhc(mechanism='hc')"])
def test_text_that_contradicts_itself_is_refused(text: str) -> None:
    """Python's parser alone lets a repeated keyword pass, and the last one would win."""
    with pytest.raises(ValueError):
        ResidualConfig.parse(text)


@pytest.mark.parametrize("text", ["mhc(streems=2)", "mhc(streems=2, stream=3)"])
def test_unknown_options_are_named_beside_the_known_ones(text: str) -> None:
    with pytest.raises(ValueError, match="unknown residual option") as caught:
        ResidualConfig.parse(text)
    assert "streems" in str(caught.value) and "known: mechanism, streams, " in str(caught.value)


def test_a_mapping_with_unknown_names_is_refused_naming_all_of_them() -> None:
    with pytest.raises(ValueError, match=r"option\(s\) a, b; known: "):
        ResidualConfig.from_mapping({"mechanism": "mhc", "b": 1, "a": 2})
    assert ResidualConfig.from_mapping({"mechanism": "hc", "streams": 2}) == ResidualConfig(
        "hc", streams=2
    )
    assert ResidualConfig.from_mapping({}) == ResidualConfig("residual")


def test_an_unknown_mechanism_is_refused_with_the_list_of_known_ones() -> None:
    (fault,) = faults_of(mechanism="mhcc")
    assert "mechanism is 'mhcc'" in fault
    assert all(name in fault for name in MECHANISMS)


def test_all_faults_come_in_one_message() -> None:
    faults = faults_of(
        mechanism="block_attnres",
        streams=2,
        hc_norm="batchnorm",
        block_layers=2,
        block_sublayers=0,
        attnres_eps=-1.0,
        transport="slow",
    )
    expected = (
        "streams is 2, but 'block_attnres' does not read it (only hc, mhc, ihc, single_pass_mhc)",
        "hc_norm is 'batchnorm'; allowed: layernorm, rmsnorm",
        "block_sublayers is 0; give an integer of at least 1",
        "attnres_eps is -1.0",
        "transport is 'slow'; allowed: full, delta",
        "block_layers=2 and block_sublayers=0 are both given",
    )
    assert len(faults) == len(expected)
    for text in expected:
        assert sum(text in fault for fault in faults) == 1, text


def test_both_block_lengths_at_once_are_refused() -> None:
    (fault,) = faults_of(mechanism="block_attnres", block_layers=2, block_sublayers=4)
    assert "block_layers=2 and block_sublayers=4 are both given" in fault
    assert "give one" in fault


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("policy", RECOMPUTE)
def test_a_recompute_policy_is_for_the_mechanisms_it_is_defined_for(
    policy: str, mechanism: str
) -> None:
    if mechanism in RECOMPUTE[policy]:
        assert ResidualConfig(mechanism, recompute=policy).recompute_policy == policy
    else:
        (fault,) = faults_of(mechanism=mechanism, recompute=policy)
        assert f"recompute is {policy!r}, which is for {', '.join(RECOMPUTE[policy])}" in fault
        assert f"{mechanism!r} allows none" in fault


@pytest.mark.parametrize(
    "text", ["group:0", "group:-1", "group:r", "mix:2", "everything", "", None]
)
def test_a_recompute_policy_of_another_form_is_refused(text: str | None) -> None:
    (fault,) = faults_of(mechanism="mhc", recompute=text)
    assert f"recompute is {text!r}; " in fault


def test_a_group_length_is_given_or_left_to_the_stage() -> None:
    assert ResidualConfig("mhc", recompute="group:3").group_length == 3
    assert ResidualConfig("mhc", recompute="group").group_length is None
    assert ResidualConfig("hc", recompute="group:auto").group_length is None


def two_phase(config: ResidualConfig) -> str:
    return BLOCK_ATTNRES.two_phase(config)


@pytest.mark.parametrize("kernels", ["fla", "liger"])
def test_a_library_reads_in_one_phase(kernels: str) -> None:
    assert two_phase(ResidualConfig("block_attnres", kernels=kernels)) == "off"
    assert two_phase(ResidualConfig("block_attnres", kernels="triton")) == "auto"
    with pytest.raises(ValueError, match=f"two_phase is 'on', but kernels='{kernels}' reads for"):
        ResidualConfig("block_attnres", kernels=kernels, two_phase="on")


OTHER = {
    "streams": 2,
    "hc_dynamic": False,
    "hc_norm": "rmsnorm",
    "mhc_convention": "dsv4",
    "mhc_sinkhorn_iterations": 5,
    "mhc_mixing": "kronecker",
    "mhc_eps": 1e-3,
    "mhc_alpha_init": 0.5,
    "mhc_init": "symmetric",
    "contraction": "sum",
    "block_layers": 3,
    "block_sublayers": 3,
    "ihc_gate_eps": 1e-3,
    "attnres_eps": 1e-3,
    "attnres_heads": 2,
    "attnres_additive": True,
    "transport": "full",
    "kernels": "torch",
    "two_phase": "off",
    "check_messages": True,
    "connect_early": True,
    "log_interval": 10,
    "log_image_interval": 100,
}
STREAMS, GATED = {"hc", "mhc", "ihc"}, {"mhc", "ihc", "single_pass_mhc"}
READERS = {
    "streams": STREAMS | {"single_pass_mhc"},
    "contraction": STREAMS,
    **{f"attnres_{name}": {"attnres", "block_attnres"} for name in ("eps", "heads", "additive")},
    "block_layers": {"block_attnres"},
    "block_sublayers": {"block_attnres"},
    "transport": set(MECHANISMS),
    "kernels": set(MECHANISMS),
    "two_phase": {"attnres", "block_attnres"},
    "check_messages": set(MECHANISMS),
    "connect_early": set(MECHANISMS),
    "log_interval": set(MECHANISMS),
    "log_image_interval": set(MECHANISMS),
    **{name: {name.split("_")[0]} for name in OTHER if name.startswith(("hc_", "mhc_", "ihc_"))},
    **{f"mhc_{name}": GATED - {"ihc"} for name in ("convention", "sinkhorn_iterations", "mixing")},
    **{f"mhc_{name}": GATED for name in ("eps", "alpha_init", "init")},
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("option", OTHER)
def test_an_option_is_taken_by_those_who_read_it_and_refused_by_the_rest(
    option: str, mechanism: str
) -> None:
    options = {"mechanism": mechanism, option: OTHER[option]}
    if mechanism in READERS[option]:
        assert getattr(ResidualConfig(**options), option) == OTHER[option]  # type: ignore[arg-type]
        return
    (fault,) = faults_of(**options)
    assert f"{option} is {OTHER[option]!r}, but {mechanism!r} does not read it" in fault
    assert "leave it out" in fault
    assert all(reader in fault for reader in READERS[option])


@pytest.mark.parametrize(
    ("mechanism", "option", "value"),
    [
        ("mhc", "streams", 0),
        ("mhc", "streams", -1),
        ("mhc", "streams", 2.0),
        ("mhc", "streams", True),
        ("mhc", "streams", "4"),
        ("mhc", "streams", None),
        ("mhc", "mhc_sinkhorn_iterations", 0),
        ("mhc", "mhc_eps", 0.0),
        ("mhc", "mhc_eps", math.nan),
        ("mhc", "mhc_eps", math.inf),
        ("mhc", "mhc_eps", "1e-6"),
        ("mhc", "mhc_eps", True),
        ("mhc", "mhc_alpha_init", "0.01"),
        ("mhc", "mhc_alpha_init", math.nan),
        ("mhc", "mhc_alpha_init", math.inf),
        ("mhc", "mhc_alpha_init", [0.1]),
        ("mhc", "mhc_init", "A6"),
        ("mhc", "mhc_mixing", "birkhoff"),
        ("mhc", "mhc_convention", None),
        ("mhc", "contraction", ["mean"]),
        ("hc", "hc_dynamic", 1),
        ("hc", "hc_dynamic", None),
        ("residual", "check_messages", "yes"),
        ("residual", "log_interval", -1),
        ("residual", "log_interval", True),
        ("residual", "log_interval", None),
        ("residual", "log_image_interval", 0.5),
        ("attnres", "attnres_eps", -1e-6),
        ("attnres", "attnres_eps", None),
        ("attnres", "attnres_heads", 0),
        ("block_attnres", "block_layers", 0),
        ("block_attnres", "block_sublayers", 1.5),
    ],
)
def test_a_value_that_cannot_work_is_one_fault_that_names_it(
    mechanism: str, option: str, value: object
) -> None:
    (fault,) = faults_of(mechanism=mechanism, **{option: value})
    assert f"{option} is {value!r}" in fault


@pytest.mark.parametrize(
    ("config", "contraction", "eps"),
    [
        (ResidualConfig("hc"), "sum", None),
        (ResidualConfig("mhc"), "mean", 1e-20),
        (ResidualConfig("mhc", mhc_convention="dsv4"), "learned", 1e-6),
        (ResidualConfig("mhc", mhc_convention="dsv4", contraction="sum", mhc_eps=0.5), "sum", 0.5),
        (ResidualConfig("hc", contraction="learned"), "learned", None),
        (ResidualConfig("ihc"), "learned", 1e-5),
    ],
    ids=str,
)
def test_what_is_left_out_is_filled_in_from_the_mechanism(
    config: ResidualConfig, contraction: str, eps: float | None
) -> None:
    assert config.resolved_contraction == contraction
    if eps is not None:
        assert config.resolved_mhc_eps == eps


def test_the_families_of_mechanisms() -> None:
    families = {name: ResidualConfig(name) for name in MECHANISMS}
    with_sources = [name for name in families if families[name].depth_map(4) is not None]
    assert with_sources == ["attnres", "block_attnres"]
    assert [name for name in families if families[name].rows == 4] == [
        "hc",
        "mhc",
        "ihc",
        "single_pass_mhc",
    ]


def test_option_types_are_scalars_that_a_command_line_can_read() -> None:
    types = {name: option.kind for name, option in OPTIONS.items()}
    assert set(types.values()) == {str, int, float, bool}
    assert types["mhc_eps"] is float
    assert types["block_layers"] is int
    assert types["hc_dynamic"] is bool


def test_every_option_says_what_it_is_for() -> None:
    for option in OPTIONS.values():
        assert len(option.text) > 10, option.name


def test_a_configuration_is_a_frozen_value() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ResidualConfig("mhc").streams = 2  # type: ignore[misc]
    with pytest.raises(ValueError, match="streams is 0"):
        dataclasses.replace(ResidualConfig("mhc"), streams=0)
