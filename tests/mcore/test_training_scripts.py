# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""An unmodified training script on two ranks: with ``--spec`` alone, and through our runner."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import megatron.core
import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_residuals.mcore import compat, install
from tests import scripts
from tests.scripts import Order, Scripts

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "pretrain_gpt.py"
RUNNER = ["-m", "megatron_residuals.run"]
SEAMS_REPORT = re.compile(r"^megatron_residuals on megatron-core ", re.MULTILINE)
MODEL_REPORT = re.compile(r"^megatron_residuals \d\S*: (.*)$", re.MULTILINE)
ITERATION = re.compile(r"iteration +(\d+)/ +4 \|.*lm loss: (\S+) \|.*grad norm: (\S+) \|")

# PP2 x VPP2 with one layer per stage. Dropout is off: on the CPU it shares its generator with the
# data loader, which draws once when a run starts, so that no resumed run could repeat it. Sequences
# are longer than they need be, since every rank shuffles the host's 200 million made-up tokens.
TOY = """
--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 128
--max-position-embeddings 128 --hidden-dropout 0 --attention-dropout 0
--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2
--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-2 --min-lr 1e-3
--mock-data --split 98,1,1 --tokenizer-type NullTokenizer --vocab-size 63 --num-workers 0
--make-vocab-size-divisible-by 1 --log-interval 1 --eval-iters 0 --eval-interval 9
--ckpt-format torch_dist --transformer-impl local --distributed-backend gloo
--use-cpu-initialization --no-gradient-accumulation-fusion --no-masked-softmax-fusion
--no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
""".split()

host = pytest.mark.host
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.training") is None,
        reason="this Megatron-Core has no megatron.training (wheels before 0.17)",
    ),
]


class Iteration(NamedTuple):
    """The figures of one printed line, as printed."""

    loss: str
    grad_norm: str


class Run(scripts.Run):
    """A finished command, and what Megatron printed of its steps."""

    @property
    def lines(self) -> list[tuple[int, Iteration]]:
        """Every printed line, an iteration that ran twice twice."""
        found = ITERATION.findall(self.log)
        return [(int(number), Iteration(*figures)) for number, *figures in found]

    @property
    def iterations(self) -> dict[int, Iteration]:
        assert len(dict(self.lines)) == len(self.lines)
        return dict(self.lines)


def start(folder: Path, command: list[str]) -> Run:
    """Run a Python of its own in a folder, with nothing in its environment but what it needs."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}
    env |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return Run(done.returncode, done.stdout)


def train(
    scripts: Scripts, folder: Path, command: list[str], *, toy: Sequence[str] = TOY, ranks: int = 2
) -> Run:
    """Train the toy with ``command``, successfully."""
    done = Run(*scripts.run(Order([*command, *toy], folder, ranks, training=True)))
    assert done.status == 0, done.log[-4000:]
    return done


@pytest.fixture(scope="module")
def spec_run(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """The folder and the log of a run with ``--spec`` alone, saved every second step."""
    folder = tmp_path_factory.mktemp("spec")
    command = [str(SCRIPT), "--spec", "megatron_residuals.specs", "block_attnres"]
    command += ["--save", "saved", "--save-interval", "2"]
    return folder, train(scripts, folder, command)


@host
def test_spec_alone_trains_with_the_named_mechanism_and_reports_once(
    spec_run: tuple[Path, Run],
) -> None:
    _, done = spec_run
    assert len(SEAMS_REPORT.findall(done.log)) == 1
    assert MODEL_REPORT.findall(done.log) == ["block_attnres()"]
    assert list(done.iterations) == [1, 2, 3, 4]
    first, last = (float(done.iterations[number].loss) for number in (1, 4))
    # ln 63 = 4.14 is the loss of a guess; in four steps it falls a little and does not blow up
    assert 3.9 < last < first < 4.4


@host
def test_the_example_predicts_several_tokens_in_its_last_stage(
    scripts: Scripts, tmp_path: Path
) -> None:
    command = [str(SCRIPT), "--spec", "megatron_residuals.specs", "mhc", "--mtp-num-layers", "1"]
    command += ["--position-embedding-type", "rope"]
    done = train(scripts, tmp_path, command)
    further = [float(loss) for loss in re.findall(r"mtp_1 loss: (\S+) \|", done.log)]
    assert len(further) == 4
    assert 3.9 < further[-1] < further[0] < 4.4


# Rank 1 is killed with half of the fourth step done and messages on their way: a step has eight
# forward passes of a block, four micro-batches through two chunks.
KILL_IN_STEP_4 = """
import os, signal
if os.environ["RANK"] == "1":
    from megatron_residuals.mcore.block import ResidualBlockMixin
    forward, passes = ResidualBlockMixin.forward, []
    def counted(self, *args, **kwargs):
        passes.append(1)
        if len(passes) == 3 * 8 + 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(self, *args, **kwargs)
    ResidualBlockMixin.forward = counted
