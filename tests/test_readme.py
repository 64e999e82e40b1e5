# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The documents say what is so: commands work, printed output is real, links lead somewhere.

Commands are run where a laptop can. Where they need a cluster, or minutes, our part of them is
checked: a make target, the launch script's dry run, the `--residual` flags.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_residuals.cli import build_parser
from megatron_residuals.flags import add_residual_arguments, config_from_args
from megatron_residuals.testing import run_ranks

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "patches" / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


class Block(NamedTuple):
    """A fenced block of a document; line is that of its opening fence."""

    path: Path
    line: int
    info: str
    text: str


class Command(NamedTuple):
    """A command of a block, and the output printed below it, if any."""

    text: str
    output: str = ""

    @property
    def words(self) -> list[str]:
        """Its words, without assignments in front and a comment behind."""
        words = shlex.split(self.text, comments=True)
        while words and ASSIGNMENT.match(words[0]):
            words.pop(0)
        return words


def blocks_of(path: Path) -> Iterator[Block]:
    text = path.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(path, line, match["info"].strip(), textwrap.dedent(match["text"]))


def commands_of(block: Block) -> list[Command]:
    """Of a console block the lines behind `$ `, with what is below them; of others every line."""
    text = block.text.replace("\\\n", " ")
    if block.info == "console":
        found = []
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append(Command(command, output.strip("\n")))
        return found
    lines = (line.strip() for line in text.splitlines())
    whole = [line for line in lines if line and not line.startswith("#")]
    return [Command(part) for line in whole for part in line.split(" && ")]


