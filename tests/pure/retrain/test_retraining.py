"""Retraining without Ray: triggers, validation of deliveries, the gate, and the key of a round."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from scipy.stats import binomtest, chi2
from torch import nn
from torchmetrics import MetricCollection

from ray_app import load_config
from ray_app.checkpoint.format import params_digest
from ray_app.config.config import Config
from ray_app.data import dataset as contents_module
from ray_app.data.arrays import to_column
from ray_app.data.dataset import open_dataset
from ray_app.data.folds import choose_selection_rows
from ray_app.errors import ConfigError, DataError
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
    find_old_files,
    predict_without_losses,
    read_package_files,
    sample_segments,
)
from ray_app.retrain.options import RetrainSection, check_section
from ray_app.retrain.profile import (
    Agreement,
    Column,
    GateRows,
    Profile,
    ReferenceProfiles,
    chi_squared_quantile,
    class_shift,
    describe_column,
    find_problems,
    profile_dataset,
    psi,
)
from ray_app.retrain.rounds import (
    Delivery,
    RetrainPaths,
    Round,
    add_audit_entry,
    make_folder_name,
    make_inputs,
    open_rounds,
    read_audit_entries,
    read_delivery,
)
from ray_app.retrain.situation import Champion, TriggerFacts, decide_trigger
from ray_app.storage.files import to_location
from ray_app.task.metrics import Chunk, combine, resample, score
from ray_app.task.tabular import TabularClassification, TabularRegression

pytestmark = pytest.mark.usefixtures("one_thread")
SECTION = RetrainSection(max_age_days=30, max_drop=0.02)
QUIET = TriggerFacts(
    champion="3", age_days=1.0, same_data=False, new_rows=0, rows=100, metric="accuracy", then=0.9, now=0.9
)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: threads that wait for each other on a busy machine take longer than these tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- triggers


@pytest.mark.parametrize(
    ("facts", "trigger", "reason"),
    [
        (TriggerFacts(), "first", "there is no champion yet"),
        (replace(QUIET, same_data=None), "new data", "training data of champion version 3"),
        (replace(QUIET, new_rows=40), "new data", "40 of 100 training rows"),
        (replace(QUIET, now=0.87), "drop", r"accuracy .* is 0.8700, but was 0.9000 .* worse by 0.0300, more than 0.02"),
        (replace(QUIET, now=float("nan")), "drop", "nan"),
        (replace(QUIET, mode="min", then=1.0, now=1.1), "drop", "worse by 0.1000"),
        (replace(QUIET, drift={"a": 0.3, "b": 0.5, "c": 0.1}), "drift", r"PSI above 0.25 in b \(0.50\), a \(0.30\)$"),
        (replace(QUIET, age_days=31.0), "age", "31.0 days old, more than 30"),
        (replace(QUIET, now=0.95, drift={"a": 0.2}, age_days=30.0), "none", "0 new training rows, fewer than 1"),
        (replace(QUIET, same_data=True, age_days=None), "none", "the data is the training data of champion version 3"),
    ],
)
def test_each_trigger_names_its_measurements(facts: TriggerFacts, trigger: str, reason: str) -> None:
    decision = decide_trigger(facts, SECTION)
    assert (decision.trigger, decision.retrain) == (trigger, trigger != "none")
    assert re.search(reason, decision.reason), decision.reason


def test_the_first_of_several_triggers_is_named_and_judged_data_is_not_trained_again() -> None:
    facts = replace(QUIET, new_rows=40, now=0.1, drift={"a": 9.0}, age_days=99.0)
    order = []
    for calmer in ({}, {"new_rows": 0}, {"now": 0.9}, {"drift": {}}, {"age_days": 0.0}):
        facts = replace(facts, **calmer)
        order.append(decide_trigger(facts, SECTION).trigger)
        judged = decide_trigger(replace(facts, judged="gate refused: no gain"), SECTION)
        assert not judged.retrain
        assert ("already judged: gate refused: no gain" in judged.reason) == (order[-1] != "none")
    assert order == ["new data", "drop", "drift", "age", "none"]
    forced = replace(SECTION, force="labels were corrected")
    assert decide_trigger(facts, forced).reason == "forced: labels were corrected"
    assert not decide_trigger(replace(facts, judged="promoted"), forced).retrain


# --- profile, drift and validation


def write(path: Path, rows: int, seed: int = 0, shift: float = 0.0, nulls: int = 0, groups: int = 50) -> np.ndarray:
    """Writes a file with a column of numbers, one of arrays and labels of three classes; returns the numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    x, images = rng.normal(shift, 1, rows), rng.integers(0, 255, (rows, 2, 2)).astype(np.uint8)
    field, column = to_column("image", images)
    labels = np.arange(rows) % 3
    numbers = pa.array(x, mask=np.arange(rows) < nulls)
    schema = pa.schema([pa.field("x", pa.float64()), field, pa.field("label", pa.int64())])
    pq.write_table(
        pa.Table.from_arrays([numbers, column, pa.array(labels)], schema=schema), path, row_group_size=groups
    )
    return x