"""


def test_a_rank_killed_within_a_step_costs_nothing_but_the_steps_since_the_last_checkpoint(
    scripts: Scripts, spec_run: tuple[Path, Run], tmp_path: Path
) -> None:
    command = [*RUNNER, "--cpu-host", str(SCRIPT), "--residual", "block_attnres"]
    command += ["--save", "saved", "--save-interval", "2", "--load", "saved"]
    life = Order([*command, *TOY], tmp_path, ranks=2, training=True)
    killed = Run(*scripts.run(life._replace(before=KILL_IN_STEP_4)))
    assert "--- rank 1\ndied without a traceback (killed by SIGKILL)" in killed.log
    done = train(scripts, tmp_path, command)
    folder, whole = spec_run
    assert list(killed.iterations) == [1, 2, 3] and list(done.iterations) == [3, 4]
    for life in (killed, done):
        for number, figures in life.iterations.items():
            assert figures.grad_norm == whole.iterations[number].grad_norm
        assert life.iterations[3].loss == whole.iterations[3].loss
    expected = stored_tensors(folder / "saved" / "iter_0000004")
    actual = stored_tensors(tmp_path / "saved" / "iter_0000004")
    assert actual.keys() == expected.keys()
    assert any(name.startswith("optimizer.") for name in expected)
    assert any("mlp_residual.query" in name for name in expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a ``torch_dist`` checkpoint, whole."""
    reader = checkpoint.FileSystemReader(folder)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is one process
        checkpoint.load(tensors, storage_reader=reader)
    return tensors


@host
def test_the_runner_adds_the_flags_reports_once_and_resumes_where_it_saved(
    scripts: Scripts, tmp_path: Path
) -> None:
    command = [*RUNNER, "--cpu-host", str(SCRIPT)]
    command += ["--residual", "mhc", "--residual-streams", "2"]
    whole = train(scripts, tmp_path, [*command, "--save", "saved", "--save-interval", "1"])
    assert (tmp_path / "saved" / "iter_0000001" / "metadata.json").is_file()
    resumed = train(scripts, tmp_path, [*command, "--load", "saved", "--ckpt-step", "1"])
    for done in (whole, resumed):
        assert len(SEAMS_REPORT.findall(done.log)) == 1
        for seam in (*install.SEAMS, *install.AROUND, install.OPTIMIZER):
            line = f"  replaced  {seam.module}.{seam.name}: {seam.purpose}"
            assert done.log.count(line) == 1
        assert MODEL_REPORT.findall(done.log) == ["mhc(streams=2)"]
    assert list(whole.iterations) == [1, 2, 3, 4]
    assert list(resumed.iterations) == [2, 3, 4]
    for number in (2, 3, 4):
        assert resumed.iterations[number].grad_norm == whole.iterations[number].grad_norm
    # Megatron averages the loss of a run's first iteration into the line of its second, which
    # is another one after resuming; from the third line on a line is of its iteration alone.
    assert resumed.iterations[4].loss == whole.iterations[4].loss
    assert len({figures.loss for figures in whole.iterations.values()}) == 4


def hybrid(pattern: str) -> list[str]:
    """The toy with layers of a hybrid model; its stages are in the pattern."""
    gpt = ("--num-layers 4", "--num-virtual-stages-per-pipeline-rank 2")
    words = " ".join(TOY)
    for option in gpt:
        words = words.replace(option, "")
    words += " --mamba-state-dim 8 --mamba-head-dim 8 --mamba-num-groups 2"
    return [*words.split(), "--hybrid-layer-pattern", pattern, "--position-embedding-type", "rope"]


