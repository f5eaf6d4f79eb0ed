"""The record of a study, and what the report makes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ray_app.config.config import Config
from ray_app.errors import ConfigError, RunExistsError
from ray_app.tune.options import StudyScheduler, TuneSection
from ray_app.tune.record import (
    StudyPaths,
    StudyRecord,
    TrialResult,
    put_record,
    read_record,
    refuse_other_study,
    settings_text,
    study_identity,
)
from ray_app.tune.report import importance, rank_trials, study_page
from ray_app.tune.samplers import Observed
from ray_app.tune.scheduler import Promotion

RECORD = StudyRecord(
    {"seed": 0},
    "accuracy",
    "max",
    [1, 3],
    {n: {"optimizer.init_args.lr": 10.0**-n, "task.init_args.model": "<mlp>" if n % 2 else None} for n in range(4)},
    [
        TrialResult(0, 0, 0.5, 10, 1, "aa", seconds=2.0, ended_s=1.0),
        TrialResult(1, 0, math.nan, 10, 1, "bb", seconds=2.0, workers=2, ended_s=2.0),
        TrialResult(2, 0, None, reason="DataError: <none>", ended_s=3.0),
        TrialResult(3, 0, 0.7, 10, 1, "cc", ended_s=4.0),
        TrialResult(0, 1, 0.9, 30, 3, "dd", ended_s=5.0),
    ],
    [Promotion(0, 1)],
)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    paths = StudyPaths(tmp_path)
    assert read_record(paths) is None
    put_record(paths, RECORD)
    record = read_record(paths)
    assert record is not None
    assert math.isnan(record.results[1].value or 0)
    # NaN differs from itself.
    record.results[1] = RECORD.results[1]
    assert record == RECORD
    assert record.worker_hours == 6.0 / 3600
    assert record.observed(3)[::2] == [Observed(RECORD.trials[0], 0.5), Observed(RECORD.trials[2], None)]
    assert record.newest_results()[0].rung == 1


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    paths = StudyPaths(tmp_path)
    paths.record.write_text('{"identity": {}}')
    with pytest.raises(ConfigError, match=r"study\.json is damaged"):
        read_record(paths)


def test_what_decides_a_study_is_its_identity() -> None:
    section = TuneSection(space={"optimizer.init_args.lr": {"choice": [1, 2]}})
    identity = study_identity(Config(), section)
    refuse_other_study("a", identity, study_identity(Config(), replace(section, trials=99, slots=3)))
    other = study_identity(Config(seed=1), replace(section, scheduler=StudyScheduler(eta=2)))
    with pytest.raises(RunExistsError) as refusal:
        refuse_other_study("a", identity, other)
    assert "+ seed: 1" in str(refusal.value)
    assert "- tune.scheduler.eta: 3" in str(refusal.value)


def test_settings_are_named_by_their_last_part_if_it_is_unique() -> None:
    settings = {"optimizers.a.init_args.lr": 1, "optimizers.b.init_args.lr": 2, "train.grad_clip_norm": None}
    assert settings_text(settings) == "optimizers.a.init_args.lr 1, optimizers.b.init_args.lr 2, grad_clip_norm null"


def test_the_report_ranks_and_escapes_and_names_failures() -> None:
    assert [result.trial for result in rank_trials(RECORD)] == [0, 3, 1, 2]
    page = study_page("s", RECORD, Promotion(0, 1))
    assert "&lt;mlp&gt;" in page
    assert "<mlp>" not in page
    assert "DataError: &lt;none&gt;" in page
    assert "0.9" in page
    empty = StudyRecord({}, "accuracy", "max", [1])
    assert "0 trials" in study_page("s", empty, None)


def test_importance_is_the_share_of_the_variance_that_a_setting_explains() -> None:
    trials = {n: {"a.x": n % 2, "a.y": float(n)} for n in range(8)}
    results = [TrialResult(n, 0, float(n % 2)) for n in range(8)]
    shares = importance(StudyRecord({}, "m", "max", [1], trials, results))
    assert shares == {"a.x": 1.0, "a.y": 0.0}