def profiled(folder: Path) -> tuple[Profile, dict[str, np.ndarray]]:
    return profile_dataset(open_dataset(str(folder)), ["x", "image", "label"], "label")


def test_a_profile_has_schema_nulls_classes_and_statistics_of_the_data(tmp_path: Path) -> None:
    x = write(tmp_path / "a.parquet", 600, nulls=6)
    profile, rows = profiled(tmp_path)
    assert profile.rows == 600
    assert profile.schema == {"x": "double", "image": "|u1 (2, 2)", "label": "int64"}
    assert profile.nulls == {"x": 0.01, "image": 0.0, "label": 0.0}
    assert profile.classes == {"0": 200, "1": 200, "2": 200}
    assert sorted(profile.columns) == ["image (mean)", "image (std)", "x"]
    assert np.array_equal(rows["x"], x[6:])
    assert profile.columns["x"].mean == pytest.approx(x[6:].mean())
    assert np.allclose(profile.columns["x"].shares, 0.1, atol=0.002)
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_psi_follows_its_formula_and_is_zero_for_another_sample_of_the_same_data(tmp_path: Path) -> None:
    write(tmp_path / "before" / "a.parquet", 3000)
    reference = profiled(tmp_path / "before")[0].columns["x"]
    for seed in range(20):
        assert psi(np.random.default_rng(100 + seed).normal(0, 1, 200), reference) == 0.0
    moved = np.random.default_rng(7).normal(1, 1, 2000)
    shares = np.maximum(np.histogram(moved, [-np.inf, *reference.edges, np.inf])[0] / len(moved), 1e-4)
    expected = sum((p - q) * np.log(p / q) for p, q in zip(shares, reference.shares, strict=True))
    assert psi(moved, reference) == pytest.approx(expected)
    assert expected > 0.5
    assert psi(np.array([]), reference) == 0.0


def test_the_significant_psi_is_the_quantile_of_the_chi_squared_distribution() -> None:
    for degrees in range(1, 41):
        assert chi_squared_quantile(degrees) == pytest.approx(chi2.ppf(0.999, degrees), rel=0.04)


