# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Runs what the study has not run yet, two runs side by side, each on one core.

    python -m examples.study.run --scope main       what `make study` calls
    python -m examples.study.run --cell mhc-L12-1000it-lr0.004-seed1 --results mine.jsonl

Stop it at any moment: a run that has ended is never repeated, one that was cut off goes on from its
last checkpoint. Every run is `launch/pretrain.sh`, thus `megatron.training.pretrain`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from examples.prepare_data import prepare
from examples.study import design, results
from examples.study.design import ARMS, SCOPES, Cell, Losses
from examples.study.results import FILE, Result

ROOT = Path(__file__).parents[2]
SAVE_INTERVAL = 50
_ITERATION = re.compile(rb" iteration +(\d+)/")


class Study:
    """What is done, what runs, and the folder that runs write to.

    Args:
        scope: the cells that are wanted, by the losses that are known.
        folder: of the runs, a folder each.
        file: JSON lines of what is done.
    """

    def __init__(self, scope: Callable[[Losses], Iterable[Cell]], folder: Path, file: Path) -> None:
        self.scope, self.folder, self.file = scope, folder, file
        self.results = results.read(file)
        self.running: dict[str, Run] = {}
        self.stopped = False
        self._lock = threading.Lock()

    def left(self) -> list[Cell]:
        """What is neither done nor running; more is known once learning rates are."""
        done = {result.cell.name for result in self.results} | set(self.running)
        cells = dict.fromkeys(self.scope(results.losses(self.results)))
        return [cell for cell in cells if cell.name not in done]

    def work(self) -> None:
        """What one worker does: a run after the other until none is left."""
        while not self.stopped:
            run = self._next()
            if run is not None:
                self._note(run, run.finish())
            elif not self.running:
                return
            else:
                time.sleep(0.5)  # what another worker runs may settle a learning rate

    def stop(self) -> None:
        """Ends the runs; what they have saved stays."""
        self.stopped = True
        for run in list(self.running.values()):
            run.stop()

    def progress(self) -> str:
        """Where the runs are, and an estimate from what their like has cost."""
        running = list(self.running.values())
        cost = {result.cell.arm: result.cpu_s for result in self.results if not result.failed}
        mean = sum(cost.values()) / len(cost) if cost else 0.0
        open_ones = [(cell, cell.iterations) for cell in self.left()]
        open_ones += [(run.cell, run.cell.iterations - run.iteration) for run in running]
        hours = sum(cost.get(cell.arm, mean) * iterations for cell, iterations in open_ones) / 3600
        now = [f"{run.cell.name} {run.iteration}/{run.cell.iterations}" for run in running]
        estimate = f"about {hours:.1f} h of one core left" if cost else "no estimate yet"
        return f"{', '.join(now)}; {len(open_ones)} known runs, {estimate}"

    def _next(self) -> Run | None:
        with self._lock:
            for cell in self.left()[:1]:
                run = self.running[cell.name] = Run(cell, self.folder / cell.name)
                return run
        return None

    def _note(self, run: Run, result: Result | None) -> None:
        with self._lock:
            if result is not None:
                self.results.append(result)
                results.append(self.file, result)
                told = "FAILED" if result.failed else f"validation loss {result.loss:.4f}"
                print(f"{run.cell.name}: {told}", flush=True)
            del self.running[run.cell.name]


