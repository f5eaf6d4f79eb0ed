"""The numbers of the summary, computed from step records and events that are written by hand."""

from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ray_app.checkpoint.store import CheckpointStore
from ray_app.cluster.controller.failure_budget import failure_summary
from ray_app.cluster.resources import ClusterCapacity, workers_that_fit
from ray_app.config.config import Config
from ray_app.config.sections import FailureSection
from ray_app.driver.finalize import summarize
from ray_app.driver.run import print_start
from ray_app.errors import ConfigError
from ray_app.preflight.prepare import Prepared
from ray_app.report.facts import read_facts
from ray_app.report.html import render
from ray_app.runlog.evaluations import Evaluation, rank_evaluations
from ray_app.runlog.history import goodput, recoveries, restarts, start, undisturbed_row_s, world_sizes
from ray_app.runlog.journal import Event, StepRecord, put_event, read_events
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import put_json
from ray_app.watch.terminal import SafeConsole
from tests.support.checkpoints import commit_of
from tests.support.local_world import make_job, write_images
from tests.support.run_directory import START_S, RunDirectory


def record(step: int, time_s: float, workers: int = 2, step_ms: float = 1000.0) -> StepRecord:
    return StepRecord(step, 0, time_s, 1.0, 0.1, 1.0, step_ms, 0.0, workers, [8, 8], [1, 2], "1.1")


def event(kind: str, time_s: float, **details: Any) -> Event:
    return Event(kind, time_s, 1, details)


def test_consecutive_steps_with_one_world_size_are_one_entry() -> None:
    records = [record(1, 1, 2), record(2, 2, 2), record(3, 3, 1), record(4, 4, 2)]
    assert world_sizes(records) == [[0, 2], [2, 1], [3, 2]]


def test_the_duration_of_a_start_is_split_into_phases() -> None:
    """The phases are those of the newest start that finished a step."""
    phases = {"command": 3.0, "preparation": 0.5, "cluster": 2.0}
    events = [
        event("started", 1.0),
        event("workers", 4.0),
        event("started", 10.0, phases=phases),
        event("workers", 15.0),
    ]
    events += [event("formed", 16.5), event("formed", 30.0), event("workers", 40.0)]
    assert start(events, [record(1, 17.0), record(2, 31.0)]) == {
        **phases,
        "workers": 5.0,
        "forming": 1.5,
        "first step": 0.5,
    }
    later_events = [event("started", 50.0), event("workers", 54.0), event("formed", 55.0), event("started", 70.0)]
    records = [record(1, 17.0), record(2, 31.0), record(3, 57.0)]
    assert start(events + later_events, records) == {"workers": 4.0, "forming": 1.0, "first step": 2.0}, (
        "the phases are those of the last start, which finished no step"
    )
    assert start(events, []) == {}
    assert start([event("started", 1.0), event("formed", 1.0)], [record(1, 2.0)]) == {"forming": 0.0, "first step": 1.0}


def test_goodput_falls_with_pauses_and_repeated_steps() -> None:
    steady = [record(step, float(step)) for step in range(1, 11)]
    assert goodput(steady, []) == 1.0
    late = [*steady[:5], *(replace(r, time_s=r.time_s + 9) for r in steady[5:])]
    assert goodput(late, []) == 0.5
    assert goodput(late, [record(4, 25.0)]) == pytest.approx(9 / 24, abs=1e-4)
    assert goodput(steady[:1], []) is None
    slower = [*steady[:5], *(record(step, 5.0 + 2 * (step - 5), workers=1, step_ms=2000.0) for step in range(6, 16))]
    assert goodput(slower, []) == pytest.approx(14 / 24, abs=1e-4), "half the workers do not count as half the speed"


def test_goodput_needs_two_steps_and_some_time_between_them() -> None:
    assert goodput([record(1, 1.0), record(2, 2.0)], []) == 1.0
    assert goodput([record(1, 1.0), record(2, 1.0)], []) is None


def test_undisturbed_step_time_is_the_mean_of_steady_steps_at_the_largest_world_size() -> None:
    """Two workers take 1 s per step, and 5 s for step 10 with a checkpoint; after step 20 one of them is lost, and the
    other takes 2 s; a new worker joins and is slow for its first steps.
    """
    first_pair = [record(step, float(step)) for step in range(1, 10)]
    first_pair += [record(10, 14.0, step_ms=5000.0)] + [record(step, step + 4.0) for step in range(11, 21)]
    alone = [replace(record(20 + i, 24.0 + 2 * i, workers=1, step_ms=2000.0), generation="1.2") for i in range(1, 11)]
    joined = [replace(record(30 + i, 44.0 + 2.5 * i, step_ms=2500.0), generation="1.3") for i in range(1, 3)]
    steady = [replace(record(32 + i, 49.0 + i), generation="1.3") for i in range(1, 11)]
    # Steady are steps 5 to 20, after the first 3 s, and the ten after the first 3 s of the new worker.
    steady_s = (5 + 5 + 10) + 10
    num_steady = 16 + 10
    records = [*first_pair, *alone, *joined, *steady]
    assert undisturbed_row_s(records) == pytest.approx(steady_s / num_steady / 16)
    assert goodput(records, []) == pytest.approx(41 * steady_s / num_steady / 58, abs=1e-4)


