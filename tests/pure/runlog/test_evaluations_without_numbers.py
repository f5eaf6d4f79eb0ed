"""Metrics that are not a number: JSON has no NaN, and the checkpoint of the verdict is the result."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_app.config.sections import EvaluateSection
from ray_app.runlog.evaluations import (
    Evaluation,
    Verdict,
    early_stop,
    put_evaluation,
    rank_candidates,
    read_evaluations,
    read_scores,
)
from ray_app.runlog.journal import put_event
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import put_json, to_json
from ray_app.watch.terminal import describe_best

NAN = math.nan


def parse_strict_json(text: str) -> object:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def put_evaluations(paths: RunPaths, values: list[float]) -> None:
    for i, value in enumerate(values):
        step = 10 * (i + 1)
        put_evaluation(
            paths,
            Evaluation(
                step, i, f"digest {step}", {"auroc": value, "loss": 1.0}, 5, 0.1, float(step), tables={"f1": [value]}
            ),
        )


def planned(last: int) -> list[int]:
    return list(range(10, last + 1, 10))


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf, {"a": [1, (NAN, 2.0)]}])
def test_json_has_null_for_non_finite_values(tmp_path: Path, value: object) -> None:
    assert "null" in to_json(value)
    put_json(tmp_path / "a.json", {"value": value})
    parse_strict_json((tmp_path / "a.json").read_text())


def test_an_evaluation_with_nan_is_stored_as_json_and_read_back(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    put_evaluations(paths, [NAN])
    parse_strict_json(paths.evaluation(10).read_text())
    [evaluation], [scores] = read_evaluations(paths), read_scores(paths)
    assert math.isnan(evaluation.metrics["auroc"])
    assert math.isnan(scores.metrics["auroc"])
    assert math.isnan(evaluation.tables["f1"][0])
    assert evaluation.metrics["loss"] == 1.0


@pytest.mark.parametrize(("values", "best"), [([NAN, NAN, NAN], [10]), ([NAN, 0.5, NAN], [20]), ([NAN], [10])])
def test_with_patience_the_best_checkpoint_is_that_of_the_verdict(
    tmp_path: Path, values: list[float], best: list[int]
) -> None:
    paths, section = RunPaths(tmp_path), EvaluateSection(patience=2)
    put_evaluations(paths, values)
    assert [e.step for e in rank_candidates(paths, section, "auroc", "max", planned)] == best
    if len(values) == 3 and best == [10]:
        assert early_stop(paths, section, "auroc", "max", planned) == Verdict(20, 10)


VALUES = st.none() | st.sampled_from([0.0, 0.125, 0.25, 0.5, NAN, math.inf, -math.inf])
"""A value of the metric; None for a checkpoint that is never evaluated."""


@given(st.lists(VALUES, max_size=6), st.integers(1, 3), st.sampled_from([0.0, 0.2]), st.sampled_from(["max", "min"]))
@settings(max_examples=100, deadline=None)
def test_the_best_candidate_is_the_best_step_of_any_verdict(
    values: list[float | None], patience: int, min_delta: float, mode: str
) -> None:
    section = EvaluateSection(patience=patience, min_delta=min_delta)
    with TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        for step, value in zip(range(10, 70, 10), values, strict=False):
            if value is None:
                put_event(paths, "evaluation_skipped", 1, step=step)
            else:
                put_evaluation(paths, Evaluation(step, 0, "", {"auroc": value}, 5, 0.1, float(step)))
        verdict = early_stop(paths, section, "auroc", mode, planned)
        candidates = [e.step for e in rank_candidates(paths, section, "auroc", mode, planned)]
    if verdict is not None:
        assert candidates[0] == verdict.best_step


def test_without_patience_no_checkpoint_is_the_best(tmp_path: Path) -> None:
    put_evaluations(RunPaths(tmp_path), [NAN, NAN])
    assert rank_candidates(RunPaths(tmp_path), replace(EvaluateSection(), patience=None), "auroc", "max", planned) == []


@pytest.mark.parametrize(
    ("best", "done", "expected"),
    [
        ({"metric": "auroc", "value": 0.5, "step": 20}, 2, "auroc 0.5000 at step 20"),
        ({"metric": "auroc", "value": None, "step": 10}, 2, "unknown: auroc is not a number in any of 2"),
        (None, 2, "unknown: auroc is not a number in any of 2 evaluations; the newest checkpoint is used"),
        (None, 0, None),
    ],
)
def test_the_final_message_says_when_no_best_checkpoint_is_known(best: object, done: int, expected: str | None) -> None:
    description = describe_best({"best": best, "evaluation": {"done": done}}, "auroc")
    assert description is None if expected is None else description is not None and description.startswith(expected)
