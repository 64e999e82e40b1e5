# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The flags of Megatron's command line and the configuration they make."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_residuals import run
from megatron_residuals.config import ResidualConfig, options_for
from megatron_residuals.flags import (
    CONVERT_BLOCK_LENGTH,
    FROM_FLAGS,
    LR_MULT,
    MECHANISM_FLAG,
    SPECS,
    WD_MULT,
    add_residual_arguments,
    config_from_args,
    flag_name,
    flag_of,
    refuse_misspelt,
    residual_of,
)

ROOT = Path(__file__).resolve().parent.parent


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
    assert "[hc, mhc, ihc, single_pass_mhc; default: 4]" in " ".join(printed.split())


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


def test_options_are_read_beside_a_spec_name_and_names_that_are_none_are_refused() -> None:
    spec = ["--spec", SPECS]
    # beginning with --no, this one was left to Megatron's parser, which does not know it
    config = residual_of([*spec, "hc", "--no-residual-hc-dynamic"])
    assert config == ResidualConfig("hc", hc_dynamic=False)
    assert residual_of([*spec, FROM_FLAGS, "--residual", "mhc"]) == ResidualConfig("mhc")
    assert residual_of(["--lr", "1"]) is residual_of(["--spec", "own.specs", "mhc"]) is None
    with pytest.raises(
        ValueError, match=r"mechanism is 'mch' \(did you mean mhc\?\); allowed: residual, hc"
    ):
        residual_of([*spec, "mch"])
    with pytest.raises(ValueError, match="takes one name behind it"):
        residual_of([*spec, "--residual", "mhc"])
    with pytest.raises(ValueError, match=r"--spec own\.specs mhc builds its own layers"):
        residual_of(["--residual", "mhc", "--spec", "own.specs", "mhc"])


BERT = "from megatron.core.models.bert.bert_model import BertModel\n"
EITHER = "from hybrid_builders import hybrid_builder\n" + BERT
WRONG = {  # arguments of a script: what is said, in one line
    "--residual mhc --residual-stream 2": "no flag --residual-stream (did you mean --residual-str",
    "--resdual mhc --lr 1": "there is no flag --resdual (did you mean --residual?); --help lists",
    "-residual mhc": "there is no flag -residual (did you mean --residual?)",
    "--residual mhc --no-residual-x": "there is no flag --no-residual-x",
    "--residual mch": "mechanism is 'mch' (did you mean mhc?); allowed: ",
    "--residual nope:X": "mechanism is 'nope:X', but nope cannot be imported",
    "--residual": "argument --residual: expected one argument",
    "--residual-streams 4": "no residual mechanism given; add --residual NAME",
    "--residual mhc --residual-streams two": "--residual-streams: invalid int value: 'two'",
    "--residual mhc --residual-block-layers 2 --residual-streams 0": "configuration: block_layers "
    "is 2, but 'mhc' does not read it (only block_attnres); leave it out; streams is 0; give an",
    "--residual mhc --residual-lr-mult -1": "-1 is no finite number of at least 0",
    f"--spec {SPECS} mch": "mechanism is 'mch' (did you mean mhc?); allowed: residual, hc",
}

# Runs each case with torch and Megatron out of reach.
WITHOUT_IMPORTS = """
import contextlib, io, json, sys
class Heavy:
    def find_spec(self, name, *_):
        assert name.split(".")[0] not in ("torch", "megatron"), name
sys.meta_path.insert(0, Heavy())
from megatron_residuals import run
for words in json.load(sys.stdin):
    sys.argv = ["run", *words]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = run.main(words)
    print(json.dumps([status, said.getvalue()]))
"""


@pytest.mark.parametrize("front", ["--residual", "--cpu-hots"])
def test_arguments_in_front_of_the_script_are_sent_behind_it(
    front: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # "unrecognized arguments: --residual", of a flag that there is
    with pytest.raises(SystemExit):
        run.main(["--cpu-host", front, "mhc", "pretrain_gpt.py"])
    said = f"{front} stands where SCRIPT is expected; arguments of the script follow it"
    assert said in capsys.readouterr().err


def test_wrong_flags_are_found_before_any_heavy_import_and_said_in_one_line(tmp_path: Path) -> None:
    # These ended, after the imports of torch and Megatron, in hundreds of lines of usage, or in the
    # words of whatever failed first in the model.
    for name, text in (("gpt", ""), ("other", BERT), ("either", EITHER)):
        (tmp_path / f"{name}.py").write_text(text)
    gpt, other, either = (str(tmp_path / f"{name}.py") for name in ("gpt", "other", "either"))
    cases = [(["--cpu-host", gpt, *words.split()], said) for words, said in WRONG.items()]
    cases.append(([other, "--residual", "mhc"], "other.py trains a BERT model (it imports megatro"))
    cases.append(([either, "--residual", "mch"], "mechanism is 'mch'"))  # its arguments decide
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_IMPORTS],
        input=json.dumps([words for words, _ in cases]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for (words, expected), line in zip(cases, done.stdout.splitlines(), strict=True):
        status, said = json.loads(line)
        assert status == 2, words
        assert expected in said and said.startswith("megatron_residuals.run: error: "), said
        assert said.count("\n") == 1, said


def test_two_different_mechanisms_and_none_are_refused() -> None:
    with pytest.raises(ValueError, match="--spec asks for 'hc' and --residual for 'mhc'"):
        config_from_args(parse("--residual", "mhc"), "hc")
    with pytest.raises(ValueError, match="add --residual NAME"):
        config_from_args(parse())


def test_a_parser_without_our_flags_is_not_told_to_add_one() -> None:
    # Resuming with --use-checkpoint-args brings --spec back, without the flags it was given with.
    args = argparse.Namespace(spec=[SPECS, FROM_FLAGS], use_checkpoint_args=False)
    runner = "this script has no flag --residual: start it as `python -m megatron_residuals.run"
    with pytest.raises(ValueError, match=rf"{runner}.*or name the mechanism.* --spec {SPECS} mhc$"):
        config_from_args(args)
    args.use_checkpoint_args = True
    with pytest.raises(ValueError, match="mhc, and leave out --use-checkpoint-args, which puts"):
        config_from_args(args)


def test_a_flag_the_host_already_has_is_refused_by_name() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(flag_of("streams"))
    parser.add_argument(flag_name(LR_MULT))
    with pytest.raises(RuntimeError, match="has --residual-streams, --residual-lr-mult"):
        add_residual_arguments(parser)


@pytest.mark.filterwarnings("ignore:'type' is deprecated:DeprecationWarning")
def test_no_flag_collides_with_megatrons_own_or_is_taken_for_a_slip() -> None:
    arguments = pytest.importorskip("megatron.training.arguments")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    refuse_misspelt([flag for action in parser._actions for flag in action.option_strings])
    add_residual_arguments(parser)
