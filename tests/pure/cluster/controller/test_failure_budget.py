"""What may go wrong before a run gives up."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_app.cluster.controller.failure_budget import FailureBudget, failure_summary
from ray_app.config.sections import FailureSection
from ray_app.errors import BudgetSpentError, DataError, PreemptedError, RepeatedFailureError, StorageError, TaskError
from ray_app.runlog.journal import put_event, read_events

DIED = "A worker health check failed. Worker exit detail: killed by signal 9. Some common causes include: (1) and so on"


def budget(folder: Path, **limits: int) -> FailureBudget:
    return FailureBudget(str(folder), 1, FailureSection(**limits))


def test_failures_and_preemptions_have_budgets_of_their_own(tmp_path: Path) -> None:
    ours = budget(tmp_path, max_failures=1, max_preemptions=2)
    ours.charge_failure({1: OSError("disk")}, step=3, left=1)
    ours.charge_preemption(1, step=4, left=1)
    ours.charge_failure({0: PreemptedError("leaves"), 1: PreemptedError("leaves")}, step=5, left=0)
    with pytest.raises(BudgetSpentError, match=r"taken away 3 times; failure\.max_preemptions allows 2"):
        ours.charge_preemption(1, step=6, left=1)
    with pytest.raises(
        BudgetSpentError, match=r"failed 2 times; failure\.max_failures allows 1.*\n1: OSError: network"
    ):
        ours.charge_failure({1: OSError("network")}, step=7, left=1)


def test_what_cannot_be_mended_ends_the_run(tmp_path: Path) -> None:
    ours = budget(tmp_path)
    with pytest.raises(DataError, match="row 7"):
        ours.charge_failure({0: OSError("lost"), 1: DataError("row 7")}, step=3, left=0)
    [event] = read_events(ours.paths, "failed")
    assert event.details["final"]


def test_a_storage_that_fails_is_not_charged_and_ends_the_run_at_last(tmp_path: Path) -> None:
    ours = budget(tmp_path, max_failures=0)
    for step in (3, 4):
        for _ in range(19):
            ours.charge_failure({0: StorageError("S3 is away"), 1: StorageError("S3 is away")}, step, left=0)
    assert failure_summary(ours.paths, FailureSection()) == "38 failures of the storage"
    assert len(read_events(ours.paths, "storage_failed")) == 38
    with pytest.raises(
        RepeatedFailureError, match=r"storage failed 20 times in a row after step 4.*\n0, 1: StorageError: S3 is away"
    ):
        ours.charge_failure({0: StorageError("S3 is away"), 1: StorageError("S3 is away")}, 4, left=0)
    with pytest.raises(BudgetSpentError):
        ours.charge_failure({0: StorageError("S3 is away"), 1: OSError("other")}, 5, left=0)


def test_only_the_same_failure_at_the_same_step_counts_as_repeated(tmp_path: Path) -> None:
    ours = budget(tmp_path, max_failures=-1)
    for step, reason in ((3, "a"), (3, "a"), (4, "a"), (4, "b"), (4, "a"), (4, "a")):
        ours.charge_failure({0: OSError(reason)}, step, left=1)
    with pytest.raises(RepeatedFailureError, match="3 times in a row after step 4"):
        ours.charge_failure({1: OSError("a")}, 4, left=1)


def test_workers_that_are_lost_one_after_the_other_in_one_step_are_no_repetition(tmp_path: Path) -> None:
    ours = budget(tmp_path, max_failures=-1)
    for left in (4, 3, 2, 1, 0):
        ours.charge_failure({0: ConnectionError("no heartbeat for 5 s")}, step=3, left=left)
    with pytest.raises(RepeatedFailureError, match="6 times in a row after step 3"):
        ours.charge_failure({0: ConnectionError("no heartbeat for 5 s")}, step=3, left=4)


@pytest.mark.parametrize(("allowed", "times"), [(5, 6), (3, 4), (2, 3)])
def test_a_budget_that_is_spent_by_one_failure_says_that_it_repeats(tmp_path: Path, allowed: int, times: int) -> None:
    """With more workers than the budget allows failures trying again would be just as pointless, so it must not end as
    retryable.
    """
    ours = budget(tmp_path, max_failures=allowed)
    for _ in range(times - 1):
        ours.charge_failure({0: ValueError("wrong")}, step=3, left=7)
    with pytest.raises(RepeatedFailureError, match=f"{times} times in a row after step 3"):
        ours.charge_failure({0: ValueError("wrong")}, step=3, left=7)


@pytest.mark.parametrize("allowed", [-1, 5])
def test_what_strikes_all_workers_at_once_is_tried_three_times(tmp_path: Path, allowed: int) -> None:
    ours, errors = budget(tmp_path, max_failures=allowed), {rank: ValueError("wrong") for rank in range(8)}
    for _ in range(2):
        ours.charge_failure(errors, step=3, left=0)
    with pytest.raises(RepeatedFailureError, match="3 times in a row after step 3"):
        ours.charge_failure(errors, step=3, left=0)


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_small_budget_is_spent_before_anything_repeats(tmp_path: Path, allowed: int) -> None:
    ours = budget(tmp_path, max_failures=allowed)
    for _ in range(allowed):
        ours.charge_failure({0: ValueError("wrong")}, step=3, left=7)
    with pytest.raises(BudgetSpentError):
        ours.charge_failure({0: ValueError("wrong")}, step=3, left=7)


def test_what_a_task_raised_is_told_with_its_lines(tmp_path: Path) -> None:
    ours = budget(tmp_path)
    errors = {
        rank: TaskError("KeyError: 'x' (my_task.py, line 3, in loss)", "KeyError: 'x'", f"rank {rank}")
        for rank in range(2)
    }
    for _ in range(2):
        ours.charge_failure(errors, step=3, left=0)
    with pytest.raises(RepeatedFailureError, match=r"my_task\.py, line 3, in loss\)\n  rank 0\nKeyError"):
        ours.charge_failure(errors, step=3, left=0)
    assert read_events(ours.paths, "failed")[0].details["errors"] == {
        str(rank): str(error) for rank, error in errors.items()
    }
    with pytest.raises(BudgetSpentError, match=r"by rank:\n0, 1: KeyError: 'x' \(my_task.*\n  rank 0\n"):
        budget(tmp_path / "other", max_failures=0).charge_failure(errors, step=3, left=0)


def test_of_a_dead_process_only_how_it_died_is_said(tmp_path: Path) -> None:
    ours = budget(tmp_path)
    ours.charge_failure({1: RuntimeError(DIED)}, step=3, left=1)
    assert read_events(ours.paths, "failed")[0].details["errors"] == {
        "1": "the worker process died: killed by signal 9."
    }


def test_what_is_spent_is_said_in_words(tmp_path: Path) -> None:
    ours = budget(tmp_path, max_failures=5)
    limits = FailureSection(max_failures=5)
    assert failure_summary(ours.paths, limits) == ""
    put_event(ours.paths, "started", 1)
    ours.charge_failure({1: OSError("x")}, step=3, left=1)
    for step in (4, 5, 6):
        ours.charge_preemption(1, step, left=1)
    ours.record("resized", before=1, after=2)
    put_event(ours.paths, "started", 2)
    assert (
        failure_summary(ours.paths, limits) == "1 of 5 failures, 3 of unlimited preemptions, 1 resize, 1 driver restart"
    )


def test_with_a_large_budget_each_worker_may_be_lost_once_in_one_step(tmp_path: Path) -> None:
    ours = budget(tmp_path, max_failures=100)
    for left in (2, 1, 0):
        ours.charge_failure({0: ConnectionError("no heartbeat for 5 s")}, step=3, left=left)
    with pytest.raises(RepeatedFailureError, match="4 times in a row after step 3"):
        ours.charge_failure({0: ConnectionError("no heartbeat for 5 s")}, step=3, left=2)