class Run:
    """One run and its folder."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell, self.folder, self.log = cell, folder, folder / "log.txt"
        folder.mkdir(parents=True, exist_ok=True)
        self._begun_at = self._saved
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [ROOT / "launch" / "pretrain.sh"],
                env={**os.environ, **self._variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def iteration(self) -> int:
        """The newest that its log tells of."""
        told = _ITERATION.findall(self.log.read_bytes()) if self.log.exists() else []
        return int(told[-1]) if told else 0

    def finish(self) -> Result | None:
        """Waits for the end of the run; None if it was stopped."""
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self._note_leg(usage.ru_utime + usage.ru_stime)
        if self._process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM):
            return None
        try:
            result = results.result_of(self.cell, self.folder, self._cpu_s)
        except ValueError as error:
            log = self.log.read_text(errors="replace")
            return results.failure(self.cell, f"{log}\n{error}")
        shutil.rmtree(self.folder / "checkpoints")
        return result

    def stop(self) -> None:
        """With all its processes."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGTERM)

    @property
    def _variables(self) -> dict[str, str]:
        residual, *options = ARMS[self.cell.arm].words
        every = max(self.cell.iterations // 5, 1)
        return {
            **design.SIZES,
            **{"DEVICE": "cpu", "GPUS_PER_NODE": "1", "TP": "1", "PP": "1", "VPP": "1"},
            "NUM_LAYERS": str(self.cell.layers),
            "SEED": str(self.cell.seed),
            "LR": str(self.cell.rate),
            "MIN_LR": str(self.cell.rate / 10),
            "TRAIN_ITERS": str(self.cell.iterations),
            "LR_WARMUP_ITERS": str(self.cell.iterations // 20),
            "EVAL_INTERVAL": str(every),
            "EVAL_ITERS": str(min(every, 32)),
            "SPLIT": "90,10,0",
            "DATA_PATH": str(_data(self.folder.parent)),
            "DATA_CACHE_PATH": str(self.folder / "cache"),
            "VOCAB_SIZE": "257",
            "NUM_WORKERS": "0",
            "LOG_INTERVAL": "1",
            "CHECKPOINT_PATH": str(self.folder / "checkpoints"),
            "SAVE_INTERVAL": str(SAVE_INTERVAL),
            "RUN_DIR": str(self.folder),
            "WANDB_MODE": "disabled",
            "PYTHON": sys.executable,
            "RESIDUAL": residual,
            "RESIDUAL_OPTIONS": " ".join([*options, "--residual-log-interval", str(every)]),
        }

    @property
    def _saved(self) -> int:
        tracker = self.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    def _note_leg(self, cpu_s: float) -> None:
        leg = {"iterations": max(self.iteration - self._begun_at, 0), "cpu_s": cpu_s}
        with (self.folder / "legs.jsonl").open("a") as legs:
            legs.write(json.dumps(leg) + "\n")

    @property
    def _cpu_s(self) -> float:
        legs = [json.loads(line) for line in (self.folder / "legs.jsonl").read_text().splitlines()]
        return sum(leg["cpu_s"] for leg in legs) / sum(leg["iterations"] for leg in legs)


def _data(folder: Path) -> Path:
    return folder / "data" / "stdlib"


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scope", choices=SCOPES, default="main")
    parser.add_argument("--cell", type=Cell.parse, help="this one alone, by its name")
    parser.add_argument("--iterations", type=int, help="of every run: for a trial")
    parser.add_argument("--folder", type=Path, default=Path("runs/study"), help="of the runs")
    parser.add_argument("--results", type=Path, default=FILE, help="the JSON lines file")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, a core each")
    given = parser.parse_args(arguments)

    def scope(losses: Losses) -> Iterator[Cell]:
        for cell in [given.cell] if given.cell else SCOPES[given.scope](losses):
            yield replace(cell, iterations=given.iterations) if given.iterations else cell

    study = Study(scope, given.folder.absolute(), given.results)
    summary = prepare(_data(study.folder), max_mib=16, seed=1234)
    print(f"data: {summary['documents']} files, {summary['tokens']:,} tokens", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: study.stop())
    signal.signal(signal.SIGINT, lambda *_: study.stop())
    workers = [threading.Thread(target=study.work) for _ in range(given.jobs)]
    for worker in workers:
        worker.start()
    seconds = 0
    while any(worker.is_alive() for worker in workers):
        time.sleep(1)
        seconds += 1
        if seconds % 60 == 0:
            print(study.progress(), flush=True)


if __name__ == "__main__":
    main()
