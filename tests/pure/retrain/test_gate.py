"""The gate: which challenger is promoted, by metrics that are resampled on the same rows as those of the champion."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from scipy.stats import binomtest
from torch import nn
from torchmetrics import MetricCollection

from ray_app.checkpoint.format import params_digest
from ray_app.data.folds import choose_selection_rows
from ray_app.errors import ConfigError
from ray_app.models.package import make_package
from ray_app.models.registry import Version, load_parameters
from ray_app.plan.manifest import Manifest
from ray_app.retrain import gate
from ray_app.retrain.gate import (
    ClassRecall,
    GateFigures,
    PackageFiles,
    bootstrap_counts,
    compare_models,
    compare_recalls,
    decide_promotion,
    predict_without_losses,
    read_package_files,
    sample_segments,
)
from ray_app.retrain.rounds import RetrainPaths
from ray_app.retrain.situation import Champion
from ray_app.storage.files import to_location
from ray_app.task.metrics import Chunk, combine, resample, score
from ray_app.task.tabular import TabularClassification, TabularRegression
from tests.support.deliveries import SECTION

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: threads that wait for each other on a busy machine take longer than these tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


TASK = TabularClassification(features=["a"], num_classes=3)
TASK.inputs, TASK.classes = 3, ["cat", "dog", "cow"]


def chunks(predicted: np.ndarray, labels: np.ndarray, rows: int = 1, task: Any = TASK) -> list[Chunk]:
    """Returns the chunks of metrics of a model with these predictions."""
    features = np.eye(3, dtype=np.float32)[predicted] * 5
    arrays = {"features": features, "label": labels}
    return list(
        score(task, nn.Identity(), arrays, 64, torch.device("cpu"), chunk_rows=rows, keep={"accuracy", "recall"})
    )


def wrong_for(labels: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Returns predictions of which exactly this share is wrong."""
    rows = np.random.default_rng(seed).permutation(len(labels))[: round(share * len(labels))]
    predicted = labels.copy()
    predicted[rows] = (labels[rows] + 1) % 3
    return predicted


LABELS = np.arange(359) % 3


def compare(champion: np.ndarray, challenger: np.ndarray, rows: int = 4, **fields: Any) -> tuple[GateFigures, bool]:
    section = replace(SECTION, **fields)
    figures = compare_models(
        TASK, "accuracy", "max", chunks(challenger, LABELS, rows), chunks(champion, LABELS, rows), 0, section
    )
    return figures, decide_promotion(figures, section).promote


def test_the_interval_of_a_gain_on_every_row_is_the_gain() -> None:
    """Each resample of the blocks has the same gain, so that its quantiles are known."""
    for challenger, champion, gain in ((LABELS, wrong_for(LABELS, 1.0, 1), 1.0), (LABELS, LABELS, 0.0)):
        figures = compare(champion, challenger)[0]
        assert (figures.gain, figures.low, figures.high) == (gain, gain, gain)


@pytest.mark.rest
def test_a_real_improvement_on_few_rows_passes_the_gate_and_noise_does_not() -> None:
    better, promoted = compare(wrong_for(LABELS, 0.10, 1), wrong_for(LABELS, 0.02, 2))
    assert promoted
    assert better.champion == pytest.approx(1 - 36 / 359)
    assert better.gain == pytest.approx(29 / 359)
    assert 0.04 < better.low < better.gain < better.high < 0.12
    assert compare(wrong_for(LABELS, 0.10, 1), wrong_for(LABELS, 0.02, 2))[0] == better
    promoted_by_chance = [compare(wrong_for(LABELS, 0.10, i), wrong_for(LABELS, 0.09, 100 + i))[1] for i in range(6)]
    assert sum(promoted_by_chance) <= 1
    same = wrong_for(LABELS, 0.1, 1)
    assert not compare(same, same)[1]
    assert compare(same, same, min_gain=-0.01)[1]
    assert not compare(wrong_for(LABELS, 0.02, 1), wrong_for(LABELS, 0.10, 2), min_gain=-0.01)[1]


