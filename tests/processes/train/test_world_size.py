"""The number of workers is not a hyperparameter: training is bit-identical for all world sizes and all stops."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch

from ray_app.errors import PeerLostError
from ray_app.runlog.journal import read_events
from ray_app.testing import (
    DieAfter,
    KilledError,
    TrainedRun,
    WorkerPool,
    cache_windows,
    read_trained_run,
    stream_windows,
)
from ray_app.train.job import Hooks, Job, OpenWindows
from tests.support.bit_identity import assert_bit_identical, train_on_workers
from tests.support.local_world import LocalMembership, TinyImages, make_job, write_images

# The rows of each row group of each file.
SHAPES = {
    "103 rows": [[40, 1, 13], [], [29, 0], [20]],
    "last step of 1, 1, 0, 0 rows": [[50, 1], [47]],
    "last step of 1, 0, 0, 0 rows": [[97]],
}
STEPLR = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 3, "gamma": 0.5}}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("data")
    return {name: write_images(root / str(i), files) for i, (name, files) in enumerate(SHAPES.items())}


@pytest.mark.parametrize("windows", [stream_windows, pytest.param(cache_windows, marks=pytest.mark.rest)])
def test_training_is_bit_identical_for_all_world_sizes(
    worker_pool: WorkerPool, data: dict[str, Path], tmp_path: Path, windows: OpenWindows
) -> None:
    job = make_job(tmp_path / "run", data["103 rows"], train__epochs=2, schedule=STEPLR)
    runs = [worker_pool.train_new_run(job, size, windows) for size in (1, 2, 3, 4)]
    for run in runs[1:]:
        assert_bit_identical(run, runs[0])
    assert len(runs[0].steps) == job.total_steps == 18
    assert [sum(rows) for *_, rows, _ in runs[0].steps[:9]] == [12] * 8 + [7]
    assert [run.workers[0] for run in runs] == [[1], [2], [3], [4]]
    assert runs[0].steps[-1][1] < runs[0].steps[0][1], "the loss did not fall"


@pytest.mark.rest
@pytest.mark.parametrize(
    ("logical_workers", "sizes"),
    [
        (3, (1, 2, 3)),
        (5, (1, 2, 3, 4)),
        (6, (1, 3, 4)),
    ],
)
def test_uneven_reduction_trees_are_bit_identical(
    worker_pool: WorkerPool, data: dict[str, Path], tmp_path: Path, logical_workers: int, sizes: tuple[int, ...]
) -> None:
    job = make_job(tmp_path / "run", data["103 rows"], logical_workers=logical_workers, batch=30, train__epochs=2)
    train_on_workers(worker_pool, job, sizes)


def test_logical_workers_are_a_hyperparameter(worker_pool: WorkerPool, data: dict[str, Path], tmp_path: Path) -> None:
    jobs = [
        make_job(tmp_path / f"run{n}", data["103 rows"], logical_workers=n, batch=12, train__max_steps=2)
        for n in (1, 2, 4)
    ]
    assert len({worker_pool.train_new_run(job, 1).commit.params_digest for job in jobs}) == 3


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(name, marks=pytest.mark.rest if "1, 1" in name else ())
        for name in SHAPES
        if name.startswith("last step")
    ],
)
@pytest.mark.parametrize("tiny", [True, pytest.param(False, marks=pytest.mark.rest)])
def test_a_last_step_with_one_row_or_none_per_worker_is_bit_identical(
    worker_pool: WorkerPool, data: dict[str, Path], tmp_path: Path, shape: str, tiny: bool
) -> None:
    """The dense network has a batch-norm over one value per channel in that step."""
    task = TinyImages() if tiny else None
    job = make_job(tmp_path / "run", data[shape], task=task, train__epochs=2)
    first = train_on_workers(worker_pool, job, (1, 2, 3, 4))
    assert [sorted(rows, reverse=True) for *_, rows, _ in first.steps[8::9]] == [
        [1, 1, 0, 0] if "1, 1" in shape else [1, 0, 0, 0]
    ] * 2


@pytest.mark.parametrize(
    "fields",
    [
        {"train__grad_clip_norm": 0.05},
        pytest.param({"train__precision": "bf16"}, marks=pytest.mark.rest),
        pytest.param(
            {
                "optimizer": {
                    "class_path": "torch.optim.SGD",
                    "init_args": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
                }
            },
            marks=pytest.mark.rest,
        ),
        pytest.param({"data__last_batch": "drop"}, marks=pytest.mark.rest),
    ],
    ids=str,
)
def test_settings_are_bit_identical_for_all_world_sizes(
    worker_pool: WorkerPool, data: dict[str, Path], tmp_path: Path, fields: dict[str, object]
) -> None:
    settings = dict(logical_workers=4, batch=12, train__max_steps=11, train__epochs=2)
    job = make_job(tmp_path / "run", data["103 rows"], **settings, **fields)
    first = train_on_workers(worker_pool, job, (1, 2, 4))
    plain = worker_pool.train_new_run(make_job(tmp_path / "plain", data["103 rows"], **settings), 1)
    assert first.commit.params_digest != plain.commit.params_digest, "the setting has no effect"


@pytest.mark.rest
@pytest.mark.parametrize("variant", ["unused", "frozen"])
def test_parameters_without_gradients_stay_and_training_is_bit_identical(
    worker_pool: WorkerPool, data: dict[str, Path], tmp_path: Path, variant: str
) -> None:
    job = make_job(tmp_path / "run", data["103 rows"], task=TinyImages(variant))
    first = train_on_workers(worker_pool, job, (1, 3, 4))
    short = worker_pool.train_new_run(
        make_job(
            tmp_path / "short",
            data["103 rows"],
            logical_workers=4,
            batch=12,
            task=TinyImages(variant),
            train__max_steps=1,
        ),
        1,
    )
    name = {"unused": "unused", "frozen": "1.weight"}[variant]
    assert torch.equal(first.snapshot.model[name], short.snapshot.model[name]), (
        "a parameter without gradients was updated"
    )
    assert not torch.equal(first.snapshot.model["5.weight"], short.snapshot.model["5.weight"])


@pytest.mark.rest
def test_overlapped_has_the_same_rows_and_nearly_the_same_parameters(
    worker_pool: WorkerPool, data: dict[str, Path], tmp_path: Path
) -> None:
    fields = {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}}, "train__epochs": 2}
    settings = dict(logical_workers=5, batch=20, **fields)
    exact = worker_pool.train_new_run(make_job(tmp_path / "exact", data["103 rows"], **settings), 2)
    job = make_job(tmp_path / "run", data["103 rows"], **settings, train__reduction="overlapped")
    for size in (1, 2, 3, 4):
        run = worker_pool.train_new_run(job, size)
        assert [step[4:] for step in run.steps] == [step[4:] for step in exact.steps], "the steps have other rows"
        assert [step[1] for step in run.steps] == pytest.approx([step[1] for step in exact.steps], rel=1e-4)
        for name, value in run.snapshot.model.items():
            torch.testing.assert_close(value, exact.snapshot.model[name], rtol=1e-3, atol=1e-5)


def train_with_deaths(pool: WorkerPool, job: Job, deaths: list[int], sizes: list[int], new_fence: bool) -> TrainedRun:
    """Trains and dies after each step of `deaths`, each time with the next world size; returns the finished run."""
    for i, step in enumerate(deaths):
        job = dataclasses.replace(job, fence=1 + i * new_fence)
        outcomes = pool.train(job, sizes[i], Hooks(after_step=DieAfter(step)))
        assert {type(o.error) for o in outcomes} == {KilledError}, "\n".join(o.trace for o in outcomes)
    pool.train_to_end(dataclasses.replace(job, fence=1 + len(deaths) * new_fence), sizes[len(deaths)])
    return read_trained_run(job)


@pytest.fixture(scope="module")
def undisturbed(
    worker_pool: WorkerPool, data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Job, TrainedRun]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    job = make_job(
        folder, data["103 rows"], logical_workers=4, batch=20, train__epochs=2, schedule=STEPLR, data__shuffle_window_rows=10,  # noqa: E501
        checkpoint__every_steps=2,
    )  # fmt: skip
    assert job.plan.steps_per_epoch == 6
    return job, worker_pool.train_new_run(job, 2)


@pytest.mark.parametrize(
    ("deaths", "sizes", "new_fence"),
    [
        pytest.param(
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
            [4, 1, 3, 2, 4, 3, 1, 2, 3, 4, 2, 1, 4],
            True,
            marks=pytest.mark.rest,
        ),
        ([5], [1, 4], False),
        # Step 6 is the last one of an epoch.
        ([6], [4, 3], False),
        ([9], [3, 2], True),
    ],
)
def test_a_resume_on_other_workers_is_bit_identical(
    worker_pool: WorkerPool,
    undisturbed: tuple[Job, TrainedRun],
    tmp_path: Path,
    deaths: list[int],
    sizes: list[int],
    new_fence: bool,
) -> None:
    job, expected = undisturbed
    run = train_with_deaths(
        worker_pool, dataclasses.replace(job, run_root=str(tmp_path / "run")), deaths, sizes, new_fence
    )
    assert_bit_identical(run, expected)
    resumes = [
        e.details["step"]
        for e in read_events(dataclasses.replace(job, run_root=str(tmp_path / "run")).paths, "resumed")
    ]
    assert resumes == [death // 2 * 2 for death in deaths if death > 1], "a resume started from another checkpoint"


def test_the_death_of_one_worker_is_a_lost_peer_for_its_peers(
    worker_pool: WorkerPool, undisturbed: tuple[Job, TrainedRun], tmp_path: Path
) -> None:
    job = dataclasses.replace(undisturbed[0], run_root=str(tmp_path / "run"))
    outcomes = worker_pool.train(job, 3, Hooks(after_step=DieAfter(5, killed=2)))
    assert [type(o.error) for o in outcomes] == [PeerLostError, PeerLostError, KilledError]
    assert PeerLostError.retryable
    worker_pool.train_to_end(job, 4)
    assert_bit_identical(read_trained_run(job), undisturbed[1])


@pytest.mark.parametrize("rank", [0, 2])
def test_a_stop_of_one_worker_stops_all_workers_after_the_same_step(
    worker_pool: WorkerPool, undisturbed: tuple[Job, TrainedRun], tmp_path: Path, rank: int
) -> None:
    job = dataclasses.replace(undisturbed[0], run_root=str(tmp_path / "run"))
    outcomes = worker_pool.train(job, 3, membership=partial(LocalMembership, stop={rank: 3}))
    assert [o.error for o in outcomes] == [None] * 3
    stopped = read_trained_run(job)
    assert (stopped.commit.step, stopped.commit.why, len(stopped.steps)) == (3, "extra", 3)
    worker_pool.train_to_end(job, 2)
    finished = read_trained_run(job)
    assert_bit_identical(finished, undisturbed[1])
    assert max(map(len, finished.workers)) == 1, "a step was repeated"


def test_a_finished_run_that_is_started_again_trains_no_step(
    worker_pool: WorkerPool, undisturbed: tuple[Job, TrainedRun], tmp_path: Path
) -> None:
    job = dataclasses.replace(undisturbed[0], run_root=str(tmp_path / "run"))
    worker_pool.train_to_end(job, 1)
    worker_pool.train_to_end(job, 2)
    assert_bit_identical(read_trained_run(job), undisturbed[1])
    assert read_trained_run(job).workers == [[1]] * job.total_steps