@pytest.mark.parametrize("frequency", [0.05, 0.5, 0.95, 1.0])
def test_a_value_that_many_rows_have_gets_its_own_bin(frequency: float) -> None:
    def flags(share: float) -> np.ndarray:
        return (np.arange(2000) < round(2000 * share)).astype(np.float64)

    reference = describe_column(flags(frequency))
    assert json.loads(json.dumps(reference.edges)) == reference.edges
    assert psi(flags(frequency), reference) == 0.0
    for moved in (1.0 - frequency, 0.3):
        assert (psi(flags(moved), reference) > 0.1) is (moved != frequency)
    # The column has zeros and other numbers.
    amounts = flags(frequency) * np.random.default_rng(0).normal(50, 5, 2000)
    assert psi(amounts, describe_column(amounts)) == 0.0
    assert psi(amounts * flags(frequency / 4), describe_column(amounts)) > 0
    assert psi(amounts, Column(2000, 0.0, 0.0, [0.0], [0.0, 1.0])) == 0.0, (
        "a profile of an earlier version is not compare by its own bins"
    )


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)),
)
def test_the_shift_of_a_class_balance_is_symmetric_and_from_zero_to_one(
    now: dict[str, int], before: dict[str, int]
) -> None:
    assert class_shift(now, before) == class_shift(before, now)
    assert 0 <= class_shift(now, before) <= 1 + 1e-12
    assert class_shift(now, now) == 0


GOOD = Profile(1000, {"x": "double", "label": "int64"}, {"x": 0.0, "label": 0.0}, {"0": 500, "1": 500})
AGREES = Agreement("accuracy", "max", 0.9, 0.95, 0.88)


def problems_of(
    train: Profile = GOOD,
    evaluation: Profile = GOOD,
    agreement: Agreement | None = AGREES,
    gate: GateRows = GateRows(500),
    **fields: Any,
) -> list[str]:
    return find_problems(
        train, evaluation, gate, ReferenceProfiles(GOOD, GOOD, GOOD), agreement, [], replace(SECTION, **fields)
    )


@pytest.mark.parametrize(
    ("deliveries", "message"),
    [
        ({"train": replace(GOOD, schema={"x": "float"})}, "column 'label' is missing, but was int64"),
        ({"train": replace(GOOD, schema=GOOD.schema | {"x": "string"})}, "column 'x' is string, but was double"),
        ({"train": replace(GOOD, rows=699)}, r"699 rows, 70% of the 1,000 of the champion's; allowed are 70%"),
        ({"gate": GateRows(99)}, "has 1,000 rows, and the gate's part of it 99; with fewer than"),
        ({"gate": GateRows(99, replace(GOOD, rows=99))}, "the gate's data has 99; with fewer than"),
        ({"gate": GateRows(500, batch_rows=64)}, "500 rows are 8 batches of evaluate.batch_size = 64, on which"),
        ({"gate": GateRows(1000, replace(GOOD, classes={"0": 1000}))}, "gate data: no row of class 1"),
        ({"gate": GateRows(1000, GOOD), "agreement": replace(AGREES, evaluation=0.5)}, "labels of the gate data"),
        ({"train": replace(GOOD, nulls={"x": 0.02, "label": 0.0})}, "2.0% of column 'x' are missing, but were"),
        ({"train": replace(GOOD, classes={"0": 1000})}, "no row of class 1, of which there were 500"),
        ({"train": replace(GOOD, classes={"0": 800, "1": 200})}, "shifted by 0.30 \\(total variation\\); allowed are"),
        ({"agreement": replace(AGREES, training=0.6)}, "training data: .* accuracy on them is 0.6000, it was"),
        ({"agreement": replace(AGREES, evaluation=0.5)}, "labels of the evaluation data"),
        ({"agreement": replace(AGREES, training=float("nan"))}, "accuracy on them is nan"),
        ({"agreement": Agreement("rmse", "min", 2.0, 2.6, 2.0)}, "rmse on them is 2.6000, it was 2.0000 .* loss of"),
    ],
)
def test_each_problem_of_a_delivery_is_named_with_its_numbers(deliveries: dict[str, Any], message: str) -> None:
    assert any(re.search(message, problem) for problem in problems_of(**deliveries)), problems_of(**deliveries)


