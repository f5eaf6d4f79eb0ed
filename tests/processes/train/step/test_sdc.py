"""Silent data corruption: the corrupt rank is detected, named and ended before the wrong result is kept, and training
is bit-identical to an undisturbed run.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_app.checkpoint.store import SUSPECT, CheckpointStore
from ray_app.drill.faults import Evidence, HookChain
from ray_app.drill.memory_faults import Flip, FlipTarget
from ray_app.errors import ConfigError, IrreproducibleError, WrongResultError
from ray_app.runlog.history import read_steps
from ray_app.runlog.journal import read_events
from ray_app.task.base import Batch
from ray_app.testing import WorkerPool, cache_windows, read_trained_run
from ray_app.train.job import Hooks, Job
from ray_app.train.step import sdc
from tests.support.local_world import TinyImages, make_job, write_images
from tests.support.shifting_world import train_shifting

L = 4
SLOW_FLIPS = [
    ("gradient", 0),
    ("gradient", 2),
    ("activation", 0),
    ("activation", 1),
    ("parameter", 1),
    ("parameter", 2),
]
CHECK_ALL: dict[str, Any] = {"failure__sdc_check_rate": 1.0}


def job_in(folder: Path, name: str, task: TinyImages | None = None, **fields: Any) -> Job:
    """Returns a job of six steps, with a checkpoint after every second one."""
    data = folder / "data"
    if not data.exists():
        write_images(data, [[21, 16]])
    settings = {"checkpoint__keep_last": 9, "train__epochs": 9, "train__max_steps": 6}
    return make_job(folder / name, data, logical_workers=L, task=task or TinyImages(), every=2, **settings | fields)


@pytest.fixture
def undisturbed(worker_pool: WorkerPool, tmp_path: Path) -> str:
    return worker_pool.train_new_run(job_in(tmp_path, "undisturbed"), 2, cache_windows).commit.params_digest


def hooks(folder: Path, target: FlipTarget, rank: int, step: int) -> Hooks:
    flip = Flip(Evidence(str(folder / "evidence")), "flip", target, rank, step)
    return Hooks(after_step=flip, built=flip.built)


@pytest.mark.parametrize(
    ("target", "rank"),
    [
        *(("gradient", 1), ("activation", 2), ("parameter", 0)),
        *(pytest.param(target, rank, marks=pytest.mark.rest) for target, rank in SLOW_FLIPS),
    ],
)
def test_a_flipped_bit_is_detected_and_training_stays_bit_identical(
    worker_pool: WorkerPool, tmp_path: Path, undisturbed: str, target: FlipTarget, rank: int
) -> None:
    job = job_in(tmp_path, "flipped", **CHECK_ALL)
    others = [other for other in range(3) if other != rank]
    outcomes = train_shifting(worker_pool, job, [[0, 1, 2], others], [], hooks(tmp_path, target, rank, 4))
    assert Evidence(str(tmp_path / "evidence")).has("flip")
    assert isinstance(outcomes[rank].error, WrongResultError), outcomes[rank].trace
    assert [outcomes[other].value for other in others] == ["done"] * 2, [outcome.trace for outcome in outcomes]
    [detected] = read_events(job.paths, "sdc_detected")
    assert (detected.details["rank"], detected.details["step"], detected.details["clean"]) == (rank, 5, 4)
    assert read_trained_run(job).commit.params_digest == undisturbed
    [suspect_event] = read_events(job.paths, "suspected")
    assert suspect_event.details["steps"] == [], "checkpoints are suspect although the step before was correct"


def test_checkpoints_after_the_last_correct_step_are_marked_as_suspect(worker_pool: WorkerPool, tmp_path: Path) -> None:
    """At a rate of 1 in 8, about every fourth step has a check; the flip is in the memory of rank 1 since step 1."""
    job = job_in(tmp_path, "flipped", failure__sdc_check_rate=0.125, train__max_steps=12)
    outcomes = train_shifting(worker_pool, job, [[0, 1, 2], [0, 2]], [], hooks(tmp_path, "parameter", 1, 1))
    assert isinstance(outcomes[1].error, WrongResultError), outcomes[1].trace
    [detected] = read_events(job.paths, "sdc_detected")
    [suspect_event] = read_events(job.paths, "suspected")
    assert detected.details["clean"] < 2, "the last clean step is after the flip of step 1"
    assert (
        suspect_event.details["steps"] == [step for step in range(2, 13, 2) if step <= detected.details["step"]] != []
    )
    marked_steps = [
        commit.step
        for commit in CheckpointStore(job.paths).commits()
        if (job.paths.checkpoint(commit.step, 1) / SUSPECT).exists()
    ]
    assert marked_steps == suspect_event.details["steps"]


@pytest.mark.parametrize("target", ["gradient", "activation"])
def test_of_two_workers_a_rank_that_is_corrupt_once_is_detected(
    worker_pool: WorkerPool, tmp_path: Path, undisturbed: str, target: FlipTarget
) -> None:
    job = job_in(tmp_path, "flipped", **CHECK_ALL)
    outcomes = train_shifting(worker_pool, job, [[0, 1], [1]], [], hooks(tmp_path, target, 0, 2))
    assert isinstance(outcomes[0].error, WrongResultError), outcomes[0].trace
    assert outcomes[1].value == "done", outcomes[1].trace
    assert read_trained_run(job).commit.params_digest == undisturbed


def test_two_workers_that_never_agree_end_the_run_as_irreproducible(worker_pool: WorkerPool, tmp_path: Path) -> None:
    job = job_in(tmp_path, "flipped", **CHECK_ALL)
    outcomes = train_shifting(worker_pool, job, [[0, 1], []], [], hooks(tmp_path, "parameter", 0, 2))
    assert all(isinstance(outcome.error, IrreproducibleError) for outcome in outcomes)


class UnseededNoise(TinyImages):
    """A loss with noise that no seed decides."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return super().loss(outputs, batch) * torch.rand(len(outputs), generator=_ENTROPY)


