# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What binds weights to settings, and what the comparison says."""

from __future__ import annotations

import pytest

from megatron_residuals.config import MECHANISMS, ResidualConfig, options_for
from megatron_residuals.settings import compare_settings, settings_of

BOUND = {
    "mechanism",
    "streams",
    "hc_dynamic",
    "hc_norm",
    "mhc_convention",
    "mhc_sinkhorn_iterations",
    "mhc_mixing",
    "ihc_gate_eps",
    "attnres_eps",
    "attnres_heads",
    "attnres_additive",
    "contraction",
    "mhc_eps",
    "block_layers",
    "block_sublayers",
}


def record(text: str, num_layers: int = 16) -> dict[str, str | int | float | bool]:
    return settings_of(ResidualConfig.parse(text), num_layers)


def test_every_option_is_bound_to_the_weights_or_declared_free() -> None:
    """A new option has to say which: bound options go into the record by themselves."""
    assert {option.name for option in options_for() if option.binds} == BOUND - {"mechanism"}
    recorded = {name for mechanism in MECHANISMS for name in record(mechanism)}
    assert recorded == BOUND - {"block_layers"}  # said in sublayers


def test_a_record_fills_defaults_in_so_that_giving_them_changes_nothing() -> None:
    assert record("mhc") == record("mhc(mhc_eps=1e-20, contraction='mean')")
    assert record("mhc(mhc_convention='dsv4')")["contraction"] == "learned"
    assert record("block_attnres") == record("block_attnres(block_layers=2)")
    assert record("block_attnres") == record("block_attnres(block_sublayers=4)")
    # longer than the model is as long as the model
    assert record("block_attnres(block_layers=16)") == record("block_attnres(block_layers=99)")


def test_full_attnres_is_blocks_of_one_sublayer() -> None:
    full, ones = record("attnres"), record("block_attnres(block_sublayers=1)")
    assert full["mechanism"] != ones["mechanism"]
    assert compare_settings(full, ones) == compare_settings(ones, full) == []


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_equal_records_have_nothing_to_say(mechanism: str) -> None:
    assert compare_settings(record(mechanism), record(mechanism)) == []


def test_a_line_names_the_setting_both_values_and_what_to_do() -> None:
    (line,) = compare_settings(record("mhc"), record("mhc(streams=2)"))
    assert line == (
        "streams: saved 4, given 2; weights of another number of streams do not fit: give the "
        "saved number"
    )
    (line,) = compare_settings(record("hc"), record("block_attnres"))
    assert line.startswith("mechanism: saved 'hc', given 'block_attnres'; ")
    (line,) = compare_settings(None, record("mhc"))
    assert "the model has mhc; " in line and "--finetune" in line


def test_only_the_block_length_yields_to_a_wish() -> None:
    saved, given = record("block_attnres"), record("attnres(attnres_eps=1e-5)")
    lines = compare_settings(saved, given)
    assert [line.partition(":")[0] for line in lines] == ["attnres_eps", "block_sublayers"]
    assert "--residual-convert-block-length" in lines[1]
    assert compare_settings(saved, given, convert_block_length=True) == lines[:1]


def test_settings_that_one_side_does_not_know_are_differences() -> None:
    newer = {**record("mhc"), "mhc_temperature": 0.5}
    (line,) = compare_settings(newer, record("mhc"))
    assert line.startswith("mhc_temperature: saved 0.5, given nothing (another version); ")