def test_a_sound_delivery_has_no_problem_and_a_bad_one_reports_all_of_them() -> None:
    assert problems_of() == []
    assert problems_of(replace(GOOD, rows=700, classes={"0": 700, "1": 300})) == []
    assert find_problems(GOOD, GOOD, GateRows(500), ReferenceProfiles(), None, [], SECTION) == []
    assert problems_of(agreement=replace(AGREES, training=0.1), max_disagreement=0.9) == []
    bad = replace(GOOD, rows=10, nulls={"x": 0.5, "label": 0.0}, classes={"0": 10})
    assert len(problems_of(bad, agreement=replace(AGREES, training=0.1))) == 5


def test_a_damaged_file_and_a_duplicate_file_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "train" / "a.parquet", 200)
    (tmp_path / "train" / "b.parquet").write_bytes((tmp_path / "train" / "a.parquet").read_bytes())
    write(tmp_path / "eval" / "a.parquet", 100, seed=1)
    config = load_config(None, **VALID).replace(
        data__path=str(tmp_path / "train"), data__eval_path=str(tmp_path / "eval")
    )
    assert read_delivery(config).find_duplicates() == [
        "training file b.parquet has the content of training file a.parquet"
    ]
    intact = (tmp_path / "train" / "b.parquet").read_bytes()
    # The footer stays intact.
    (tmp_path / "train" / "b.parquet").write_bytes(b"PAR1" + b"\0" * 500 + intact[504:])
    with pytest.raises(DataError, match=r"(?s)b.parquet, row group 0, column .*: .* restore it or ingest the data"):
        profiled(tmp_path / "train")


# --- the gate

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


def test_new_content_of_the_gate_data_changes_the_key_but_not_the_training_key(tmp_path: Path) -> None:
    for name in ("train", "eval", "gate"):
        write(tmp_path / name / "a.parquet", 100, seed=len(name) * 7 + ord(name[0]))
    config = CONFIG.replace(data__path=str(tmp_path / "train"), data__eval_path=str(tmp_path / "eval"))
    keys = []
    for seed in (1, 2):
        write(tmp_path / "gate" / "a.parquet", 100, seed=seed)
        files = read_delivery(config, gate_path=str(tmp_path / "gate"))
        keys.append(make_inputs(config, SECTION, files, ""))
        assert files == read_delivery(config)
        assert files.find_duplicates() == []
    assert keys[0].training_key == keys[1].training_key
    assert keys[0].key != keys[1].key
    duplicates = read_delivery(config, gate_path=str(tmp_path / "eval")).find_duplicates()
    assert duplicates == ["gate file a.parquet has the content of evaluation file a.parquet"]


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


# --- key and selection

VALID: dict[str, Any] = {
    "task__class_path": "ray_app.task.tabular.TabularClassification",
    "data__path": "train",
    "data__eval_path": "eval",
    "tracking__registered_model": "m",
}
CONFIG: Config = load_config(None, **VALID)