@host
def test_a_hybrid_script_trains_through_the_runner_and_resumes_where_it_saved(
    scripts: Scripts, tmp_path: Path
) -> None:
    command = [*RUNNER, "--cpu-host", str(SCRIPT.with_name("pretrain_hybrid.py"))]
    command += ["--residual", "block_attnres", "--residual-block-layers", "2"]
    toy = hybrid("M*|-|M*|-")
    save = ["--save", "saved", "--save-interval", "2"]
    whole = train(scripts, tmp_path, [*command, *save], toy=toy)
    if compat.host_version().release >= (0, 19):  # goes on from what a killed run has left
        save[1] = "killed"
        life = Order([*command, *save, *toy], tmp_path, ranks=2, training=True)
        killed = scripts.run(life._replace(before=KILL_IN_STEP_4))
        assert "--- rank 1\ndied without a traceback (killed by SIGKILL)" in killed.log
    resumed = train(scripts, tmp_path, [*command, "--load", save[1], "--ckpt-step", "2"], toy=toy)
    seam = f"  replaced  {compat.HYBRID_MODEL}.__init__: builds stacks that carry a residual state"
    assert whole.log.count(seam) == 1
    assert MODEL_REPORT.findall(whole.log) == ["block_attnres(block_layers=2)"]
    assert "depth: 3 blocks of 2 sublayers over 6" in whole.log
    assert list(whole.iterations) == [1, 2, 3, 4] and list(resumed.iterations) == [3, 4]
    for number in (3, 4):
        assert resumed.iterations[number].grad_norm == whole.iterations[number].grad_norm


def test_the_megatron_beside_the_script_is_the_one_that_runs(tmp_path: Path) -> None:
    # A checkout of Megatron-LM, started from elsewhere, where another Megatron is installed: the
    # runner imported that one first, and trained with it.
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    checkout.mkdir()
    elsewhere.mkdir()
    (checkout / "megatron").symlink_to(Path(megatron.core.__file__).parents[1])
    script = checkout / "pretrain_gpt.py"
    script.write_text(
        "import sys, megatron.core, megatron.training.arguments as arguments\n"
        "print('host', megatron.core.__file__)\nprint('flags', arguments.__file__)\n"
        "print('path', sys.path[0])\n"
    )
    done = start(elsewhere, [*RUNNER, "--cpu-host", str(script), "--residual", "mhc"])
    assert done.status == 0, done.log[-4000:]
    assert f"host {checkout}/megatron/core/" in done.log
    assert f"flags {checkout}/megatron/training/" in done.log
    assert f"path {checkout}\n" in done.log


# A script that builds its layers itself: as if it had never heard of --spec.
DEAF = f"""
import sys
at = sys.argv.index("--spec")
del sys.argv[at : at + 3]
sys.path.insert(0, {str(SCRIPT.parent)!r})
import pretrain_gpt
pretrain_gpt.main()
"""


@host
def test_a_script_that_does_not_read_the_spec_ends_instead_of_training_a_plain_model(
    scripts: Scripts, tmp_path: Path
) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    command = [*RUNNER, "--cpu-host", "deaf.py", *TOY, "--residual", "mhc"]
    done = Run(*scripts.run(Order(command, tmp_path, ranks=2, training=True)))
    assert done.status != 0
    assert "ValueError: a residual was asked for, but the script has built a model" in done.log
    assert not done.lines


@host
def test_flags_that_contradict_each_other_end_the_run_before_it_starts(tmp_path: Path) -> None:
    flags = ["--residual", "mhc", "--residual-block-layers", "2"]
    done = start(tmp_path, [*RUNNER, str(SCRIPT), *flags, *TOY])
    assert done.status == 2
    assert done.log.startswith("megatron_residuals.run: error: ")
    assert "block_layers is 2, but 'mhc' does not read it" in done.log
    # nothing of torch or Megatron, which would start torch.distributed, has had its say
    assert "Traceback" not in done.log and len(done.log.splitlines()) <= 3