@pytest.mark.rest
def test_a_challenger_that_never_predicts_a_class_is_refused_with_its_recalls(monkeypatch: pytest.MonkeyPatch) -> None:
    champion = wrong_for(LABELS, 0.5, 3)
    # It predicts no dog and is otherwise correct.
    challenger = np.where(LABELS == 1, 0, LABELS)
    figures, promoted = compare(champion, challenger)
    assert figures.low > 0
    assert not promoted
    assert figures.recalls["dog"] == ClassRecall(
        120, pytest.approx((champion[LABELS == 1] == 1).mean()), 0.0, figures.recalls["dog"].least_drop
    )
    assert 0.2 < figures.recalls["dog"].least_drop < figures.recalls["dog"].champion
    assert (
        f"the recall of class dog falls from {figures.recalls['dog'].champion:.3f} to 0.000 (120 rows)"
        in decide_promotion(figures, SECTION).reason
    )
    assert compare(champion, challenger, max_recall_drop=1.0)[1]
    monkeypatch.setattr("ray_app.retrain.gate._MIN_CLASS_ROWS", 121)
    assert compare(champion, challenger)[0].recalls == {}


def test_the_bounds_of_the_falls_of_all_recalls_hold_together() -> None:
    """By Bonferroni's correction each of the three classes has a third of the error, on one side."""
    champion, challenger = wrong_for(LABELS, 0.1, 1), wrong_for(LABELS, 0.3, 2)
    figures = [compare(champion, challenger, confidence=confidence)[0].recalls["dog"] for confidence in (0.8, 0.95)]
    first, second = (recall.champion - recall.challenger - recall.least_drop for recall in figures)
    # Blocks in which both are equally good leave no doubt.
    assert compare(champion, champion)[0].recalls["dog"].least_drop == 0
    assert second / first == pytest.approx(NormalDist().inv_cdf(1 - 0.05 / 6) / NormalDist().inv_cdf(1 - 0.2 / 6))


@pytest.mark.parametrize(("classes", "rows_per_class", "times"), [(10, 36, 40), (100, 20, 5)])
def test_no_class_is_reported_lost_by_chance(classes: int, rows_per_class: int, times: int) -> None:
    """Two equally good models disagree on a tenth of the rows; without a test of significance a class falls in one of
    four cases.
    """
    rng = np.random.default_rng(0)
    refused = fell = 0
    size = classes * rows_per_class
    truth = np.eye(classes)[rng.permutation(np.repeat(np.arange(classes), rows_per_class))]
    starts = np.arange(0, size, 4)
    counts = bootstrap_counts(0, 200, len(starts))

    def blocks(right: np.ndarray) -> list[Chunk]:
        hits = torch.from_numpy(np.add.reduceat(truth * right[:, None], starts))
        rows = torch.from_numpy(np.add.reduceat(truth, starts))
        return [
            Chunk(4 * i, 4, 0.0, 4.0, {"recall": {"tp": hit, "fn": all - hit}}, [])
            for i, (hit, all) in enumerate(zip(hits, rows, strict=True))
        ]

    for _ in range(times):
        both_right = rng.random(size) < 0.85
        differ = rng.random(size) < 0.1
        only_one_right = rng.random(size) < 0.5
        recalls = compare_recalls(
            blocks(np.where(differ, only_one_right, both_right)),
            blocks(np.where(differ, ~only_one_right, both_right)),
            counts,
            SECTION,
        )
        assert len(recalls) == classes
        refused += any(one.least_drop > SECTION.max_recall_drop for one in recalls.values())
        fell += any(one.champion - one.challenger > SECTION.max_recall_drop for one in recalls.values())
    assert fell >= times / 8, "recalls fell too seldom for this test to show anything"
    assert not refused


def test_the_first_champion_needs_only_a_sufficient_metric() -> None:
    figures = compare_models(TASK, "accuracy", "max", chunks(wrong_for(LABELS, 0.1, 0), LABELS), None, 0, SECTION)
    assert decide_promotion(figures, SECTION).promote
    refused = decide_promotion(figures, replace(SECTION, min_metric=0.95))
    assert not refused.promote
    assert "accuracy of 0.8997 is not as good as retrain.min_metric = 0.95" in refused.reason
    assert not decide_promotion(GateFigures("loss", "min", 10, float("nan")), replace(SECTION, min_metric=1.0)).promote


@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_metric_equal_to_the_minimum_is_good_enough(mode: Literal["max", "min"]) -> None:
    decision = decide_promotion(GateFigures("accuracy", mode, 10, 0.5), replace(SECTION, min_metric=0.5))
    assert decision.promote
    assert decision.reason.endswith("no champion to compare with")