@pytest.mark.rest
def test_the_key_of_a_round_changes_with_each_content_that_it_depends_on(tmp_path: Path) -> None:
    for name in ("train", "eval"):
        write(tmp_path / name / "a.parquet", 100, seed=len(name))
        (tmp_path / name / "_dataset.json").write_text(json.dumps({"classes": ["a", "b", "c"], "made_at": "monday"}))
    config = CONFIG.replace(data__path=str(tmp_path / "train"), data__eval_path=str(tmp_path / "eval"))

    def key(section: RetrainSection = SECTION, champion: str = "", **fields: Any) -> tuple[str, str]:
        inputs = make_inputs(config.replace(**fields), section, read_delivery(config), champion)
        return inputs.key, inputs.training_key

    first_key = key()
    assert key(run__storage_path="/else", scaling__min_workers=1) == first_key
    assert key(replace(SECTION, max_psi=9.0, force="x", min_new_rows=7)) == first_key
    stricter_gate = key(replace(SECTION, min_gain=0.1))
    assert stricter_gate[0] != first_key[0]
    assert stricter_gate[1] == first_key[1]
    (tmp_path / "begin.safetensors").write_bytes(safetensors.torch.save({"w": torch.zeros(1)}))
    init_from = {"train__init_from": str(tmp_path / "begin.safetensors")}
    other_keys = [key(**init_from)]
    (tmp_path / "begin.safetensors").write_bytes(safetensors.torch.save({"w": torch.ones(1)}))
    other_keys += [
        key(**init_from),
        key(optimizer={"class_path": "torch.optim.SGD"}),
        key(train__epochs=3),
        key(champion="c"),
        key(replace(SECTION, start="champion")),
    ]
    (tmp_path / "train" / "_dataset.json").write_text(json.dumps({"classes": ["a", "b", "c"], "made_at": "tuesday"}))
    assert key() == first_key
    (tmp_path / "train" / "_dataset.json").write_text(json.dumps({"classes": ["b", "a", "c"]}))
    other_keys.append(key())
    table = pq.read_table(tmp_path / "eval" / "a.parquet")
    labels = table["label"].to_numpy().copy()
    # Shape and class balance stay the same.
    labels[[0, 1]] = labels[[1, 0]]
    pq.write_table(
        table.set_column(2, table.schema.field(2), pa.array(labels)), tmp_path / "eval" / "a.parquet", row_group_size=50
    )
    other_keys.append(key())
    content = bytearray((tmp_path / "eval" / "a.parquet").read_bytes())
    content[20] ^= 1
    (tmp_path / "eval" / "a.parquet").write_bytes(content)
    other_keys.append(key())
    assert len({first_key, *other_keys}) == 1 + len(other_keys)
    with pytest.raises(DataError, match=r"holds no \*.parquet"):
        read_delivery(config.replace(data__eval_path=str(tmp_path / "none")))


def test_the_key_depends_on_the_code_of_the_optimizer_and_of_nested_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data" / "a.parquet", 100)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "configure_optimizers.py").write_text(
        "import torch\nimport own_rule\n\nclass Own(torch.optim.SGD):\n    pass\n"
    )
    (tmp_path / "own_rule.py").write_text("RATE = 1\n")
    fields = {"data__path": str(tmp_path / "data"), "data__eval_path": str(tmp_path / "data")}
    config = CONFIG.replace(**fields, optimizer={"class_path": "configure_optimizers.Own"})
    nested = CONFIG.replace(
        **fields, task__init_args={"inner": [{"class_path": "configure_optimizers.Own", "init_args": {}}]}
    )
    before = [make_inputs(variant, SECTION, read_delivery(variant), "") for variant in (config, nested)]
    (tmp_path / "own_rule.py").write_text("RATE = 2\n")
    after = [make_inputs(variant, SECTION, read_delivery(variant), "") for variant in (config, nested)]
    for one, other in zip(before, after, strict=True):
        assert one.code != other.code
        assert one.config == other.config


