# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The flags of Megatron's command line and the configuration they make."""

from __future__ import annotations

import argparse
import re

import pytest

from megatron_residuals import run
from megatron_residuals.config import ResidualConfig, options_for
from megatron_residuals.mcore.arguments import (
    CONVERT_BLOCK_LENGTH,
    LR_MULT,
    WD_MULT,
    add_residual_arguments,
    config_from_args,
    flag_name,
    flag_of,
)
from megatron_residuals.run import FROM_FLAGS, SPECS, _read_residual


def parse(*words: str) -> argparse.Namespace:
    return add_residual_arguments(argparse.ArgumentParser()).parse_args(words)


def test_every_option_has_a_flag_and_none_has_a_default() -> None:
    assert set(vars(parse()).values()) == {None}
    options = {MECHANISM_FLAG, *(flag_of(option.name) for option in options_for())}
    of_the_run = {flag_name(name) for name in (CONVERT_BLOCK_LENGTH, LR_MULT, WD_MULT)}
    assert {flag_name(name) for name in vars(parse())} == options | of_the_run


def test_the_help_of_the_runner_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    # The help of Megatron's parser, which has them too, ends in an error in 0.19.
    with pytest.raises(SystemExit):
        run.main(["--help"])
    printed = capsys.readouterr().out
    assert "among ARGS" in printed and "--cpu-host" in printed
    flags = {MECHANISM_FLAG, *(flag_of(option.name) for option in options_for())}
    assert flags <= set(re.findall(r"--[\w-]+", printed))
    assert "[hc, mhc; default: 4]" in " ".join(printed.split())


def test_flags_make_the_configuration() -> None:
    args = parse("--residual", "mhc", "--residual-streams", "2", "--residual-mhc-eps", "1e-5")
    assert config_from_args(args) == ResidualConfig("mhc", streams=2, mhc_eps=1e-5)
    args = parse("--residual", "hc", "--no-residual-hc-dynamic")
    assert config_from_args(args) == ResidualConfig("hc", hc_dynamic=False)


def test_the_spec_may_name_the_mechanism_and_flags_its_options() -> None:
    args = parse("--residual-block-layers", "3")
    assert config_from_args(args, "block_attnres") == ResidualConfig(
        "block_attnres", block_layers=3
    )


def test_the_runner_reads_options_beside_a_spec_name_and_refuses_names_that_are_none() -> None:
    spec = ["--spec", SPECS]
    # beginning with --no, this one was left to Megatron's parser, which does not know it
    config = _read_residual([*spec, "hc", "--no-residual-hc-dynamic"])
    assert config == ResidualConfig("hc", hc_dynamic=False)
    assert _read_residual([*spec, FROM_FLAGS, "--residual", "mhc"]) == ResidualConfig("mhc")
    assert _read_residual(["--lr", "1"]) is None
    with pytest.raises(ValueError, match=r"mechanism is 'mch'; allowed: residual, hc"):
        _read_residual([*spec, "mch"])
    with pytest.raises(ValueError, match="takes one name behind it"):
        _read_residual([*spec, "--residual", "mhc"])
    with pytest.raises(ValueError, match=r"--spec own\.specs mhc builds its own layers"):
        _read_residual(["--residual", "mhc", "--spec", "own.specs", "mhc"])


def test_two_different_mechanisms_and_none_are_refused() -> None:
    with pytest.raises(ValueError, match="--spec asks for 'hc' and --residual for 'mhc'"):
        config_from_args(parse("--residual", "mhc"), "hc")
    with pytest.raises(ValueError, match="add --residual NAME"):
        config_from_args(parse())


def test_a_flag_the_host_already_has_is_refused_by_name() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(flag_of("streams"))
    parser.add_argument(flag_name(LR_MULT))
    with pytest.raises(RuntimeError, match="has --residual-streams, --residual-lr-mult"):
        add_residual_arguments(parser)


@pytest.mark.filterwarnings("ignore:'type' is deprecated:DeprecationWarning")
def test_no_flag_collides_with_megatrons_own() -> None:
    arguments = pytest.importorskip("megatron.training.arguments")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_residual_arguments(arguments.add_megatron_arguments(parser))