def test_recovery_time_is_from_detection_to_the_next_finished_step() -> None:
    events = [event("failed", 5.5, left=0), event("failed", 50.0, left=0)]
    assert recoveries(events, [record(5, 5.0), record(6, 9.0), record(5, 8.0)]) == [2.5]


def test_recovery_time_begins_when_surviving_workers_notice_the_loss() -> None:
    events = [event("formed", 5.6, lost_s=5.5), event("failed", 5.8, left=1)]
    assert recoveries(events, [record(5, 5.0), record(6, 5.75)]) == [0.25]


def test_restarts_are_counted_by_cause() -> None:
    events = [
        event(kind, t)
        for t, kind in enumerate(
            ["started", "failed", "resized", "preempted", "preempted", "storage_failed", "started"]
        )
    ]
    assert restarts(events) == {"failures": 1, "preemptions": 2, "storage": 1, "resizes": 1, "driver": 1}


@pytest.mark.parametrize(
    ("ends", "restarted"),
    [(("finished", "finished"), 0), (("stopped_early", "finished"), 0), (("interrupted", "finished"), 1)],
)
def test_a_start_of_a_finished_run_does_not_count_as_a_restart_of_the_driver(
    tmp_path: Path, ends: tuple[str, str], restarted: int
) -> None:
    paths = RunPaths(tmp_path)
    for fence, kind in enumerate(ends, 1):
        put_event(paths, "started", fence)
        put_event(paths, kind, fence)
    put_event(paths, "started", 3)
    assert restarts(read_events(paths))["driver"] == restarted
    assert failure_summary(paths, FailureSection()) == ("1 driver restart" if restarted else "")


def test_the_best_evaluation_is_the_earliest_of_equal_ones_and_never_nan() -> None:
    values = [(8, 0.5), (16, float("nan")), (24, 0.9), (32, 0.9)]
    evaluations = [Evaluation(step, 0, "", {"accuracy": value}, 10, 0.1, 0.0) for step, value in values]
    assert [e.step for e in rank_evaluations(evaluations, "accuracy", "max")] == [24, 32, 8]
    assert [e.step for e in rank_evaluations(evaluations, "accuracy", "min")] == [8, 24, 32]
    assert rank_evaluations(evaluations, "f1", "max") == []