def test_an_unchanged_file_is_not_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    real = contents_module.sha256
    monkeypatch.setattr(contents_module, "sha256", lambda file: hashed.append(file.name) or real(file))
    monkeypatch.setattr(contents_module, "_MIN_AGE_NS", -1)
    for name in ("a", "b"):
        write(tmp_path / "data" / f"{name}.parquet", 100, seed=ord(name))
    config = CONFIG.replace(data__path=str(tmp_path / "data"), data__eval_path=str(tmp_path / "data" / "a.parquet"))
    memory = tmp_path / "memory"
    first = read_delivery(config, memory)
    assert sorted(hashed) == ["a.parquet", "a.parquet", "b.parquet"]
    assert read_delivery(config, memory) == first == read_delivery(config)
    assert sorted(hashed) == ["a.parquet"] * 4 + ["b.parquet"] * 2, "a delivery that is read without a memory used one"
    stat, data = (tmp_path / "data" / "b.parquet").stat(), bytearray((tmp_path / "data" / "b.parquet").read_bytes())
    data[20] ^= 1
    # The length stays the same.
    (tmp_path / "data" / "b.parquet").write_bytes(data)
    os.utime(tmp_path / "data" / "b.parquet", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    hashed.clear()
    changed = read_delivery(config, memory)
    assert hashed == ["b.parquet"]
    assert changed.train["b.parquet"] != first.train["b.parquet"]
    (memory / "train.json").write_text("[")
    assert read_delivery(config, memory) == changed


def test_the_hash_of_a_file_that_was_just_changed_is_not_remembered(tmp_path: Path) -> None:
    """Two changes that keep the length may have the same modification time."""
    write(tmp_path / "data" / "a.parquet", 100)
    config = CONFIG.replace(data__path=str(tmp_path / "data"), data__eval_path=str(tmp_path / "data"))
    read_delivery(config, tmp_path / "memory")
    assert json.loads((tmp_path / "memory" / "train.json").read_text())["files"] == {}


def test_concurrent_audit_entries_are_all_kept(tmp_path: Path) -> None:
    paths = RetrainPaths(tmp_path)
    threads = [threading.Thread(target=add_audit_entry, args=(paths, f"id {i}", "promoted", "", {})) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry["id"] for entry in read_audit_entries(paths)) == sorted(f"id {i}" for i in range(16))


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


# --- record and configuration


def test_stages_and_audit_entries_are_written_once(tmp_path: Path) -> None:
    paths = RetrainPaths(tmp_path)
    one = Round(paths, "k" * 64)
    assert open_rounds(paths) == []
    first = one.put("decided", {"champion": None})
    assert one.put("decided", {"champion": "7"}) == first
    assert open_rounds(paths) == [one]
    one.put("recorded", {})
    assert open_rounds(paths) == []
    for _ in range(2):
        add_audit_entry(paths, "one", "promoted", "better", {"version": "1"})
        add_audit_entry(paths, "two", "rolled back", "worse", {})
    assert [(entry["id"], entry["what"]) for entry in read_audit_entries(paths)] == [
        ("one", "promoted"),
        ("two", "rolled back"),
    ]
    assert sorted(path.name for path in (tmp_path / "audit").iterdir()) == ["000001.json", "000002.json"]


def test_a_model_name_becomes_a_folder_and_a_run_name() -> None:
    assert make_folder_name("digits") == "digits"
    names = [make_folder_name(name) for name in ("a b", "a-b", "..", "a.b.", "ä" * 256, "-")]
    assert len(set(names)) == len(names)
    for name in names:
        assert name.strip("._-") == name
        load_config(None, **VALID, run__name=RetrainPaths(Path("/x") / name).run_name("f" * 64))


def test_all_mistakes_of_a_retraining_configuration_are_refused_together() -> None:
    check_section(CONFIG, SECTION)
    bad_config = CONFIG.replace(
        tracking__registered_model=None,
        data__eval_path=None,
        run__name="x",
        train__init_from="f",
    )
    bad_section = RetrainSection(force=" ", start="champion", min_rows_ratio=2, confidence=1.0, max_psi=-1)
    with pytest.raises(ConfigError) as caught:
        check_section(bad_config, bad_section)
    messages = [
        "force is empty",
        "min_rows_ratio is 2",
        "confidence is 1.0",
        "max_psi is -1",
        "registered_model is missing",
    ]
    messages += [
        "eval_path is missing",
        "run.name is 'x'",
        "init_from is set, but retrain.start",
    ]
    for text in messages:
        assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == 9


def test_the_digest_of_a_delivery_depends_only_on_its_content() -> None:
    one = Delivery({"a": "1", "b": "2"}, {"c": "3"})
    assert one.digest == Delivery({"b": "2", "a": "1"}, {"c": "3"}).digest
    assert one.digest != Delivery({"a": "1"}, {"b": "2", "c": "3"}).digest
    assert find_old_files({"moved": "1", "new": "3"}, one.train) == {"moved"}
