"""What searches of generated programs share that compare `ray_app` with another tool."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from ray_app.plan.order import Plan
from ray_app.runlog.evaluations import read_scores
from ray_app.testing import TrainedRun
from ray_app.train.job import Job
from tests.support import generated_programs as programs
from tests.support.generated_programs import ROWS, Ended, Program

Grammar = dict[str, list[Any]]
SIMPLEST = {name: options[0] for name, options in programs.GRAMMAR.items()}


def draw_choices(grammar: Grammar, seed: int, rare: Container[str] = ()) -> Program:
    """Returns the choices of a seed; four of ten are the simplest, of `rare` keys eleven of twelve."""
    source = random.Random(seed)
    chances = {name: 11 / 12 if name in rare else 0.4 for name in grammar}
    drawn = {
        name: source.choice(all_[: 1 if source.random() < chances[name] else None]) for name, all_ in grammar.items()
    }
    return drawn | {"seed": seed}


def complete(program: Program) -> Program:
    """Returns a program with all keys of `generated_programs`, and with logical workers that share a batch equally."""
    complete = SIMPLEST | program
    complete["accumulate"] &= complete["batch"] != ROWS
    if complete["accumulate"]:
        # The tool takes the mean of the parts' means, so that these must be of one size.
        complete["last_batch"], complete["logical_workers"] = "drop", max(2, complete["logical_workers"])
    while complete["batch"] % complete["logical_workers"]:
        complete["logical_workers"] //= 2
    return complete


def configuration(program: Program, folder: Path, initial: nn.Module) -> dict[str, Any]:
    """Returns the fields of `generated_programs` for a model that is not of its own, without an optimizer."""
    fields = programs.configuration(program | {"form": "module", "optimizer": ("SGD", {}), "schedule": None}, folder)
    state = {name: value.contiguous().clone() for name, value in initial.state_dict().items()}
    safetensors.torch.save_file(state, fields["train__init_from"])
    del fields["optimizer"], fields["schedule"]
    return fields


class Epochs(list[Any]):
    """The batches of an epoch, and those of the next one each time that they are gone through."""

    def __init__(self, epochs: list[list[Any]]) -> None:
        super().__init__(epochs[0])
        self.following = iter(epochs)

    def __iter__(self) -> Iterator[Any]:
        yield from next(self.following)


def planned_batches(program: Program, plan: Plan, make_batch: Callable[[np.ndarray], Any]) -> tuple[Epochs, int]:
    """Returns the batches of the plan, and in how many parts each is where gradients are accumulated."""
    parts, size = program["logical_workers"] if program["accumulate"] else 1, plan.steps_per_epoch
    steps = [
        [make_batch(rows) for rows in np.array_split(step, parts)] for step in programs.batches(plan, program["epochs"])
    ]
    return Epochs([[part for step in steps[k : k + size] for part in step] for k in range(0, len(steps), size)]), parts


def sums(values: Iterable[float], parts: int) -> list[float]:
    """Returns the sums of so many values each."""
    return np.array(list(values)).reshape(-1, parts).sum(1).tolist()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Computes in one thread, as the plain loop and the run do in the same order then."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def compare(job: Job, run: TrainedRun, plain: Ended) -> str:
    """Returns the first difference of losses, state and evaluation beyond rounding."""
    ours = [loss for _, loss, *_ in run.steps]
    if len(ours) != len(plain.losses):
        return f"{len(ours)} steps, {len(plain.losses)} by the plain loop"
    # A number of bfloat16 has 8 significant bits, and the plain loop rounds the gradient of the whole batch, while a
    # run rounds that of each logical worker.
    is_coarse = job.config.train.precision == "bf16" or any(v.dtype == torch.bfloat16 for v in plain.state.values())
    tolerance = 2**-8 if is_coarse else 2e-4
    for step, (a, b) in enumerate(zip(ours, plain.losses, strict=True), 1):
        if not math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance):
            return f"the loss of step {step} is {a}, by the plain loop {b}"
    state = run.snapshot.model
    if set(state) != set(plain.state):
        return f"other names in the state: {sorted(set(state) ^ set(plain.state))}"
    for name, value in plain.state.items():
        distance = _largest(state[name] - value)
        if not distance <= 5 * tolerance * max(1.0, _largest(value)):
            return f"{name} differs by {distance}"
    evaluations = read_scores(job.paths)
    for name, value in plain.evaluation.items():
        if not math.isclose(evaluations[-1].metrics[name], value, rel_tol=5 * tolerance, abs_tol=5 * tolerance):
            return f"{name} of the evaluation is {evaluations[-1].metrics[name]}, by the plain loop {value}"
    return ""


def _largest(values: Tensor) -> float:
    """Returns the largest distance from 0, which complex numbers have as well; 0 without values."""
    return values.abs().double().max().item() if values.numel() else 0.0