class Shell:
    """Runs commands in the repository with this Python's tools first on PATH, each once."""

    def __init__(self, folder: Path) -> None:
        tools = Path(sys.executable).parent
        self.folder = folder
        if not (tools / "megatron-residuals").exists():  # the package is not installed here
            script = folder / "megatron-residuals"
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m megatron_residuals "$@"\n')
            script.chmod(0o755)
        inherited = {name: value for name, value in os.environ.items() if "MAKE" not in name}
        path = os.pathsep.join((str(folder), str(tools), os.environ["PATH"]))
        self.env = {**inherited, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
        self.env["PREDICT"] = "0"  # what a dry run adds to the command has tests of its own
        self.run = functools.cache(self._run)

    def _run(self, *words: str, cwd: Path = ROOT, **variables: str) -> str:
        """Standard output; an AssertionError with everything it printed if it fails."""
        run = subprocess.run(
            words,
            cwd=cwd,
            env={**self.env, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, f"{shlex.join(words)}\n{run.stdout}{run.stderr}"
        return run.stdout


def run_it(command: Command, shell: Shell) -> str:
    return shell.run("bash", "-o", "pipefail", "-c", command.text)


def cli_arguments(command: Command, shell: Shell) -> None:
    """A subcommand whose files exist elsewhere: its arguments are parsed."""
    build_parser().parse_args(command.words[1:])


def make_target(command: Command, shell: Shell) -> None:
    shell.run("bash", "-c", re.sub(r"\bmake\b", "make --dry-run", command.text, count=1))


def pip_install(command: Command, shell: Shell) -> None:
    """An installation of this project, built from a copy and not put anywhere."""
    wanted = command.words[-1]
    match = re.fullmatch(r"\.(?:\[(.*)\])?", wanted)
    assert match, f"{command.text!r} does not install this project"
    known = re.search(r"extras_require=\{(.*?)\}", (ROOT / "setup.py").read_text(), re.DOTALL)
    extras = match[1].split(",") if match[1] else []
    assert set(extras) <= set(re.findall(r'"(\w+)":', known[1] if known else "")), (
        f"unknown extra in {wanted}"
    )
    copy = shell.folder / "project"
    if not copy.exists():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "megatron_residuals", copy / "megatron_residuals", ignore=ignored)
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy)
    options = "--dry-run --no-deps --no-build-isolation --no-index --quiet".split()
    shell.run(sys.executable, "-m", "pip", "install", *options, ".", cwd=copy)


def launch_script(command: Command, shell: Shell) -> None:
    """A dry run where the script has one, and the flags that come out of it; else its syntax."""
    (script,) = [ROOT / word for word in command.words if re.match(r"(\./)?launch/", word)]
    if "DRY_RUN" in script.read_text(encoding="utf-8"):
        residual_flags(Command(shell.run("bash", "-c", command.text, DRY_RUN="1")), shell)
    else:
        shell.run("bash", "-n", str(script))


def residual_flags(command: Command, shell: Shell) -> None:
    """The part of a Megatron launch that is ours."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_residual_arguments(parser).add_argument("--spec", nargs="*", default=[])
    known, rest = parser.parse_known_args(command.words)
    unknown = [word for word in rest if word.startswith("--residual")]
    assert not unknown, f"no such flags: {unknown}"
    mechanism = None
    if known.spec:
        module, name = known.spec
        assert hasattr(importlib.import_module(module), name), f"no spec {name} in {module}"
        mechanism = None if name == "from_flags" else name
    if mechanism or any(word.startswith("--residual") for word in command.words):
        config_from_args(known, mechanism)


def patch_exists(command: Command, shell: Shell) -> None:
    """The patch that is applied does."""
    (patch,) = [word for word in command.words if word.endswith(".patch")]
    assert (ROOT / "patches" / Path(patch).name).exists(), f"{patch} does not exist"


def example_help(command: Command, shell: Shell) -> None:
    script = command.words[1 : 3 if command.words[1] == "-m" else 2]
    usage = shell.run(sys.executable, *script, "--help")
    options = [word.partition("=")[0] for word in command.words if word.startswith("--")]
    assert [option for option in options if option not in usage] == [], script


def benchmark_options(command: Command, shell: Shell) -> None:
    position = command.words.index("-m") + 1
    parse = importlib.import_module(command.words[position]).parse
    parse(command.words[position + 1 :])


def accept(command: Command, shell: Shell) -> None:
    """Nothing of this project can be wrong about it."""


# What a command starts with, and how it is checked. Only what `run_it` runs may show output.
TABLE: tuple[tuple[str, Callable[[Command, Shell], str | None]], ...] = (
    (r"megatron-residuals (report|convert)\b", cli_arguments),
    (r"megatron-residuals\b", run_it),
    (r"make\b", make_target),
    (r"(python3? -m )?pip install (--no-deps |-e |--editable )?['\"]?\.", pip_install),
    (r"(python3? -m )?pip install ['\"]?megatron[-_]core\b", accept),
    (r"(bash )?(\./)?launch/\S+\.sh\b", launch_script),
    (r"(torchrun|python3? -m (torch\.distributed\.run|megatron_residuals\.run))\b", residual_flags),
    (r"python3? (examples/(prepare_data|demo_report)\.py|-m examples\.study\.)", example_help),
    (r"python3? -m benchmarks\.\w+", benchmark_options),
    (r"(git (-C \S+ )?apply|patch)\b", patch_exists),
    (r"(git clone|cd|export|source|tensorboard|wandb|benchmarks/gpu_check\.sh)\b", accept),
)


def check(command: Command, shell: Shell) -> None:
    """Check a command by the first line of TABLE that it matches."""
    if not (words := command.words):  # assignments alone
        return
    plain = command.text[command.text.index(words[0]) :].split(" #")[0].strip()
    how = next((how for pattern, how in TABLE if re.match(pattern, plain)), None)
    assert how is not None, (
        f"{command.text!r} is no command that tests/test_readme.py knows. Extend its TABLE with a "
        "pattern and a way to check it, or take the command out of the bash block."
    )
    output = how(command, shell)
    if command.output:
        assert output is not None, (
            f"{command.text!r} is not run by this test, so the output below it cannot be compared; "
            "show it in a block of its own without a language."
        )
        assert output.strip("\n") == command.output.strip("\n"), "it prints otherwise"


ALL_BLOCKS = [block for path in DOCUMENTS for block in blocks_of(path)]


def named(*languages: str) -> list[object]:
    """Parameters: the blocks in these languages, named by document and line."""
    return [
        pytest.param(block, id=f"{block.path.relative_to(ROOT)}:{block.line}")
        for block in ALL_BLOCKS
        if block.info.split()[:1] and block.info.split()[0] in languages
    ]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("shell"))


@pytest.mark.parametrize("block", named("bash", "console"))
def test_every_command_works_and_prints_what_the_document_shows(block: Block, shell: Shell) -> None:
    commands = commands_of(block)
    assert commands, "no command in the block; a console block needs lines that begin with '$ '"
    for command in commands:
        check(command, shell)


@pytest.mark.parametrize("block", named("python"))
def test_python_blocks_import_what_exists_and_run_if_marked(block: Block, shell: Shell) -> None:
    where = f"{block.path.name}:{block.line}"
    tree = ast.parse(block.text, filename=where)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron_residuals"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
    if block.info == "python run":
        run_ranks(1, exec, compile(tree, where, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", named("diff"))
def test_a_diff_of_a_launch_adds_flags_that_exist(block: Block, shell: Shell) -> None:
    added = [line[1:] for line in block.text.splitlines() if line.startswith("+")]
    residual_flags(Command(" ".join(line.rstrip("\\") for line in added)), shell)


def prose_of(path: Path) -> str:
    """A document without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", path.read_text(encoding="utf-8")))


def anchors_of(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", path.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in headings}


def broken_links(path: Path) -> list[str]:
    """Relative links of a document that lead nowhere."""
    prose = prose_of(path)
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)", prose)
    targets += re.findall(r"^\[[^\]]+\]:\s*(\S+)", prose, re.MULTILINE)
    broken = []
    for target in targets:
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        leads = file.exists() and (not anchor or anchor in anchors_of(file))
        if not leads and not re.match(r"[a-z]+:", target):
            broken.append(target)
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    assert broken_links(path) == []


def proofs_of(text: str) -> list[tuple[str, str]]:
    """(row, its cell under "shown by") of every Markdown table that has such a column."""
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if "|" in line
        else None
        for line in text.splitlines()
    ]
    found, column = [], None
    for before, row in zip([None, *rows], rows, strict=False):
        if row is None:
            column = None
        elif before is None:
            column = next((i for i, cell in enumerate(row) if "shown by" in cell.lower()), None)
        elif column is not None and not set("".join(row)) <= set("-: "):
            found.append((row[0], row[column] if column < len(row) else ""))
    return found