@pytest.mark.parametrize(
    ("fields", "done", "begun", "message"),
    [
        ({}, 1, 2, "40 rows, 5 steps of 8 rows per epoch, 4 epochs; up to 1 workers (of 2 configured; no more fit"),
        ({"train__steps_per_epoch": 2}, 4, 4, "40 rows, 2 steps of 8 rows per epoch (a pass over the data has 5)"),
        ({"train__strategy": "single"}, 1, 2, "40 rows, 5 steps of 8 rows per epoch, 4 epochs; in this process"),
    ],
)
def test_epochs_are_counted_by_the_configured_steps_per_epoch(
    tmp_path: Path, fields: dict[str, Any], done: int, begun: int, message: str
) -> None:
    """Eight steps are one and a half epochs of five steps, or four of two, in summary, report and console."""
    data = write_images(tmp_path / "data", [[20, 20]])
    job = make_job(tmp_path / "run", data, logical_workers=2, batch=8, train__epochs=4, **fields)
    job.paths.root.mkdir()
    job.paths.config.write_text(job.config.to_yaml())
    CheckpointStore(job.paths).write({}, commit_of(8))
    records = [asdict(replace(record(step, float(step)), epoch=(step - 1) // 5)) for step in range(1, 9)]
    put_json(job.paths.metrics / "0000000001-0001-1.json", {name: [r[name] for r in records] for name in records[0]})
    # Two writers record the same checkpoint.
    for _ in range(2):
        put_event(job.paths, "checkpointed", 1, step=8)
    assert summarize(job, "finished")["epochs"] == done
    assert summarize(job, "finished")["checkpoints"]["committed"] == 1
    assert f"in {begun} epochs begun" in render(read_facts(job.paths))
    console = Console(record=True, width=300, file=StringIO())
    print_start(SafeConsole(console), Prepared(job, None, False), 1)
    assert message in console.export_text()


def test_the_summary_counts_the_steps_and_events_of_all_starts(tmp_path: Path) -> None:
    """A worker is lost after step 4; the driver is interrupted after step 6, and repeats it in the second start."""
    run = RunDirectory(tmp_path, "run")
    data = write_images(tmp_path / "data", [[20, 20]])
    job = make_job(run.paths.root, data, logical_workers=2, batch=8, train__epochs=2)
    run.start(ray_job="raysubmit_1")
    run.event("formed", 3.0, workers=2)
    run.steps(1, 4, 3.5, each_s=1.0)
    run.event("failed", 7.75, left=1)
    run.event("formed", 8.0, workers=1, lost_s=START_S + 7.625)
    run.steps(5, 6, 8.0, each_s=2.0, workers=1, generation="1.2", skipped=1, losses={6: 3.0})
    run.checkpoint(6, 12.0)
    run.event("interrupted", 12.5)
    run.start(20.0, fence=2, phases={"command": 1.5})
    run.event("fallback", 21.0, fence=2)
    run.event("workers", 22.0, fence=2)
    run.event("formed", 23.0, fence=2, workers=2)
    losses = {6: 100.0} | dict.fromkeys(range(7, 11), 1.0)
    run.steps(6, 10, 23.0, each_s=1.0, generation="2.1", losses=losses, recomputed=1)
    run.checkpoint(10, 28.0)
    run.evaluate(6, 14.0, {"accuracy": 0.75}, lag_s=2.0)
    run.evaluate(10, 29.0, {"accuracy": 0.5}, lag_s=0.5, behind=1)
    run.event("evaluation_skipped", 29.0, fence=2, step=3)
    run.event("evaluation_skipped", 29.1, fence=2, step=3, by="other")
    run.event("write_failed", 29.2, fence=2, step=8)
    run.event("sdc_detected", 29.3, fence=2)
    run.event("worker_exit", 29.4, fence=2, stalls_ms=[1.0, 2.0, 6.0])
    run.event("finished", 30.0, fence=2)
    put_json(run.paths.bad_rows / "000000000005.json", {"position": 5})
    put_json(run.paths.tracking, {"run_id": "abc"})
    assert summarize(job, "finished") == {
        "status": "finished",
        "run_name": "run",
        "mlflow_run_id": "abc",
        "ray_job": "raysubmit_1",
        "ended_s": START_S + 30,
        "epochs": 2,
        "steps": 10,
        "rows": 10 * 32,
        "rows_by_logical_worker": [160, 160],
        "bad_rows": {"skipped": 2, "distinct": 1},
        "logical_workers": 2,
        "world_sizes": [[0, 2], [4, 1], [6, 2]],
        "restarts": {"failures": 1, "preemptions": 0, "storage": 0, "resizes": 0, "driver": 1},
        "redone_steps": 1,
        "recovery_s": [2.375],
        # Each undisturbed step takes 1 s; steps 2 to 10 count, and the last ends 23.5 s after the first.
        "goodput": round(9 / 23.5, 4),
        "params_digest": f"{10:064x}",
        "metrics": {"accuracy": 0.5},
        "constant": {},
        "training": {"loss": pytest.approx((3.0 + 4 * 1.0) / 5)},
        "best": {"step": 6, "metric": "accuracy", "value": 0.75},
        "stopped_early": None,
        "evaluation": {"done": 2, "skipped": 1, "max_pending": 1, "lag_s": 2.0},
        "checkpoints": {"committed": 2, "fallbacks": 1, "failed_writes": 1},
        "sdc_checks": {"shares": 4, "corrupt_ranks": 1},
        "start_s": {"command": 1.5, "workers": 2.0, "forming": 1.0, "first step": 1.0},
        "timing": {
            "wall_s": 30.0,
            "startup_s": 4.5,
            "step_ms": 1000.0,
            "data_wait_fraction": round(10 / 12_000, 4),
            "checkpoint_stall_ms": 2.0,
        },
        "parameter_servers": None,
        "model": None,
        "branch": None,
    }


def test_workers_leave_resources_for_readers_and_the_evaluator() -> None:
    config = Config().replace(scaling__min_workers=2, scaling__max_workers=8, data__eval_path="x")
    assert workers_that_fit(config, ClusterCapacity({"CPU": 64.0})) == 8
    assert workers_that_fit(config, ClusterCapacity({"CPU": 5.0})) == 3
    with pytest.raises(ConfigError, match=r"need 4 CPU and 0 GPU; the cluster has 3 CPU and 0 GPU"):
        workers_that_fit(config, ClusterCapacity({"CPU": 3.0}))
    assert workers_that_fit(config, ClusterCapacity({"CPU": 1.0}, max_resources={"CPU": 6.0, "memory": 1.0})) == 4, (
        "the nodes that the autoscaler may add do not count"
    )
    assert (
        workers_that_fit(
            config.replace(scaling__label_selector={"pool": "a"}),
            ClusterCapacity({"CPU": 1.0}, max_resources={"CPU": 6.0}),
        )
        == 4
    )
    with pytest.raises(ConfigError, match="the cluster grows to at most 3 CPU"):
        workers_that_fit(config, ClusterCapacity({"CPU": 1.0}, max_resources={"CPU": 3.0}))
    assert workers_that_fit(config.replace(evaluate__where="workers"), ClusterCapacity({"CPU": 3.0})) == 2, (
        "resources are left for an evaluator that does not exist"
    )
    with pytest.raises(ConfigError, match=r"2 GPU; the cluster has 16 CPU and 1 GPU"):
        workers_that_fit(config.replace(scaling__gpus_per_worker=1), ClusterCapacity({"CPU": 16.0, "GPU": 1.0}))
