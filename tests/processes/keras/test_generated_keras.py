"""Generated Keras programs give what `Model.fit` gives, and the same bits on one and on two workers.

KERAS_PROGRAMS is the number of programs of the search; a tenth of them is also trained on workers.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_app.config.config import Config
from ray_app.errors import RayAppError
from ray_app.keras import fit
from ray_app.testing import WorkerPool, make_job
from tests.support import generated_keras as programs
from tests.support.generated_keras import GRAMMAR, REFUSALS, Program
from tests.support.generated_programs import assert_none_differs
from tests.support.program_search import one_thread  # noqa: F401
from tests.support.quick_cases import only_quick

SEARCHED = int(os.environ.get("KERAS_PROGRAMS", "2000"))
SIMPLEST = {name: options[0] for name, options in GRAMMAR.items()} | {"seed": 0}
CHOICES: list[Program] = [
    {},
    {"inputs": "two", "target": "class", "optimizer": 4, "update": "undecayed", "validation": "data"},
    {"form": "adds a loss", "inputs": "masked", "weights": "zeros", "schedule": 1, "epochs": 4},
    {"inputs": "pixels", "body": "regularized", "target": "one hot", "update": "global_clipnorm", "then": "predict"},
    # Each of these was once another number, a crash or a refusal.
    {"target": "class", "loss": 1, "weights": "column", "validation": "data", "metrics": "weighted"},
    {"target": "class", "loss": 1, "validation": "weighted", "metrics": "weighted"},
    {"target": "binary", "target type": "bool", "axis": True, "weights": "classes", "loss": 2},
    {"inputs": "masked", "target": "binary", "loss": 1, "metrics": 1, "validation": "data"},
    {"inputs": "masked", "metrics": 1, "weights": "zeros"},
    {"weights": "classes", "validation": "weighted", "target": "class"},
    {"target": "numbers", "loss": 1, "validation": "split", "batch": 8},
    {"optimizer": 11, "update": "scaled", "callback": "lambda"},
    {"optimizer": 9, "update": "scaled", "then": "fit"},
    {"update": "averaged", "callback": "early, best", "epochs": 1, "batch": 8},
    {"schedule": 2, "update": "scaled", "callback": "recorder"},
    {"schedule": 1, "batch": 7, "optimizer": 10, "callback": "nan", "validation": "data", "metrics": 0, "epochs": 4},
    {"schedule": 3, "batch": 8, "callback": "recorder", "then": "fit"},
    {"validation": "seldom", "callback": "schedule", "epochs": 4},
    {"validation": "seldom", "first epoch": 1},
    {"inputs": "sequence", "target": "two", "weights": "each output", "callback": "set back", "then": "freeze"},
    {"body": "nested", "metrics": 1, "then": "compile"},
    {"target": "binary", "axis": True, "target type": "uint8", "then": "evaluate"},
    {"inputs": "tokens", "target": "per token", "weights": "column", "then": "evaluate"},
    {"body": "spectral", "batch": 8, "epochs": 4, "validation": "data", "then": "fit"},
]


@pytest.fixture(scope="module")
def worker_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """Worker processes that have imported Keras."""
    preloaded = ("ray_app.testing", "torchmetrics", "ray_app.task.keras", "tests.support.generated_keras")
    with WorkerPool(2, tmp_path_factory.mktemp("stores"), preloaded) as pool:
        yield pool


class Configured(Exception):
    """`fit` has made a configuration."""


def configure(program: Program, folder: Path) -> Config:
    """Returns the configuration that `fit` makes of a program for two workers."""

    def stop(config: Config, *_: Any, **__: Any) -> None:
        raise Configured(config)

    fields = {"run.storage_path": str(folder), "tracking.enabled": False, "scaling.logical_workers": 2}
    (_, model), (rows, options) = programs.make_pair(program), programs.fit_options(program)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[fit.__module__], "open_run", stop)
        with pytest.raises(Configured) as configured:
            fit(model, *rows, workers=2, fields=fields, **options)
    config: Config = configured.value.args[0]
    return config


def worker_difference(pool: WorkerPool, program: Program) -> str:
    """Returns whether a program has other bits on two workers than on one; empty if not, or if it is refused."""
    program = programs.adapt(program)
    with programs.precision_of(program), tempfile.TemporaryDirectory() as folder:
        try:
            job = make_job(configure(program, Path(folder)), Path(folder) / "run")
        except RayAppError as error:
            # In this process the program is trained by Keras, too, which may refuse it.
            return "" if any(text in str(error) for text in REFUSALS) else programs.difference(program)
        one, two = (pool.train_new_run(job, size) for size in (1, 2))
    if one.steps != two.steps:
        return f"{one.steps} on one worker, {two.steps} on two"
    return "" if one.digests == two.digests else "other bits on two workers"


def draw_for_workers(seed: int) -> Program:
    """Returns a program of a seed without callbacks and with batches that two workers share."""
    program = programs.draw(seed)
    return program | {"callback": "none", "batch": program["batch"] // 2 * 2 + program["batch"] % 2 * 2}


@pytest.mark.parametrize("choices", only_quick(CHOICES, *CHOICES[:8]), ids=str)
def test_a_generated_program_gives_what_keras_gives(choices: Program) -> None:
    assert not programs.difference(SIMPLEST | choices)


@pytest.mark.rest
def test_a_generated_program_has_the_same_bits_on_two_workers(worker_pool: WorkerPool) -> None:
    for choices in [*CHOICES[1:3], CHOICES[-1]]:
        assert not worker_difference(worker_pool, SIMPLEST | choices)


def test_another_loss_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains by another power than Keras does."""
    program = SIMPLEST | {"loss": 3}
    assert not programs.difference(program)
    powers = iter((3.0, 2.9))
    monkeypatch.setitem(programs.LOSSES, "number", [lambda: programs.Power(next(powers))])
    assert "loss" in programs.difference(program)


@pytest.mark.search
@pytest.mark.timeout(7200)
def test_generated_programs_give_what_keras_gives() -> None:
    assert_none_differs(GRAMMAR, map(programs.draw, range(SEARCHED)), programs.difference)


@pytest.mark.search
@pytest.mark.timeout(3600)
def test_generated_programs_have_the_same_bits_on_two_workers(worker_pool: WorkerPool) -> None:
    drawn = map(draw_for_workers, range(SEARCHED // 10))
    assert_none_differs(GRAMMAR, drawn, lambda program: worker_difference(worker_pool, program))
