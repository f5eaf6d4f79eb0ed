"""The failures and preemptions that a run may have before it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_app.cluster.controller.failure_budget import FailureBudget, failure_summary
from ray_app.config.sections import FailureSection
from ray_app.errors import (
    BudgetSpentError,
    DataError,
    DeviceFaultError,
    PreemptedError,
    RepeatedFailureError,
    StorageError,
    TaskError,
)
from ray_app.runlog.journal import put_event, read_events

DIED = "A worker health check failed. Worker exit detail: killed by signal 9. Some common causes include: (1) and so on"


def make_budget(folder: Path, **limits: int) -> FailureBudget:
    return FailureBudget(str(folder), 1, FailureSection(**limits))


def test_preemptions_are_not_charged_as_failures(tmp_path: Path) -> None:
    failure_budget = make_budget(tmp_path, max_failures=1)
    failure_budget.charge_failure({1: OSError("disk")}, step=3, left=1)
    failure_budget.charge_preemption(1, step=4, left=1)
    failure_budget.charge_failure({0: PreemptedError("leaves"), 1: PreemptedError("leaves")}, step=5, left=0)
    with pytest.raises(
        BudgetSpentError, match=r"failed 2 times; failure\.max_failures allows 1.*\n1: OSError: network"
    ):
        failure_budget.charge_failure({1: OSError("network")}, step=7, left=1)


def test_a_limit_of_zero_ends_the_run_at_the_first_loss_and_of_minus_one_never(tmp_path: Path) -> None:
    with pytest.raises(BudgetSpentError):
        make_budget(tmp_path / "b", max_failures=0).charge_failure({0: OSError("disk")}, step=1, left=1)
    unlimited = make_budget(tmp_path / "c", max_failures=-1)
    for step in range(1, 12):
        unlimited.charge_preemption(1, step=step, left=1)
        unlimited.charge_failure({0: OSError(f"disk {step}")}, step=step, left=1)


def test_an_error_that_a_retry_cannot_fix_ends_the_run(tmp_path: Path) -> None:
    failure_budget = make_budget(tmp_path)
    with pytest.raises(DataError, match="row 7"):
        failure_budget.charge_failure({0: OSError("lost"), 1: DataError("row 7")}, step=3, left=0)
    [event] = read_events(failure_budget.paths, "failed")
    assert event.details["final"]


def test_storage_failures_are_not_charged_and_end_the_run_after_20_in_a_row(tmp_path: Path) -> None:
    failure_budget = make_budget(tmp_path, max_failures=0)
    for step in (3, 4):
        for _ in range(19):
            failure_budget.charge_failure({0: StorageError("S3 is away"), 1: StorageError("S3 is away")}, step, left=0)
    assert failure_summary(failure_budget.paths, FailureSection()) == "38 failures of the storage"
    assert len(read_events(failure_budget.paths, "storage_failed")) == 38
    with pytest.raises(
        RepeatedFailureError, match=r"storage failed 20 times in a row after step 4.*\n0, 1: StorageError: S3 is away"
    ):
        failure_budget.charge_failure({0: StorageError("S3 is away"), 1: StorageError("S3 is away")}, 4, left=0)
    with pytest.raises(BudgetSpentError):
        failure_budget.charge_failure({0: StorageError("S3 is away"), 1: OSError("other")}, 5, left=0)


@pytest.mark.parametrize(
    ("allowed", "earlier", "last", "times"),
    [
        (-1, [(3, "a", 1), (3, "a", 1), (4, "a", 1), (4, "b", 1), (4, "a", 1), (4, "a", 1)], (4, "a", 1), 3),
        # Workers that are lost one after the other in one step are not a repeated failure.
        (-1, [(3, "a", left) for left in (4, 3, 2, 1, 0)], (3, "a", 4), 6),
        # With a large budget each worker may be lost once in one step.
        (100, [(3, "a", left) for left in (2, 1, 0)], (3, "a", 2), 4),
        # A run with more workers than its budget must not end as retryable: a retry would fail as well.
        *((allowed, [(3, "a", 7)] * allowed, (3, "a", 7), allowed + 1) for allowed in (5, 3, 2)),
        # All workers fail at once.
        *((allowed, [(3, "aaaaaaaa", 0)] * 2, (3, "aaaaaaaa", 0), 3) for allowed in (-1, 5)),
    ],
)
def test_only_the_same_failure_at_the_same_step_counts_as_repeated(
    tmp_path: Path, allowed: int, earlier: list[tuple[int, str, int]], last: tuple[int, str, int], times: int
) -> None:
    """A failure is its step, the error of each worker that failed, and the number of workers that are left."""
    failure_budget = make_budget(tmp_path, max_failures=allowed)

    def charge(first_rank: int, step: int, errors: str, left: int) -> None:
        failure_budget.charge_failure({rank: OSError(text) for rank, text in enumerate(errors, first_rank)}, step, left)

    for first_rank, failure in enumerate(earlier):
        charge(first_rank, *failure)
    with pytest.raises(RepeatedFailureError, match=f"{times} times in a row after step {last[0]}"):
        charge(0, *last)


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_budget_below_two_is_spent_before_a_failure_counts_as_repeated(tmp_path: Path, allowed: int) -> None:
    failure_budget = make_budget(tmp_path, max_failures=allowed)
    for _ in range(allowed):
        failure_budget.charge_failure({0: ValueError("wrong")}, step=3, left=7)
    with pytest.raises(BudgetSpentError):
        failure_budget.charge_failure({0: ValueError("wrong")}, step=3, left=7)


def test_an_error_of_a_task_is_reported_with_its_source_lines(tmp_path: Path) -> None:
    failure_budget = make_budget(tmp_path)
    errors = {
        rank: TaskError("KeyError: 'x' (my_task.py, line 3, in loss)", "KeyError: 'x'", f"rank {rank}")
        for rank in range(2)
    }
    for _ in range(2):
        failure_budget.charge_failure(errors, step=3, left=0)
    with pytest.raises(RepeatedFailureError, match=r"my_task\.py, line 3, in loss\)\n  rank 0\nKeyError"):
        failure_budget.charge_failure(errors, step=3, left=0)
    assert read_events(failure_budget.paths, "failed")[0].details["errors"] == {
        str(rank): str(error) for rank, error in errors.items()
    }
    with pytest.raises(BudgetSpentError, match=r"by rank:\n0, 1: KeyError: 'x' \(my_task.*\n  rank 0\n"):
        make_budget(tmp_path / "other", max_failures=0).charge_failure(errors, step=3, left=0)


def test_a_dead_process_is_reported_with_its_cause_of_death_only(tmp_path: Path) -> None:
    failure_budget = make_budget(tmp_path)
    failure_budget.charge_failure({1: RuntimeError(DIED)}, step=3, left=1)
    assert read_events(failure_budget.paths, "failed")[0].details["errors"] == {
        "1": "the worker process died: killed by signal 9."
    }


def test_the_summary_counts_failures_preemptions_resizes_and_restarts(tmp_path: Path) -> None:
    failure_budget = make_budget(tmp_path, max_failures=5)
    limits = FailureSection(max_failures=5)
    assert failure_summary(failure_budget.paths, limits) == ""
    put_event(failure_budget.paths, "started", 1)
    failure_budget.charge_failure({1: OSError("x")}, step=3, left=1)
    for step in (4, 5, 6):
        failure_budget.charge_preemption(1, step, left=1)
    failure_budget.record("resized", before=1, after=2)
    put_event(failure_budget.paths, "started", 2)
    summary = failure_summary(failure_budget.paths, limits)
    assert summary == "1 of 5 failures, 3 preemptions, 1 resize, 1 driver restart"


def test_a_device_fault_is_an_event_with_the_device_and_its_node(tmp_path: Path) -> None:
    failure_budget = make_budget(tmp_path)
    fault = DeviceFaultError("CUDA error: uncorrectable ECC error\nmore", "cuda NVIDIA H200, 5fd4", "node-7")
    failure_budget.charge_failure({2: fault}, step=3, left=0)
    [event] = read_events(failure_budget.paths, "device_fault")
    assert event.details == {
        **{"rank": 2, "name": "node-7", "device": "cuda NVIDIA H200, 5fd4", "step": 3},
        "reason": "CUDA error: uncorrectable ECC error\nmore",
    }
    # Other devices fail at the same step with the same error, so the program may be the cause.
    failure_budget.charge_failure({0: DeviceFaultError(str(fault), "a", "a")}, step=3, left=0)
    with pytest.raises(RepeatedFailureError, match="uncorrectable ECC"):
        failure_budget.charge_failure({0: DeviceFaultError(str(fault), "b", "b")}, step=3, left=0)