_ENTROPY = torch.Generator()


def test_a_task_that_is_not_reproducible_names_no_corrupt_rank(worker_pool: WorkerPool, tmp_path: Path) -> None:
    _ENTROPY.seed()
    job = job_in(tmp_path, "random", task=UnseededNoise(), **CHECK_ALL)
    outcomes = train_shifting(worker_pool, job, [[0, 1, 2], []], [], Hooks())
    assert {type(outcome.error) for outcome in outcomes} == {IrreproducibleError}
    assert "ray-app check finds both" in str(outcomes[0].error)


@pytest.mark.parametrize(
    "workers", [3, pytest.param(2, marks=pytest.mark.rest), pytest.param(4, marks=pytest.mark.rest)]
)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"train__strategy": "central_storage"},
        pytest.param({"train__precision": "bf16"}, marks=pytest.mark.rest),
        pytest.param({"train__precision": "fp16"}, marks=pytest.mark.rest),
        pytest.param({"data__shuffle_window_rows": 72, "train__grad_clip_norm": 0.1}, marks=pytest.mark.rest),
    ],
    ids=str,
)
def test_the_sdc_check_raises_no_false_alarm_and_is_bit_identical(
    worker_pool: WorkerPool, tmp_path: Path, workers: int, fields: dict[str, Any]
) -> None:
    """The model has dropout and batch-norm; the last step of an epoch has one row, so that three shares are empty."""
    unchecked = worker_pool.train_new_run(job_in(tmp_path, "without", **fields), 1, cache_windows)
    job = job_in(tmp_path, "with", **CHECK_ALL, **fields)
    worker_pool.train_to_end(job, workers, cache_windows)
    assert read_trained_run(job).commit.params_digest == unchecked.commit.params_digest
    assert read_steps(job.paths).recomputed == L * 6
    assert not read_events(job.paths, "sdc_detected")


@pytest.mark.search
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("fields", [{}, {"train__strategy": "central_storage"}, {"train__precision": "fp16"}], ids=str)
def test_ten_thousand_recomputed_shares_raise_no_false_alarm(
    worker_pool: WorkerPool, tmp_path: Path, workers: int, fields: dict[str, Any]
) -> None:
    settings = {"checkpoint__every_steps": 500, "train__epochs": 900, "train__max_steps": 2600}
    job = job_in(tmp_path, "many", **CHECK_ALL, **fields, **settings)
    worker_pool.train_to_end(job, workers, cache_windows)
    assert read_steps(job.paths).recomputed == 2600 * L
    assert not read_events(job.paths, "sdc_detected")


def test_the_sdc_check_recomputes_a_part_of_the_shares(worker_pool: WorkerPool, tmp_path: Path) -> None:
    job = job_in(tmp_path, "twice", task=TinyImages("unused"), failure__sdc_check_rate=0.5)
    worker_pool.train_to_end(job, 2, cache_windows)
    assert 0 < read_steps(job.paths).recomputed < L * 6


def compare_after_step_4(rank: int, step: int) -> None:
    """Sets the interval of the comparisons in the worker's process, and sets it back later."""
    sdc._COMPARE_STEPS = 4 if step < 4 else 1000


def test_comparing_parameters_finds_the_divergent_rank(worker_pool: WorkerPool, tmp_path: Path) -> None:
    """A bit flips in the memory of rank 1 after step 3; rank 1 takes the state of the majority."""
    job = job_in(tmp_path, "compared", failure__sdc_check_rate=1e-9)
    flip = Flip(Evidence(str(tmp_path / "evidence")), "flip", "parameter", 1, 3)
    both = Hooks(after_step=HookChain((flip, compare_after_step_4)), built=flip.built)
    outcomes = train_shifting(worker_pool, job, [[0, 1, 2], [0, 1, 2]], [], both)
    assert [outcome.value for outcome in outcomes] == ["done"] * 3, [outcome.trace for outcome in outcomes]
    [diverged] = read_events(job.paths, "params_diverged")
    assert diverged.details["ranks"] == [1]
    assert diverged.details["step"] == 4
    assert len(read_trained_run(job).steps) == 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"failure__sdc_check_rate": 0.1, "train__strategy": "fsdp"},
            r"sdc_check_rate is 0\.1 with train\.strategy fsdp",
        ),
        ({"failure__sdc_check_rate": 0.1, "train__reduction": "overlapped"}, r"train\.reduction overlapped"),
        ({"failure__sdc_check_rate": 1.5}, r"sdc_check_rate is 1\.5; it must be at least 0 and at most 1"),
    ],
)
def test_incompatible_sdc_settings_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job_in(tmp_path, "refused", **fields)


class LeavesEvalMode(TinyImages):
    """Leaves the model in evaluation mode, as a task may; each logical worker starts in the initial modes."""

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        outputs = super().forward(model, batch)
        model.eval()
        return outputs


def test_a_recomputed_share_starts_in_the_initial_modes(worker_pool: WorkerPool, tmp_path: Path) -> None:
    job = job_in(tmp_path, "modes", LeavesEvalMode(), **CHECK_ALL)
    outcomes = train_shifting(worker_pool, job, [[0, 1, 2]], [], Hooks())
    assert [outcome.trace for outcome in outcomes] == [""] * 3