def test_the_reason_names_a_champion_without_a_finite_metric() -> None:
    reason = decide_promotion(GateFigures("auroc", "max", 500, 0.8, math.inf, 0.0, 0.0, 0.0), SECTION).reason
    assert reason.endswith("the champion's is inf, which is not comparable")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_neither_promotes_nor_is_compared_with(value: float, tmp_path: Path) -> None:
    refused = decide_promotion(GateFigures("auroc", "max", 500, value), SECTION)
    assert not refused.promote
    assert "the auroc is not a number" in refused.reason
    champion_not_finite = GateFigures("auroc", "max", 500, 0.8, value, float("nan"), float("nan"), float("nan"))
    assert decide_promotion(champion_not_finite, SECTION).promote
    assert not decide_promotion(replace(champion_not_finite, challenger=value), SECTION).promote
    version = Version("m", "1", "run", "", {"ray_app.metric": "auroc", "ray_app.metric_value": str(value)})
    assert Champion(version, RetrainPaths(to_location(str(tmp_path))), "").metric_when_promoted("auroc") is None


@given(st.floats(-1, 1), st.floats(-1, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_challenger_is_promoted_only_within_the_limits_of_gain_and_recall(
    low: float, min_gain: float, before: float, after: float
) -> None:
    section = replace(SECTION, min_gain=min_gain)
    figures = GateFigures(
        "accuracy",
        "max",
        100,
        0.5,
        0.5,
        low + 0.1,
        low,
        low + 0.2,
        {"cat": ClassRecall(50, before, after, before - after - 0.01)},
    )
    assert decide_promotion(figures, section).promote == (
        low > min_gain and before - after - 0.01 <= section.max_recall_drop
    )


@pytest.mark.rest
@pytest.mark.parametrize("checkpoints", [6, 30])
@pytest.mark.parametrize("times", [200, pytest.param(3000, marks=pytest.mark.search)])
def test_the_best_of_several_checkpoints_is_promoted_by_chance_as_rarely_as_one(
    checkpoints: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All models are equally good: at most 3 % pass the gate, and significantly more where it judges on the rows by
    which the checkpoint was selected.
    """
    # The counts and torchmetrics' classes take the most time.
    monkeypatch.setattr(gate, "bootstrap_counts", cache(bootstrap_counts))
    monkeypatch.setattr(TASK, "metrics", cache(lambda: MetricCollection({})))
    rng = np.random.default_rng(checkpoints)
    rows = 400
    promoted = {"apart": 0, "the same rows": 0}

    def blocks(wrong: np.ndarray) -> list[Chunk]:
        return [Chunk(i, 1, float(one), 1.0, {}, []) for i, one in enumerate(wrong)]

    for i in range(times):
        gate_rows = ~choose_selection_rows(
            Manifest.from_files([("a", [rows])]), {"a": hashlib.sha256(bytes([i % 16])).hexdigest()}
        )
        probability = rng.random(rows) * 0.3
        wrong, champion = rng.random((checkpoints, rows)) < probability, rng.random(rows) < probability
        for selection, selection_rows, judging_rows in (
            ("apart", ~gate_rows, gate_rows),
            ("the same rows", gate_rows, gate_rows),
        ):
            best = wrong[np.argmin(wrong[:, selection_rows].sum(1))]
            figures = compare_models(
                TASK, "loss", "min", blocks(best[judging_rows]), blocks(champion[judging_rows]), i % 16, SECTION
            )
            promoted[selection] += decide_promotion(figures, SECTION).promote
    assert binomtest(promoted["apart"], times, 0.03, "greater").pvalue > 0.01, promoted
    assert binomtest(promoted["the same rows"], times, 0.03, "greater").pvalue < 1e-3, promoted


def test_a_sample_of_row_groups_has_about_as_many_rows_as_are_wanted() -> None:
    """The part of a row that a small group would give is drawn, so that groups of any size give their share."""
    manifest = Manifest.from_files([("a.parquet", [10] * 4000)])
    for max_rows in (1000, 5000, 38_000):
        segments = sample_segments(manifest, max_rows)
        assert sum(segment.rows for segment in segments) == pytest.approx(max_rows, rel=0.1)
        assert all(0 <= segment.first <= 10 - segment.rows for segment in segments)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any), st.integers(1, 200))
def test_a_sample_has_about_as_many_rows_as_requested_spread_over_all_row_groups(
    rows: list[int], num_rows: int
) -> None:
    manifest = Manifest.from_files([("a", rows)])
    segments = sample_segments(manifest, num_rows)
    assert all(s.first >= 0 and s.first + s.rows <= rows[s.row_group] and s.rows > 0 for s in segments)
    assert len({s.row_group for s in segments}) == len(segments)
    total = sum(s.rows for s in segments)
    assert total == sum(rows) if num_rows >= sum(rows) else abs(total - num_rows) <= len(rows)


def test_resampled_metrics_equal_the_metrics_of_the_drawn_rows() -> None:
    predicted = wrong_for(LABELS, 0.3, 5)
    blocks = chunks(predicted, LABELS, rows=10)
    counts = bootstrap_counts(1, 4, len(blocks))
    assert counts.shape == (4, len(blocks))
    assert (counts.sum(1) == len(blocks)).all()
    assert np.array_equal(counts, bootstrap_counts(1, 4, len(blocks)))
    assert not np.array_equal(counts, bootstrap_counts(2, 4, len(blocks)))
    counts = np.concatenate([counts, np.ones((1, len(blocks)), np.int64)])
    for name in ("accuracy", "loss"):
        values = resample(TASK, blocks, name, counts)
        for row, value in zip(counts, values, strict=True):
            rows = np.concatenate(
                [np.arange(10 * i, min(10 * i + 10, 359)) for i in np.repeat(np.arange(len(blocks)), row)]
            )
            assert value == pytest.approx(
                combine(TASK, chunks(predicted[rows], LABELS[rows], 64)).values[name], rel=1e-6
            )
    with pytest.raises(ConfigError, match="'f1' is not a single metric"):
        resample(TASK, blocks, "f1", counts)


@pytest.mark.rest
def test_a_regression_is_compared_by_its_root_mean_squared_error() -> None:
    task = TabularRegression(features=["a"])
    rng = np.random.default_rng(0)
    truth = rng.normal(0, 1, 300).astype(np.float32)

    def blocks(noise: float) -> list[Chunk]:
        arrays = {"features": (truth + rng.normal(0, noise, 300).astype(np.float32))[:, None], "label": truth}
        return list(score(task, nn.Identity(), arrays, 64, torch.device("cpu"), chunk_rows=1, keep={"rmse"}))

    figures = compare_models(task, "rmse", "min", blocks(0.1), blocks(0.3), 0, SECTION)
    assert figures.gain == pytest.approx(0.2, abs=0.04)
    assert decide_promotion(figures, SECTION).promote
    assert not decide_promotion(
        compare_models(task, "rmse", "min", blocks(0.3), blocks(0.1), 0, SECTION), SECTION
    ).promote


BRANCHING = """
from ray_app.task.tabular import TabularClassification

class Branching(TabularClassification):
    def forward(self, model, batch):
        scores = model(batch["features"])
        return scores if scores.sum() > 0 else -scores
"""


@pytest.mark.rest
@pytest.mark.parametrize("form", ["torch.export", "safetensors"])
def test_a_packaged_model_scores_like_the_trained_one_and_keeps_its_parameters(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = TabularClassification
    # torch.export refuses a branch on values, so this package has the parameters only.
    if form == "safetensors":
        (tmp_path / "branching_of_retrain.py").write_text(BRANCHING)
        monkeypatch.syspath_prepend(str(tmp_path))
        kind = importlib.import_module("branching_of_retrain").Branching
    task = kind(features=["a"], hidden=[4], num_classes=3)
    task.inputs, task.classes = 3, ["cat", "dog", "cow"]
    torch.manual_seed(1)
    model = task.build_model()
    arrays = {"features": np.random.default_rng(0).normal(0, 1, (359, 3)).astype(np.float32), "label": LABELS}
    package = make_package(task, model, arrays, tmp_path / "package")
    assert package.format == form
    assert params_digest(load_file(package.folder / "data" / "model" / "model.safetensors")) == params_digest(
        model.state_dict()
    )
    assert params_digest(load_parameters(package.folder / "data" / "model")) == params_digest(model.state_dict())
    files = read_package_files(package.folder / "data" / "model")
    assert not [name for name in files if name.endswith(".py")]
    device = torch.device("cpu")
    champion = PackageFiles("champion", files, task)
    assert champion.inputs == ["features"]
    run = partial(predict_without_losses, champion.load(device))
    packaged = combine(task, score(task, nn.Module(), arrays, 359, device, keep={"accuracy", "recall"}, forward=run))
    trained = combine(task, score(task, model, arrays, 359, device))
    assert packaged.values == {name: trained.values[name] for name in ("accuracy", "loss")}
    assert packaged.tables == {"recall": trained.tables["recall"]}
