"""Trials that a study takes from another one, with slots that train in this process, without Ray."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.runlog.output import TextConsole
from ray_app.runlog.stored_config import read_config
from ray_app.tune import study
from ray_app.tune.record import StudyPaths
from ray_app.tune.slots import Outcome
from ray_app.tune.study import Study, run_study
from ray_app.tune.trials import TrialJob, run_trial

RATES = {"good": 0.02, "poor": 1.0e-4, "bad": 1.0e-6}
RunStudy = Callable[..., Study]


class SlotsInProcess:
    """Slots in which one trial after the other trains in this process."""

    def __init__(self, config: Config, count: int) -> None:
        self.count, self.jobs = count, list[TrialJob]()

    def __enter__(self) -> SlotsInProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def free(self) -> int:
        return self.count - len(self.jobs)

    def start(self, job: TrialJob) -> None:
        self.jobs.append(job)

    def wait(self, timeout_s: float) -> list[Outcome]:
        del timeout_s
        jobs = [self.jobs.pop() for _ in self.jobs[:1]]
        return [(job, run_trial(job)) for job in jobs]


@pytest.fixture
def run(make_short_config: Callable[..., Config], digits: Path, monkeypatch: pytest.MonkeyPatch) -> RunStudy:
    """Runs a study of a rate, for the names in `RATES`."""
    monkeypatch.setattr(study, "Slots", SlotsInProcess)
    monkeypatch.setattr(study, "cluster", lambda _: nullcontext())

    def run(name: str, *rates: str, every_epochs: int = 1, **fields: Any) -> Study:
        config = make_short_config(
            data__eval_path=str(digits / "eval"),
            train__epochs=2,
            train__max_steps=None,
            checkpoint__every_steps=None,
            checkpoint__every_epochs=every_epochs,
            run__name=None,
        )
        space = {"schedule.init_args.max_lr": {"choice": [RATES[rate] for rate in rates]}}
        tune = {"name": name, "space": space, "sampler": "grid", "scheduler": {"eta": 2}, "slots": 2, **fields}
        return run_study(config, tune, TextConsole(quiet=True))

    return run


def trained(study: Study) -> dict[tuple[int, int], bool]:
    """Returns whether a trial has trained in a rung."""
    return {(result.trial, result.rung): result.seconds > 0 for result in study.record.results}


def decisions(study: Study) -> Any:
    results = sorted((r.trial, r.rung, r.value, r.step, r.epochs, r.params_digest) for r in study.record.results)
    return study.winner, study.settings, study.record.promotions, results, study.record.end


@pytest.mark.rest
def test_trials_of_another_study_are_not_trained_again(run: RunStudy) -> None:
    run("first", "good", "poor")
    # The first trial was not promoted there, and is promoted here.
    second, expected = run("second", "poor", "bad", reuse=["first"]), run("fresh", "poor", "bad")
    assert trained(second) == {(0, 0): False, (1, 0): True, (0, 1): True}
    assert decisions(second) == decisions(expected)
    third = run("third", "good", "poor", reuse=["first", "second"])
    assert not any(trained(third).values())
    assert third.result.summary["status"] == "finished"
    assert read_config(StudyPaths(third.path).runs(0, None)[0]).run.storage_path == str(third.path / "trials")


@pytest.mark.rest
def test_trials_with_other_evaluations_or_data_are_trained(run: RunStudy, digits: Path) -> None:
    run("first", "good", "poor")
    # The value of a trial is that of its best checkpoint.
    other = run("other", "good", "poor", every_epochs=2, reuse=["first"])
    assert all(trained(other).values())
    for file in (digits / "eval").glob("*.parquet"):
        os.utime(file)
    changed = run("changed", "good", "poor", reuse=["first"])
    assert all(trained(changed).values())
    with pytest.raises(ConfigError, match=r"tune\.reuse has 'nothing'"):
        run("last", "poor", reuse=["nothing"])
