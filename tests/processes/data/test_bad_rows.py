"""Rows that cannot be decoded are skipped, listed and counted; training stays bit-identical on any number of workers
and across a resume.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_app.data.arrays import ArraySpec
from ray_app.data.bad_rows import decode_good_rows
from ray_app.data.dataset import open_dataset
from ray_app.data.probes import decode_first_row, decode_first_rows
from ray_app.data.windows import MicroBatch
from ray_app.driver.finalize import summarize
from ray_app.errors import BadRowError, DataError
from ray_app.plan.assignment import logical_workers_of
from ray_app.plan.order import Cursor
from ray_app.testing import WorkerPool, cache_windows, digest_tensors, read_trained_run, stream_windows
from ray_app.train.checkpointing.step_log import BadRows
from ray_app.train.job import Job
from ray_app.train.state.state import TrainingState
from tests.support.bad_rows import BAD_ROWS, BadRowImages, job_of
from tests.support.bit_identity import assert_bit_identical, train_and_resume
from tests.support.local_world import CPU, feed_of, write_images

ROWS = [[50, 1], [46]]


# --- decoding


def decode_numbers(rows: dict[str, Any]) -> dict[str, Any]:
    if any(v < 0 for v in rows["x"]):
        raise ValueError("negative")
    return {"y": np.stack([np.full(2 + (v == 99), v) for v in rows["x"]])}


@given(st.lists(st.sampled_from([1, 2, 3, -1, 99]), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_only_bad_rows_are_decoded_to_zeros_with_a_reason(values: list[int]) -> None:
    decoded, reasons = decode_good_rows(decode_numbers, {"x": values}, len(values), {"y": ArraySpec("<i8", (2,))})
    assert [reason is not None for reason in reasons] == [v in (-1, 99) for v in values]
    assert decoded["y"].tolist() == [[0, 0] if v in (-1, 99) else [v, v] for v in values]
    for value, reason in zip(values, reasons, strict=True):
        if value == -1:
            assert reason is not None
            assert reason.startswith("ValueError: negative (test_bad_rows.py, line ")
        if value == 99:
            assert "(3,)" in str(reason), "the reason lacks the shape of the row"


def test_a_missing_decoder_is_an_error_and_not_a_bad_row() -> None:
    def decode(rows: dict[str, Any]) -> dict[str, Any]:
        raise ModuleNotFoundError(f"no decoder for {len(rows)}")

    with pytest.raises(ModuleNotFoundError, match="no decoder"):
        decode_good_rows(decode, {"x": [1, 2]}, 2, {"y": ArraySpec("<i8", (2,))})


# --- the feed


@pytest.mark.parametrize("windows", [stream_windows, cache_windows])
def test_planned_rows_are_those_consumed_and_those_skipped(tmp_path: Path, data: Path, windows: Any) -> None:
    job = job_of(tmp_path / "run", data, BadRowImages())
    plan = job.plan
    for size in (1, 3):
        consumed: Counter[int] = Counter()
        skipped: Counter[int] = Counter()
        for rank in range(size):
            assigned = logical_workers_of(rank, size, plan.logical_workers)
            feed = feed_of(plan, Cursor(), assigned, windows(job, Cursor(), assigned))
            for step in range(plan.steps_per_epoch):
                for batch in feed.next():
                    assert batch.fields["id"].tolist() == batch.positions.tolist()
                    assert batch.rows == len(batch.keys) == len(batch.fields["image"])
                    assert batch.rows + len(batch.bad) == plan.rows_of_step(step)[batch.logical_worker]
                    consumed.update(batch.positions.tolist())
                    skipped.update(list(batch.bad))
                    assert all(
                        f"ValueError: row {row} is unreadable (bad_rows.py, line" in reason
                        for row, reason in batch.bad.items()
                    )
            feed.close()
        assert skipped == Counter(BAD_ROWS)
        assert consumed == Counter(set(range(plan.manifest.num_rows)) - set(BAD_ROWS))


# --- training


@pytest.mark.rest
def test_skipping_is_bit_identical_for_any_worker_count_and_after_a_resume(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    job = job_of(tmp_path / "run", data, BadRowImages(), checkpoint__every_epochs=None, checkpoint__every_steps=4)
    train_and_resume(worker_pool, job, (1, 2, 3))
    summary = summarize(job, "finished")
    planned = 2 * job.plan.manifest.num_rows
    assert summary["bad_rows"] == {"skipped": 2 * len(BAD_ROWS), "distinct": len(BAD_ROWS)}
    assert summary["rows"] == sum(summary["rows_by_logical_worker"]) == planned - 2 * len(BAD_ROWS)
    listed = [json.loads(path.read_bytes()) for path in sorted(job.paths.bad_rows.iterdir())]
    assert [entry["position"] for entry in listed] == list(BAD_ROWS)
    reason = listed[3].pop("reason")
    assert reason.startswith("ValueError: row 50 is unreadable (bad_rows.py, line ")
    assert listed[3] == {"position": 50, "path": "part-0.parquet", "row_group": 1, "row": 0}


@pytest.mark.rest
def test_local_sgd_skips_bad_rows(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    fields = {
        "train__strategy": "local_sgd",
        "train__local_steps": 3,
        "checkpoint__every_epochs": None,
        "checkpoint__every_steps": 3,
    }
    job = job_of(tmp_path / "run", data, BadRowImages(), train__epochs=1, **fields)
    alone, several = worker_pool.train_new_run(job, 1, cache_windows), worker_pool.train_new_run(job, 3, cache_windows)
    assert_bit_identical(several, alone)
    assert sum(sum(step[4]) for step in alone.steps) == job.plan.manifest.num_rows - len(BAD_ROWS)


def initial_state(job: Job) -> TrainingState:
    with torch.random.fork_rng(devices=[]):
        return TrainingState(job.config, job.task, CPU, job.total_steps)


def test_a_step_is_the_mean_over_its_good_rows(worker_pool: WorkerPool, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "data", [[12]])
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}
    job = job_of(tmp_path / "run", folder, BadRowImages((3, 7), plain=True), train__epochs=1, optimizer=sgd)
    ended = worker_pool.train_new_run(job, 2, cache_windows)
    rows = decode_first_rows(job.source.reader, job.plan.manifest, 12)
    assert len(rows["id"]) == 10
    state = initial_state(job)
    batch = {name: torch.from_numpy(values.copy()) for name, values in rows.items()}
    loss = job.task.loss(job.task.forward(state.model, batch), batch).mean()
    loss.backward()
    state.optimizer.step()
    assert ended.steps[0][1] == pytest.approx(loss.item(), rel=1e-6)
    for name, value in state.model.state_dict().items():
        torch.testing.assert_close(ended.snapshot.model[name], value)


def test_a_step_of_only_bad_rows_leaves_the_parameters_unchanged(worker_pool: WorkerPool, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "data", [[12]])
    job = job_of(tmp_path / "run", folder, BadRowImages(tuple(range(12))), train__epochs=1)
    ended = worker_pool.train_new_run(job, 2, cache_windows)
    start = initial_state(job).snapshot()
    assert all(torch.equal(value, start.model[name]) for name, value in ended.snapshot.model.items())
    assert ended.commit.step == 1


def test_a_round_of_only_bad_rows_advances_nothing_but_the_schedule(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {
        "train__strategy": "local_sgd",
        "train__local_steps": 3,
        "train__outer_momentum": 0.9,
        "train__ema_decay": 0.9,
        "schedule": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 2, "gamma": 0.5}},
        "checkpoint__every_epochs": None,
        "checkpoint__every_steps": 3,
    }
    good = job_of(tmp_path / "good", data, BadRowImages(()), **fields)
    feed = feed_of(good.plan, Cursor(), range(4), cache_windows(good, Cursor(), range(4)))
    rows = [[int(row) for batch in feed.next() for row in batch.positions] for _ in range(6)]
    bad = BadRowImages(tuple(rows[3] + rows[4] + rows[5]))
    before = worker_pool.train_new_run(
        job_of(tmp_path / "before", data, bad, train__max_steps=3, **fields), 2, cache_windows
    )
    after = worker_pool.train_new_run(
        job_of(tmp_path / "after", data, bad, train__max_steps=6, **fields), 2, cache_windows
    )
    assert [sum(step[4]) for step in after.steps] == [12, 12, 12, 0, 0, 0]
    assert after.commit.params_digest == before.commit.params_digest
    states = [digest_tensors((e.snapshot.optimizer["state"], e.snapshot.extra_state)) for e in (before, after)]
    assert states[0] == states[1]
    assert [e.snapshot.optimizer["param_groups"][0]["lr"] for e in (before, after)] == [0.005, 0.00125]
    assert [(e.snapshot.step, (e.snapshot.schedule or {})["last_epoch"]) for e in (before, after)] == [(3, 3), (6, 6)]


def test_too_many_bad_rows_end_the_run_which_resumes_with_a_higher_limit(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    refused = job_of(tmp_path / "run", data, BadRowImages(), data__max_bad_rows=len(BAD_ROWS) - 1, train__epochs=1)
    outcomes = worker_pool.train(refused, 1, windows=cache_windows)
    assert isinstance(outcomes[0].error, DataError)
    assert f"{len(BAD_ROWS)} rows cannot be decoded, more than data.max_bad_rows = {len(BAD_ROWS) - 1}" in str(
        outcomes[0].error
    )
    allowed = job_of(tmp_path / "run", data, BadRowImages(), data__max_bad_rows=len(BAD_ROWS), train__epochs=1)
    assert allowed.config_digest == refused.config_digest
    worker_pool.train_to_end(allowed, 1, cache_windows)
    assert read_trained_run(allowed).commit.step == allowed.total_steps


def test_workers_that_reach_the_limit_together_report_it(data: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path / "run", data, BadRowImages(), data__max_bad_rows=len(BAD_ROWS) - 1)
    barrier = threading.Barrier(len(BAD_ROWS))

    def note_bad_row(row: int) -> DataError | None:
        batch = MicroBatch(0, 0, {}, torch.zeros(0), 0, np.zeros(0, np.int64), {row: "unreadable"}, 1)
        barrier.wait(10)
        try:
            BadRows(job).note([batch])
        except DataError as error:
            return error
        return None

    with ThreadPoolExecutor(len(BAD_ROWS)) as workers:
        errors = [error for error in workers.map(note_bad_row, BAD_ROWS) if error]
    assert errors
    assert all(
        f"{len(BAD_ROWS)} rows cannot be decoded, more than data.max_bad_rows = {len(BAD_ROWS) - 1}" in str(error)
        for error in errors
    )
    assert sorted(int(path.stem) for path in job.paths.bad_rows.iterdir()) == list(BAD_ROWS)


def test_without_skip_the_row_is_an_error(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path / "run", data, BadRowImages((13,)), data__on_bad_row="fail")
    outcomes = worker_pool.train(job, 1)
    assert isinstance(outcomes[0].error, BadRowError)
    assert "part-0.parquet, row group 0, row 13: ValueError: row 13 is unreadable (" in str(outcomes[0].error)


# --- the first rows


def test_the_search_for_the_first_good_row_stops_at_the_limit(data: Path) -> None:
    dataset, task = open_dataset(str(data)), BadRowImages((0, 1, 2))
    task = task.prepare(dataset.facts)
    with pytest.raises(BadRowError, match="row 2 is unreadable"):
        decode_first_row(dataset, task.columns(), task.decode, 2)
    assert decode_first_row(dataset, task.columns(), task.decode, 3)["id"].tolist() == [3]


def test_example_rows_exclude_bad_rows(data: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path / "run", data, BadRowImages((0, 1, 2, 3, 5)))
    assert decode_first_rows(job.source.reader, job.plan.manifest, 4)["id"].tolist() == [4, 6, 7]
