"""Shard policies, balanced sampling and weights: row counts, purity and bit-identical training on any workers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from ray_app.data.dataset import open_dataset, read_labels
from ray_app.driver.finalize import stored_job, summarize
from ray_app.errors import ConfigError, DataError
from ray_app.models.inputs import WithoutTargets
from ray_app.plan.assignment import logical_workers_of
from ray_app.plan.manifest import DataFacts, Manifest
from ray_app.plan.order import Classes, Cursor, Plan
from ray_app.preflight.data_summary import describe_training_columns
from ray_app.preflight.prepare import claim, prepare
from ray_app.runlog.paths import RunPaths
from ray_app.task.image import ImageClassification
from ray_app.task.tabular import TabularClassification, TabularRegression
from ray_app.testing import WorkerPool, cache_windows, stream_windows
from ray_app.train.job import Job
from tests.support.bad_rows import BadRowImages, job_of
from tests.support.bit_identity import train_and_resume
from tests.support.local_world import CPU, TinyImages, feed_of, make_job, write_images

files = st.lists(st.lists(st.integers(0, 25), max_size=4), min_size=1, max_size=7).filter(
    lambda f: sum(map(sum, f)) > 0
)


@st.composite
def plans(draw: st.DrawFn, *shards: str, balanced: bool = False) -> Plan:
    manifest = Manifest.from_files((f"part-{i}.parquet", groups) for i, groups in enumerate(draw(files)))
    logical = draw(st.integers(1, 5))
    classes = None
    if balanced:
        skew = draw(st.sampled_from([1, 3]))
        labels = (
            np.array(draw(st.lists(st.integers(0, 4), min_size=manifest.num_rows, max_size=manifest.num_rows))) // skew
        )
        classes = Classes.of(manifest, np.unique(labels, return_inverse=True)[1].astype(np.uint8))
    return Plan(
        manifest=manifest,
        seed=draw(st.integers(0, 99)),
        logical_workers=logical,
        global_batch_size=logical * draw(st.integers(1, 6)),
        shuffle_window_rows=draw(st.integers(1, 40)),
        keep_last=draw(st.booleans()),
        shard=draw(st.sampled_from(shards)),
        classes=classes,
    )


def count_uses(plan: Plan, epoch: int) -> list[Counter[int]]:
    """Counts how often each logical worker uses each row in an epoch, and checks the invariants of all plans."""
    order = plan.epoch(epoch)
    counted = [Counter[int]() for _ in range(plan.logical_workers)]
    for step in range(plan.steps_per_epoch):
        sizes = []
        for v, counter in enumerate(counted):
            rows = order.rows_at(v, step).tolist()
            counter.update(rows)
            sizes.append(len(rows))
        assert sizes == plan.rows_of_step(step)
        assert sum(sizes) == plan.global_rows(step)
        assert sizes[0] == max(sizes) > 0, "logical worker 0 has fewer rows than another, or none"
    assert sum(counter.total() for counter in counted) == plan.rows_per_epoch
    return counted


# --- the plan


@given(plans("file"))
@settings(max_examples=60, deadline=None)
def test_shard_file_gives_each_logical_worker_whole_files_in_every_epoch(plan: Plan) -> None:
    manifest = plan.manifest
    owner = plan.owner[manifest.file_of].repeat(manifest.rows)
    for epoch in range(2):
        for v, counter in enumerate(count_uses(plan, epoch)):
            rows_of_worker = Counter(np.flatnonzero(owner == v).tolist())
            assert counter == rows_of_worker if plan.keep_last else counter <= rows_of_worker
    row_counts = [int((owner == v).sum()) for v in range(plan.logical_workers)]
    largest = max(int(manifest.rows[manifest.file_of == i].sum()) for i in range(len(manifest.paths)))
    assert max(row_counts) - min(row_counts) <= largest, "the files are not spread evenly"
    other = Plan(manifest, plan.seed + 1, plan.logical_workers, plan.global_batch_size, 5, True, "file")
    assert sorted(other.stream_rows(v) for v in range(plan.logical_workers)) == sorted(row_counts), (
        "another seed changes more than the owners of equal files"
    )


def test_shard_file_spreads_files_by_their_rows() -> None:
    plan = Plan(
        Manifest.from_files((f"part-{i}.parquet", [rows]) for i, rows in enumerate([3, 9, 4, 5, 3])),
        1,
        2,
        4,
        5,
        True,
        "file",
    )
    assert [plan.stream_rows(v) for v in range(2)] == [12, 12]


@given(plans("off"), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_shard_off_gives_every_row_to_every_logical_worker(plan: Plan, epoch: int) -> None:
    everything = Counter(range(plan.manifest.num_rows))
    for counter in count_uses(plan, epoch):
        assert counter == everything if plan.keep_last else counter <= everything


def test_shard_off_shuffles_each_logical_worker_differently() -> None:
    manifest = Manifest.from_files([("a", [10] * 8)])
    plan = Plan(manifest, 1, 2, 20, 10, True, "off")
    groups = [[int(plan.epoch(0).rows_at(v, step)[0]) // 10 for step in range(8)] for v in range(2)]
    assert sorted(groups[0]) == sorted(groups[1]) == list(range(8))
    assert groups[0] != groups[1]


@given(plans("row", "off", balanced=True))
@settings(max_examples=20, deadline=None)
def test_balancing_uses_all_classes_equally_often_and_all_their_rows(plan: Plan) -> None:
    assert plan.classes is not None
    of_row, max_rows = plan.classes.of_row, int(plan.classes.totals.max())
    repeats = plan.logical_workers if plan.shard == "off" else 1
    num_dropped = plan.all_rows * repeats - plan.rows_per_epoch
    assert num_dropped == 0 if plan.keep_last else 0 <= num_dropped < plan.global_batch_size
    total: Counter[int] = Counter()
    for epoch in range(3):
        counted = sum(count_uses(plan, epoch), Counter[int]())
        total.update(counted)
        for c, rows in enumerate(plan.classes.totals.tolist()):
            uses = [counted[int(row)] for row in np.flatnonzero(of_row == c)]
            assert max_rows * repeats - num_dropped <= sum(uses) <= max_rows * repeats
            assert max(uses) <= -(-max_rows // rows) * repeats
            assert min(uses) >= max_rows // rows * repeats - num_dropped
            if plan.keep_last:
                assert all(n % repeats == 0 for n in uses)
    for c in range(len(plan.classes.totals)):
        uses = [total[int(row)] for row in np.flatnonzero(of_row == c)]
        assert max(uses) - min(uses) <= repeats + 3 * num_dropped, "some rows are repeated more often in all epochs"


@given(plans("file", "off"), plans("row", balanced=True), st.integers(0, 2))
@settings(max_examples=15, deadline=None)
def test_no_position_depends_on_earlier_lookups(one: Plan, other: Plan, epoch: int) -> None:
    for plan in (one, other):
        positions = [(v, step) for step in range(plan.steps_per_epoch) for v in range(plan.logical_workers)]
        expected = {position: plan.epoch(epoch).rows_at(*position).tolist() for position in positions}
        for position in reversed(positions):
            assert replace(plan).epoch(epoch).rows_at(*position).tolist() == expected[position]


GOLDEN: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
    "file": ({"shard": "file"}, [[12, 8, 10], [7, 11, 9], [2, 3, 0], [1, 4, 5]]),
    "off": ({"shard": "off"}, [[12, 5, 10], [4, 11, 6], [9, 0, 7], [8, 1, 2]]),
    "balanced": ({"balanced": True}, [[3, 1, 2], [0, 2, 2], [8, 9, 8], [8, 10, 11]]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_order_matches_the_golden_one(name: str) -> None:
    fields, expected = GOLDEN[name]
    manifest = Manifest.from_files((f"part-{i}.parquet", groups) for i, groups in enumerate([[4, 3], [3], [5]]))
    classes = (
        Classes.of(manifest, np.array([0, 0, 1, 0, 0, 2, 0, 0, 1, 0, 0, 2, 1, 0, 0], np.uint8))
        if "balanced" in fields
        else None
    )
    plan = Plan(manifest, 7, 2, 6, 6, True, fields.get("shard", "row"), classes)
    assert [plan.epoch(1).rows_at(v, step).tolist() for v in range(2) for step in range(2)] == expected


# --- the feed


def write_skewed_images(folder: Path) -> Path:
    """Writes 97 images in 5 files, half of them of class 0."""
    write_images(folder, [[20, 1], [9], [30], [17, 3], [17]])
    for file in folder.glob("*.parquet"):
        table = pq.read_table(file)
        labels = table["label"].to_numpy().copy()
        labels[labels > 2] = 0
        table = table.set_column(table.schema.get_field_index("label"), "label", pa.array(labels))
        pq.write_table(table, file, row_group_size=20)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_skewed_images(tmp_path_factory.mktemp("skewed") / "data")


POLICIES: dict[str, dict[str, Any]] = {
    "file": {"data__shard": "file"},
    "off": {"data__shard": "off"},
    "balanced": {"data__balance_by": "label"},
    "balanced off": {"data__balance_by": "label", "data__shard": "off"},
    # Files of 21, 9 and 30 rows; windows have rows of the second several times.
    "weights": {},
}
WEIGHTS = {"part-0.parquet": 1, "part-1.parquet": 20, "part-2.parquet": 4}


def policy_job(folder: Path, data: Path, name: str, **fields: Any) -> Job:
    fields = {
        "train__epochs": 2,
        "checkpoint__every_epochs": None,
        "checkpoint__every_steps": 4,
        **POLICIES[name],
        **fields,
    }
    sources = [{"path": str(data / file), "weight": weight} for file, weight in WEIGHTS.items()]
    path = sources if name == "weights" else data
    return make_job(folder, path, logical_workers=4, batch=24, task=TinyImages(), **fields)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.rest if name == "balanced off" else ()) for name in POLICIES]
)
def test_the_feed_follows_the_plan(tmp_path: Path, data: Path, name: str) -> None:
    job = policy_job(tmp_path / "run", data, name, data__shuffle_window_rows=12)
    keys: dict[tuple[int, int, int], list[int]] = {}
    for windows, size in ((stream_windows, 1), (cache_windows, 3)):
        for start in (Cursor(), Cursor(1, 2)):
            for rank in range(size):
                assigned, cursor = logical_workers_of(rank, size, 4), start
                feed = feed_of(job.plan, start, assigned, windows(job, start, assigned))
                while cursor < Cursor(2, 0):
                    for batch in feed.next():
                        position = (cursor.epoch, cursor.step, batch.logical_worker)
                        planned = job.plan.epoch(cursor.epoch).rows_at(batch.logical_worker, cursor.step).tolist()
                        assert batch.fields["id"].tolist() == batch.positions.tolist() == planned
                        assert keys.setdefault(position, batch.keys.tolist()) == batch.keys.tolist()
                    cursor = cursor.next(job.plan.steps_per_epoch)
                feed.close()
    all_keys = [value for values in keys.values() for value in values]
    assert len(all_keys) == len(set(all_keys)) == 2 * job.plan.rows_per_epoch, (
        "two uses of a row have the same augmentation key"
    )


# --- training


@pytest.mark.rest
@pytest.mark.parametrize("name", ["file", "off", "balanced", "weights"])
def test_a_policy_is_bit_identical_on_any_workers_and_after_a_resume(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, name: str
) -> None:
    job = policy_job(tmp_path / "run", data, name)
    train_and_resume(worker_pool, job)
    summary = summarize(job, "finished")
    assert summary["rows"] == 2 * job.plan.rows_per_epoch
    assert summary["rows_by_logical_worker"] == [2 * job.plan.stream_rows(v) for v in range(4)]


@pytest.mark.rest
def test_a_bad_row_that_is_repeated_is_skipped_each_time(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    dataset = open_dataset(str(data))
    rare = np.flatnonzero(read_labels(dataset.root, dataset.manifest, "label")[1] == 2)[1:].tolist()
    job = job_of(tmp_path / "run", data, BadRowImages(tuple(rare)), data__balance_by="label", train__epochs=1)
    uses = sum(count_uses(job.plan, 0), Counter[int]())
    assert min(uses[row] for row in rare) > 1
    worker_pool.train_to_end(job, 2, cache_windows)
    summary = summarize(job, "finished")
    assert summary["bad_rows"] == {"skipped": sum(uses[row] for row in rare), "distinct": len(rare)}
    assert summary["rows"] + summary["bad_rows"]["skipped"] == job.plan.rows_per_epoch


# --- refused settings, and stored plans


def test_too_few_files_are_refused(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "data", [[5], [0], [6], [7]])
    with pytest.raises(DataError, match=r"has 3 files with rows for 4 logical workers; each logical worker needs"):
        policy_job(tmp_path / "run", folder, "file")


@pytest.mark.parametrize("column", ["image", "nothing"])
def test_a_column_without_classes_is_refused(tmp_path: Path, data: Path, column: str) -> None:
    with pytest.raises(DataError, match=r"data.balance_by"):
        policy_job(tmp_path / "run", data, "balanced", data__balance_by=column)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_a_text_column_has_classes(tmp_path: Path, kind: pa.DataType) -> None:
    pq.write_table(pa.table({"kind": pa.array(["b", "a", "b", "c"], kind)}), tmp_path / "x.parquet")
    dataset = open_dataset(str(tmp_path))
    assert dataset.facts.columns["kind"].kind == "text"
    names, of_row = read_labels(dataset.root, dataset.manifest, "kind")
    assert (names, of_row.tolist(), of_row.dtype) == (["a", "b", "c"], [1, 0, 1, 2], np.uint8)


def test_a_balanced_run_is_restored_without_data_and_refuses_other_classes(tmp_path: Path) -> None:
    data = write_skewed_images(tmp_path / "data")
    config = policy_job(tmp_path / "x", data, "balanced").config.replace(
        run__storage_path=str(tmp_path), run__name="run"
    )
    claimed = claim(prepare(config), 1).job
    assert claimed.plan.classes is not None
    assert prepare(config).resumes
    stored = stored_job(RunPaths(tmp_path / "run"))
    assert stored.total_steps == claimed.total_steps
    assert stored.plan.rows_per_epoch == claimed.plan.rows_per_epoch > claimed.plan.manifest.num_rows
    assert json.loads(claimed.paths.classes.read_bytes())["rows"] == claimed.plan.classes.totals.tolist()
    file = data / "part-2.parquet"
    table = pq.read_table(file)
    swapped = pa.array(table["label"].to_numpy()[::-1])
    pq.write_table(table.set_column(table.schema.get_field_index("label"), "label", swapped), file, row_group_size=20)
    with pytest.raises(DataError, match="other classes than at the start of the run 'run'"):
        prepare(config)


# --- class weights


def test_balanced_weights_give_all_classes_the_same_total(data: Path) -> None:
    facts = open_dataset(str(data)).facts
    task = ImageClassification(num_classes=4, class_weights="balanced").prepare(facts)
    assert facts.count is not None
    rows = facts.count("label")
    assert set(rows) == {0, 1, 2}
    assert task.weights is not None
    assert [task.weights[c] * rows[c] for c in rows] == pytest.approx([97 / 3] * 3)
    assert task.weights[3] == 0.0, "a class without rows has a weight"


@pytest.mark.parametrize("mixed", [False, True])
def test_weights_count_in_training_and_not_in_evaluation(data: Path, mixed: bool) -> None:
    facts = open_dataset(str(data)).facts
    args: dict[str, Any] = {"num_classes": 3, "model_args": {"channels": 4}}
    mixing: dict[str, Any] = {"label_smoothing": 0.3} if mixed else {}
    task = ImageClassification(class_weights=[0.5, 2.0, 3.0], **mixing, **args).prepare(facts)
    plain = ImageClassification(**mixing, **args).prepare(facts)
    batch = {"image": torch.randint(0, 255, (6, 1, 8, 8), dtype=torch.uint8), "label": torch.tensor([0, 1, 2, 2, 1, 0])}
    keys, model = torch.arange(6), plain.build_model().eval()
    of_row = torch.tensor([0.5, 2.0, 3.0, 3.0, 2.0, 0.5])
    if mixed:
        of_row = 0.7 * of_row + 0.3 * torch.tensor([0.5, 2.0, 3.0]).mean()
    losses = task.training_loss(model, task.augment(batch, keys))
    torch.testing.assert_close(losses, plain.training_loss(model, plain.augment(batch, keys)) * of_row)
    torch.testing.assert_close(
        task.loss(task.forward(model, batch), batch),
        functional.cross_entropy(model(batch["image"] / 255.0), batch["label"], reduction="none"),
    )


def test_a_tabular_task_applies_class_weights(data: Path) -> None:
    facts = open_dataset(str(data)).facts
    task = TabularClassification(features=["image"], hidden=[8], class_weights="balanced").prepare(facts)
    assert task.weights is not None
    batch = {"features": torch.rand(3, 64), "label": torch.tensor([0, 1, 2])}
    model = task.build_model().to(CPU)
    plain = task.loss(task.forward(model, batch), batch)
    losses = task.training_loss(model, task.augment(batch, torch.arange(3)))
    torch.testing.assert_close(losses, plain * torch.tensor(task.weights))


def write_weighted_table(file: Path, weights: list[float | None]) -> DataFacts:
    rows = len(weights)
    columns = {"x": np.linspace(0, 1, rows), "weight": pa.array(weights, pa.float64()), "label": np.arange(rows) % 2}
    pq.write_table(pa.table(columns), file)
    return open_dataset(str(file.parent)).facts


@pytest.mark.parametrize("kind", [TabularClassification, TabularRegression])
def test_sample_weights_count_in_training_and_not_in_evaluation(tmp_path: Path, kind: Any) -> None:
    facts = write_weighted_table(tmp_path / "rows.parquet", [0.0, 1.0, 2.5, 4.0])
    task = kind(label="label", hidden=[8], sample_weight="weight").prepare(facts)
    assert task.features == ["x"]
    assert "weight" not in WithoutTargets(task).columns
    rows = {"x": np.array([0.1, 0.9]), "weight": np.array([0.5, 3.0]), "label": np.array([0, 1])}
    batch = {name: torch.from_numpy(values) for name, values in task.decode(rows).items()}
    model = task.build_model()
    plain = task.loss(task.forward(model, batch), batch)
    losses = task.training_loss(model, task.augment(batch, torch.arange(2)))
    torch.testing.assert_close(losses, plain * torch.tensor([0.5, 3.0]))
    with pytest.raises(ValueError, match="column 'weight' of sample weights has -1; a weight must be at least 0"):
        task.decode(rows | {"weight": np.array([-1.0, 3.0])})


def test_sample_weights_and_class_weights_are_multiplied(data: Path) -> None:
    task = ImageClassification(num_classes=3, class_weights=[1.0, 2.0, 4.0]).prepare(open_dataset(str(data)).facts)
    task.sample_weight = "id"
    images = np.zeros((3, 8, 8), np.uint8)
    decoded = task.decode({"image": images, "label": np.array([0, 1, 2]), "id": np.array([3, 2, 1])})
    batch = {name: torch.from_numpy(values) for name, values in decoded.items()}
    assert task.augment(batch, torch.arange(3))["row_weight"].tolist() == [3.0, 4.0, 4.0]


def test_a_column_of_sample_weights_has_no_other_use(tmp_path: Path) -> None:
    facts = write_weighted_table(tmp_path / "rows.parquet", [1.0, 2.0])
    with pytest.raises(ConfigError, match=r"sample_weight is 'label', which is also the label"):
        TabularRegression(label="label", sample_weight="label").prepare(facts)
    for name in ("weight", "label"):
        with pytest.raises(ConfigError, match=f"features names '{name}', which is the label or the weight"):
            TabularRegression(label="label", features=["x", name], sample_weight="weight").prepare(facts)


def test_the_start_names_weights(tmp_path: Path) -> None:
    write_weighted_table(tmp_path / "rows.parquet", [1.0] * 2)
    dataset = open_dataset(str(tmp_path))
    task = TabularRegression(label="label", sample_weight="weight").prepare(dataset.facts)
    [used] = describe_training_columns(task, dataset)
    assert used == "Columns used: x; to predict label; weights of rows from weight"


def test_a_column_of_sample_weights_with_gaps_is_refused(tmp_path: Path) -> None:
    facts = write_weighted_table(tmp_path / "rows.parquet", [1.0, None])
    with pytest.raises(DataError, match=r"Column 'weight' of .* has 1 missing values"):
        TabularRegression(label="label", sample_weight="weight").prepare(facts)


@pytest.mark.parametrize("weights", [[1.0, 2.0], [1.0, -1.0, 1.0], [0.0, 0.0, 0.0], [1.0, float("nan"), 1.0], "even"])
def test_invalid_class_weights_are_refused(data: Path, weights: Any) -> None:
    with pytest.raises(ConfigError, match="it must be balanced, or a list of 3 numbers"):
        ImageClassification(class_weights=weights).prepare(open_dataset(str(data)).facts)