def missing_tests(cell: str) -> list[str]:
    """The tests named in a cell, as `path`, `path::test` or `test`, that do not exist."""
    names = [name for name in re.findall(r"[\w/.]+(?:::\w+)?", cell) if "test" in name]
    return [name for name in names if not exists(name)] if names else ["(names no test)"]


def exists(name: str) -> bool:
    file, _, function = name.partition("::") if "/" in name or ".py" in name else ("", "", name)
    files = [ROOT / file] if "/" in file else list(ROOT.glob(f"tests/**/{file or '*.py'}"))
    if not function:
        return any(path.exists() for path in files)
    definition = re.compile(rf"^def {function}\(", re.MULTILINE)
    return any(definition.search(path.read_text("utf-8")) for path in files if path.is_file())


def test_every_row_of_the_support_matrix_names_a_test_that_exists() -> None:
    rows = proofs_of(README.read_text(encoding="utf-8"))
    assert rows, "README.md has no table with a column 'shown by'"
    missing = {row: names for row, cell in rows if (names := missing_tests(cell))}
    assert missing == {}


def document(folder: Path, text: str) -> Path:
    (path := folder / "README.md").write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("commands", "complaint"),
    [
        ("```bash\nrm -rf build\n```", "Extend its TABLE"),
        ("```bash\n# twice\nmake help && make no-such-target\n```", "no-such-target"),
        ("```bash\nmegatron-residuals plan --layers 4 --block-layers 1 --ranks 2\n```", "--ranks"),
        ("```bash\npip install '.[dve]'\n```", "unknown extra"),
        ("```bash\ntorchrun -m megatron_residuals.run a.py --residual mch\n```", "mechanism is"),
        ("```bash\ntorchrun a.py --residual mhc --residual-stream 2\n```", "no such flags"),
        ("```bash\nRESIDUAL=hc launch/pretrain.sh -- --residual-hc-dinamic\n```", "no such flags"),
        ("```bash\npatch -p1 < patches/megatron-core-0.1.patch\n```", "does not exist"),
        ("```console\n$ megatron-residuals --version\nmegatron-residuals 9\n```", "otherwise"),
        ("```console\n$ make help\nmake me a sandwich\n```", "is not run by this test"),
    ],
)
def test_a_command_that_does_not_work_is_found(
    commands: str, complaint: str, shell: Shell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks_of(document(tmp_path, commands))
    with pytest.raises((AssertionError, SystemExit, ValueError)) as failure:
        for command in commands_of(block):
            check(command, shell)
    assert complaint in str(failure.value) + capsys.readouterr().err


def test_output_that_is_right_is_accepted(shell: Shell) -> None:
    block = Block(README, 1, "console", "$ megatron-residuals \\\n  --version\n")
    (command,) = commands_of(block)
    printed = run_it(command, shell)
    check(command._replace(output=printed), shell)
    assert printed.startswith("megatron-residuals ")


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    text = "# One `code` heading\n[a](b.md) [c](#one-code-heading) [d](#two) [e](https://f.g/h)\n"
    assert broken_links(document(tmp_path, text)) == ["b.md", "#two"]


def test_a_row_without_a_test_that_exists_is_found() -> None:
    text = "| a | Shown by |\n|---|---|\n| b | tests/test_readme.py |\n| c \\| d | x |\n\nend"
    assert proofs_of(text) == [("b", "tests/test_readme.py"), ("c \\| d", "x")]
    good = "`tests/test_readme.py::test_a_link_that_leads_nowhere_is_found`, conftest.py"
    assert missing_tests(good) == []
    assert missing_tests("`test_a_link_that_leads_nowhere_is_found`") == []
    nothing = "tests/test_readme.py::test_nothing"
    assert missing_tests(nothing) == [nothing]
