"""What retraining measures of a delivery without Ray: its triggers, its profile and drift, and its problems."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from ray_app import load_config
from ray_app.data.dataset import open_dataset
from ray_app.errors import DataError
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
from ray_app.retrain.rounds import read_delivery
from ray_app.retrain.situation import TriggerFacts, decide_trigger
from tests.support.deliveries import SECTION, VALID, write

QUIET = TriggerFacts(
    champion="3", age_days=1.0, same_data=False, new_rows=0, rows=100, metric="accuracy", then=0.9, now=0.9
)


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
