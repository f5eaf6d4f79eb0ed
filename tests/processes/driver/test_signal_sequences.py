"""Signals in any order and at any time end a training with exit code 75 and a checkpoint, from which it continues."""

import dataclasses
import os
import random
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_app import load_config
from ray_app.checkpoint.store import CheckpointStore
from ray_app.cli.main import exit_code
from ray_app.cli.train import EXIT_CODES
from ray_app.driver.single import train_in_process
from ray_app.process import STOP_SIGNALS, stop_at_signals
from ray_app.testing import make_job, read_trained_run
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import SingleProcessMembership
from tests.support import generated_programs
from tests.support.generated_programs import assert_none_differs

SEARCHED = 1000
STEPS = 8
_SIGNALS = [None, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM, signal.SIGINT]
GRAMMAR: dict[str, list[Any]] = {
    "first": _SIGNALS[1:],
    "second": _SIGNALS,
    "third": _SIGNALS,
    # The first one comes after a step, each other one at once or as many steps later; the end counts as one, too.
    "step": list(range(STEPS + 1)),
    **{f"steps before {name}": [0, 1, 2] for name in ("second", "third")},
}
Program = dict[str, Any]
_END = b"\xff"
"""What the process writes when its training has ended; after each step it writes the step."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    program = {name: values[0] for name, values in generated_programs.GRAMMAR.items()} | {"seed": 0, "epochs": 2}
    fields = generated_programs.configuration(program, tmp_path / "data")
    yield make_job(load_config(**fields), tmp_path / "undisturbed")
    torch.set_num_threads(threads)


def train_in_child(job: Job, program: Program | None) -> tuple[int, int]:
    """Trains in a process that gets signals (None: none); returns its exit code and the last step that ran."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os._exit(_train(job, writing))
    os.close(writing)
    step, at = -1, 0
    due: list[tuple[int, signal.Signals]] = []
    for name in ("first", "second", "third") if program else ():
        at += program["step"] if name == "first" else program[f"steps before {name}"]
        due += [(at, program[name])] if program[name] is not None else []
    with open(reading, "rb", buffering=0) as steps:
        for event, news in enumerate(iter(lambda: steps.read(1), b"")):
            step = step if news == _END else news[0]
            for number in (number for at, number in due if at == event):
                os.kill(child, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), step


def _train(job: Job, steps: int) -> int:
    interrupted = threading.Event()

    def work() -> int:
        # A late signal of the sequence meets these handlers.
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        with stop_at_signals(interrupted):
            os.write(steps, b"\0")
            membership = SingleProcessMembership(job.plan.logical_workers, interrupted.is_set)
            train_in_process(job, membership, Hooks(after_step=lambda _, step: os.write(steps, bytes([step]))))
            os.write(steps, _END)
        [*_, last] = CheckpointStore(job.paths).commits()
        return EXIT_CODES["finished" if last.step == job.total_steps else "interrupted"]

    return exit_code(work, "The run failed")


def broken_promise(job: Job, digest: str, program: Program) -> str:
    """Returns the promise that a sequence of signals breaks; empty if it breaks none."""
    job = dataclasses.replace(job, run_root=tempfile.mkdtemp(dir=Path(job.run_root).parent))
    code, step = train_in_child(job, program)
    commits = CheckpointStore(job.paths).commits()
    is_aborted = [program[name] for name in ("first", "second", "third")].count(signal.SIGINT) > 1
    # A second INT ends the process at once, also after the last step and before its checkpoint.
    is_wrong = code == 0 if step < job.total_steps else code == 75 and not is_aborted
    if code not in (0, 75) or is_wrong:
        return f"the exit code is {code} after step {step}"
    if step > 0 and not is_aborted and (not commits or commits[-1].step != step):
        return f"the checkpoints are {[commit.step for commit in commits]} after step {step}"
    code, _ = train_in_child(dataclasses.replace(job, fence=2), None)
    if code:
        return f"the exit code of the continued run is {code}"
    return "" if read_trained_run(job).commit.params_digest == digest else "the continued run differs"


def draw(seed: int) -> Program:
    source = random.Random(seed)
    return {name: source.choice(values) for name, values in GRAMMAR.items()}


def assert_kept(job: Job, seeds: range) -> None:
    assert train_in_child(job, None) == (0, job.total_steps)
    digest = read_trained_run(job).commit.params_digest
    assert_none_differs(GRAMMAR, map(draw, seeds), lambda program: broken_promise(job, digest, program))


@pytest.mark.rest
def test_signals_end_a_training_that_continues(job: Job) -> None:
    assert_kept(job, range(3))


@pytest.mark.search
@pytest.mark.timeout(3600)
def test_sequences_of_signals_end_trainings_that_continue(job: Job) -> None:
    assert_kept(job, range(SEARCHED))
