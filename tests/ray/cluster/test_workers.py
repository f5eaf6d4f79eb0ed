"""Workers are lost: the others continue bit-identically, no finished step is redone, and a new worker joins."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from ray_app import run_training
from ray_app.checkpoint.store import CheckpointStore
from ray_app.cluster.ray_private import PrivateName
from ray_app.config.config import Config
from ray_app.drill.faults import HookChain
from ray_app.driver.run import Faults
from ray_app.errors import BudgetSpentError, RepeatedFailureError
from ray_app.runlog.journal import Event, read_events, read_records
from ray_app.runlog.paths import RunPaths
from ray_app.train.job import Hooks, Job
from tests.support.cluster import record_of
from tests.support.injector import (
    AllowKill,
    AwaitJoiningWorker,
    DelayUntilEvent,
    DelayUntilFile,
    Freeze,
    Kill,
    KillAtPhase,
    KillSaving,
    RaiseOSError,
    SlowDown,
    Stall,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")
ShortRun = Callable[..., Config]


def run_with(config: Config, reference: dict[str, Any], **hooks: Any) -> tuple[dict[str, Any], dict[str, list[Event]]]:
    """Trains, asserts that the result and the record of every step equal those of the undisturbed run, and returns
    summary and events.
    """
    watch = hooks.pop("watch", None)
    result = run_training(config, faults=Faults(train=Hooks(**hooks)), observe=watch)
    events: dict[str, list[Event]] = {}
    for event in read_events(RunPaths(result.path)):
        events.setdefault(event.kind, []).append(event)
    assert result.summary["status"] == "finished"
    assert result.summary["params_digest"] == reference["params_digest"]
    assert record_of(result.path) == reference["record"]
    assert [c.step for c in CheckpointStore(RunPaths(result.path)).commits() if c.why == "cadence"] == [8, 16, 24, 30]
    return result.summary, events


def sizes(events: dict[str, list[Event]]) -> list[int]:
    """Returns the number of workers of every generation."""
    return [e.details["workers"] for e in events["formed"]]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.guarantee), 1])
def test_survivors_continue_and_a_new_worker_joins(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path, rank: int
) -> None:
    config = make_short_config(scaling__min_workers=2, scaling__max_workers=2)
    kill = Kill(str(tmp_path / "killed"), step=13, rank=rank)
    run = str(tmp_path / "runs" / "run")
    joined = DelayUntilEvent(run, "formed", {"workers": 2, "generation": 3}, after=15)
    summary, events = run_with(config, reference_run, after_step=HookChain((kill, AwaitJoiningWorker(run, 14), joined)))
    assert kill.num_fired == 1
    assert sizes(events) == [2, 1, 2]
    assert summary["redone_steps"] == 0
    assert summary["world_sizes"][:2] == [[0, 2], [13, 1]]
    assert summary["world_sizes"][2][1] == 2
    assert (summary["restarts"]["failures"], len(summary["recovery_s"])) == (1, 1)
    assert "died" in next(iter(events["failed"][0].details["errors"].values()))
    assert "is committed (cadence)" in "".join(path.read_text() for path in Path(run, "output").glob("*.err"))
    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path()).glob("worker-*.err")
    log = "".join(path.read_text(errors="replace") for path in logs)
    assert " is lost: its connection has ended." in log
    assert " INFO ray_app.cluster.rendezvous.rendezvous: Generation 3 has formed with 2 workers at step 1" in log


def test_a_standby_worker_replaces_a_killed_worker(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path
) -> None:
    config = make_short_config(scaling__min_workers=2, scaling__max_workers=2, scaling__standby_workers=1)
    kill, run = Kill(str(tmp_path / "killed"), step=13, rank=1), str(tmp_path / "runs" / "run")
    ready = DelayUntilEvent(run, "standbys", {"ready": 1}, after=5, each_s=60)
    joined = DelayUntilEvent(run, "formed", {"workers": 2, "generation": 3}, after=15)
    summary, events = run_with(config, reference_run, after_step=HookChain((ready, kill, joined)))
    assert kill.num_fired == 1
    assert [event.details["ready"] for event in events["standbys"]][:2] == [1, 0], (
        "the standby worker must be ready before the kill, and then join"
    )
    assert sizes(events) == [2, 1, 2]
    assert (summary["restarts"]["failures"], summary["redone_steps"]) == (1, 0)
    [replaced] = events["replaced"]
    assert (replaced.details["before"], replaced.details["after"]) == (1, 2)


def test_the_standby_worker_continues_after_all_workers_were_killed(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path
) -> None:
    config = make_short_config(
        scaling__min_workers=1, scaling__max_workers=2, scaling__standby_workers=1, checkpoint__snapshot_every_steps=1
    )
    kill, run = Kill(str(tmp_path / "killed"), step=13), str(tmp_path / "runs" / "run")
    ready = DelayUntilEvent(run, "standbys", {"ready": 1}, after=5, each_s=60)
    committed = DelayUntilEvent(run, "checkpointed", {"step": 8}, after=12, each_s=60)
    joined = DelayUntilEvent(run, "formed", {"workers": 2, "generation": 3}, after=15)
    summary, events = run_with(config, reference_run, after_step=HookChain((ready, committed, kill, joined)))
    assert kill.num_fired == 2
    assert sizes(events) == [2, 1, 2]
    assert summary["redone_steps"] <= 1


def test_a_straggler_is_replaced_by_the_standby_worker(make_short_config: ShortRun, tmp_path: Path) -> None:
    longer = {"train__epochs": 30, "train__max_steps": 500, "checkpoint__every_steps": 250}
    alone = run_training(
        make_short_config(run__name="alone", train__strategy="single", scaling__max_workers=1, **longer)
    )
    scaling = {
        "scaling__min_workers": 2,
        "scaling__max_workers": 2,
        "scaling__standby_workers": 1,
        "scaling__evict_straggler_after_s": 1.0,
    }
    run = tmp_path / "runs" / "run"
    drag = SlowDown(str(tmp_path / "slow"), step=20, rank=1)
    ready = DelayUntilEvent(str(run), "standbys", {"ready": 1}, after=5, each_s=60)
    joined = DelayUntilEvent(str(run), "formed", {"workers": 2, "generation": 3}, after=490, each_s=10)
    result = run_training(
        make_short_config(**scaling, **longer), faults=Faults(train=Hooks(after_step=HookChain((ready, drag, joined))))
    )
    assert result.summary["params_digest"] == alone.summary["params_digest"]
    paths = RunPaths(run)
    # On a busy machine, the next worker may be a straggler, too.
    eviction = read_events(paths, "evicted")[0]
    slow = int(Path(f"{drag.proof}-1").read_text())
    assert eviction.details["pid"] == slow == next(e.details["pid"] for e in read_events(paths, "straggler_detected"))
    assert eviction.details["reason"].endswith("another worker replaces it")
    assert [e.details["workers"] for e in read_events(paths, "formed")][:3] == [2, 1, 2]
    assert (result.summary["restarts"]["failures"], result.summary["redone_steps"]) == (0, 0)


class ExitOnUnpickling:
    """Ends every process that unpickles it."""

    def __call__(self, rank: int, step: int) -> None: ...

    def __reduce__(self) -> tuple[Callable[[int], Any], tuple[int]]:
        return os._exit, (1,)


def test_failures_of_joining_workers_count_against_the_budget(make_short_config: ShortRun) -> None:
    config = make_short_config(scaling__min_workers=1, scaling__max_workers=1, failure__max_failures=1)
    with pytest.raises(BudgetSpentError, match="failed 2 times"):
        run_training(config, faults=Faults(train=Hooks(after_step=ExitOnUnpickling())))


def test_a_run_survives_the_death_of_its_memory_cache(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path
) -> None:
    """Workers that have the data continue; the worker that joins gets data that is decoded again."""
    config = make_short_config(
        scaling__min_workers=2, scaling__max_workers=2, data__cache="memory", data__read_task_mb=0.001
    )
    kill = Kill(str(tmp_path / "killed"), step=13, rank=1)
    run = str(tmp_path / "runs" / "run")
    again = tmp_path / "again"
    pids: list[int] = []

    def watch(job: Job) -> None:
        ours = psutil.Process().children(recursive=True)
        cache_pids = [
            process.pid for process in ours if "ray::MemoryCache" in process.name() and process.pid not in pids
        ]
        if not cache_pids or not _has_stepped(job):
            return
        if not pids:
            os.kill(cache_pids[0], signal.SIGKILL)
        else:
            again.touch()
        pids.extend(cache_pids)

    acts = (
        DelayUntilFile(str(again), 5),
        kill,
        AwaitJoiningWorker(run, 14),
        DelayUntilEvent(run, "formed", {"workers": 2, "generation": 3}, after=15),
    )
    summary, events = run_with(config, reference_run, after_step=HookChain(acts), watch=watch)
    assert len(pids) == 2, "the actor must die once and be restarted"
    assert kill.num_fired == 1
    assert sizes(events) == [2, 1, 2]
    assert (summary["restarts"]["failures"], summary["redone_steps"]) == (1, 0)


def _has_stepped(job: Job) -> bool:
    records, _ = read_records(job.paths)
    return bool(records)


def test_survivors_continue_after_deaths_in_every_phase_of_a_step(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path
) -> None:
    """A worker dies while it computes, another in the reduction, and another while the next generation forms."""
    config = make_short_config(scaling__min_workers=1, scaling__max_workers=4)
    kills = [
        KillAtPhase(str(tmp_path / "compute"), "compute", rank=3, step=5),
        KillAtPhase(str(tmp_path / "reduction"), "reduction", rank=0, step=11),
        KillAtPhase(str(tmp_path / "forming"), "forming", rank=1, step=11),
    ]
    summary, events = run_with(config, reference_run, at=HookChain(tuple(kills)))
    assert [kill.num_fired for kill in kills] == [1, 1, 1]
    assert sizes(events)[:2] == [4, 3]
    assert 1 in sizes(events)
    assert summary["redone_steps"] == 0


@pytest.mark.rest
def test_survivors_continue_after_two_simultaneous_deaths(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path
) -> None:
    config = make_short_config(scaling__min_workers=1, scaling__max_workers=3)
    kills = [Kill(str(tmp_path / f"killed{rank}"), step=13, rank=rank) for rank in (0, 1)]
    summary, events = run_with(config, reference_run, after_step=HookChain(tuple(kills)))
    assert [kill.num_fired for kill in kills] == [1, 1]
    assert summary["redone_steps"] == 0
    assert sizes(events)[-1] == 1


def test_a_run_survives_a_worker_that_dies_while_it_joins(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path
) -> None:
    config = make_short_config(scaling__min_workers=2, scaling__max_workers=2)
    kill, join = (
        Kill(str(tmp_path / "killed"), step=13, rank=1),
        KillAtPhase(str(tmp_path / "joined"), "forming", rank=1, step=-1),
    )
    run = str(tmp_path / "runs" / "run")
    # With this file, the first start is not killed.
    Path(f"{join.proof}-1").touch()

    acts = (
        AllowKill(join.proof),
        kill,
        AwaitJoiningWorker(run, 14),
        DelayUntilEvent(run, "failed", {"number": 2}, after=15),
    )
    summary, events = run_with(config, reference_run, after_step=HookChain(acts), at=join)
    assert (kill.num_fired, join.num_fired) == (1, 1)
    assert summary["restarts"]["failures"] == 2
    assert summary["redone_steps"] == 0
    assert set(sizes(events)) >= {1, 2}


@pytest.mark.parametrize(("every", "max_redone"), [pytest.param(1, 1, marks=pytest.mark.guarantee), (None, 5)])
def test_the_loss_of_all_workers_redoes_few_steps(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path, every: int | None, max_redone: int
) -> None:
    config = make_short_config(scaling__min_workers=2, scaling__max_workers=2, checkpoint__snapshot_every_steps=every)
    kill = Kill(str(tmp_path / "killed"), step=13)
    committed = DelayUntilEvent(str(tmp_path / "runs" / "run"), "checkpointed", {"step": 8}, after=12, each_s=10)
    summary, events = run_with(config, reference_run, after_step=HookChain((committed, kill)))
    assert kill.num_fired == 2
    assert summary["redone_steps"] <= max_redone
    [resumed] = events["resumed"]
    assert resumed.details["source"] == ("snapshot" if every else "checkpoint")
    assert resumed.details["step"] >= 12 if every else resumed.details["step"] == 8


@pytest.mark.rest
def test_a_run_continues_without_a_frozen_worker(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path
) -> None:
    config = make_short_config(scaling__min_workers=1, scaling__max_workers=3, failure__heartbeat_timeout_s=5.0)
    freeze = Freeze(str(tmp_path / "frozen"), step=13, rank=1)
    summary, events = run_with(config, reference_run, after_step=freeze)
    assert freeze.num_fired == 1
    assert sizes(events)[:2] == [3, 2]
    assert summary["redone_steps"] == 0
    pid = int(Path(f"{freeze.proof}-1").read_text())
    if Path(f"/proc/{pid}").exists():
        os.kill(pid, signal.SIGKILL)


def test_a_stalled_worker_is_killed_and_its_stacks_are_recorded(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path
) -> None:
    config = make_short_config(scaling__min_workers=2, scaling__max_workers=2, failure__step_timeout_s=6.0)
    stall = Stall(str(tmp_path / "stalled"), "data", rank=1, step=13)
    summary, events = run_with(config, reference_run, at=stall)
    assert stall.num_fired == 1
    assert summary["redone_steps"] == 0
    stacks = {e.details["rank"]: e.details for e in events["stacks"]}
    assert set(stacks) == {0, 1}
    assert (stacks[0]["doing"], stacks[1]["doing"]) == ("reduction", "data")
    assert "injector.py" in stacks[1]["stacks"]


@pytest.mark.parametrize(
    ("recovery", "resumed_steps", "first_sizes"), [("in_place", [], [2, 1]), ("restart", [16], [2, 2])]
)
def test_a_run_survives_a_killed_rendezvous(
    make_short_config: ShortRun,
    reference_run: dict[str, Any],
    tmp_path: Path,
    recovery: str,
    resumed_steps: list[int],
    first_sizes: list[int],
) -> None:
    """The new rendezvous has no state; the run still survives the death of a worker after it."""
    done = tmp_path / "rendezvous-killed"

    def watch(job: Job) -> None:
        if not done.exists() and read_events(job.paths, "formed"):
            ray.kill(ray.get_actor(job.rendezvous), no_restart=False)
            done.touch()

    config = make_short_config(scaling__min_workers=2, scaling__max_workers=2, failure__recovery=recovery)
    kill = Kill(str(tmp_path / "killed"), step=20, rank=0)
    slow = DelayUntilFile(str(done), step=5)
    summary, events = run_with(config, reference_run, after_step=HookChain((slow, kill)), watch=watch)
    assert done.exists()
    assert kill.num_fired == 1
    # With `restart` steps 17 to 20 are repeated. Only those are counted that the killed rank 0 had already recorded.
    assert summary["redone_steps"] <= (4 if resumed_steps else 0)
    assert [event.details["step"] for event in events.get("resumed", [])] == resumed_steps
    assert sizes(events)[:2] == first_sizes


def test_recovery_by_restart_restarts_all_workers_like_stock_ray_train(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path
) -> None:
    config = make_short_config(scaling__min_workers=2, scaling__max_workers=2, failure__recovery="restart")
    kill = Kill(str(tmp_path / "killed"), step=13, rank=1)
    summary, events = run_with(config, reference_run, after_step=kill)
    assert kill.num_fired == 1
    assert sizes(events) == [2, 2]
    assert summary["redone_steps"] == 13 - 8


@pytest.mark.rest
def test_a_run_with_an_untested_version_of_ray_recovers_by_restart_without_private_names(
    make_short_config: ShortRun,
    reference_run: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It imitates a newer version of Ray that has none of the private names."""
    monkeypatch.setattr(ray, "__version__", "2.99.0")
    monkeypatch.setattr(PrivateName, "find", lambda name: None)
    config = make_short_config(scaling__min_workers=2, scaling__max_workers=2)
    kill = Kill(str(tmp_path / "killed"), step=13, rank=1)
    summary, events = run_with(config, reference_run, after_step=kill)
    assert kill.num_fired == 1
    assert sizes(events) == [2, 2]
    assert (summary["redone_steps"], summary["restarts"]["failures"]) == (13 - 8, 1)
    assert [event.details["workers"] for event in events["workers"]] == [2, 2]
    warnings = [record.getMessage() for record in caplog.records if "this is Ray 2.99.0" in record.getMessage()]
    assert len(warnings) == 1


def test_a_repeated_failure_ends_the_run_early(make_short_config: ShortRun, tmp_path: Path) -> None:
    config = make_short_config(scaling__min_workers=2, scaling__max_workers=2, failure__max_failures=-1)
    with pytest.raises(RepeatedFailureError, match=r"3 times in a row after step 13.*flaky"):
        run_training(config, faults=Faults(train=Hooks(after_step=RaiseOSError(13))))
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["restarts"]["failures"] == 3


def test_the_next_rank_writes_the_checkpoint_of_a_rank_killed_in_its_commit(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path
) -> None:
    config = make_short_config(scaling__min_workers=1, scaling__max_workers=2)
    kill = KillSaving(str(tmp_path / "killed"), step=16)
    slow = DelayUntilFile(f"{kill.proof}-0", step=17)
    summary, events = run_with(config, reference_run, before_commit=kill, after_step=slow)
    assert kill.num_fired == 1
    assert summary["redone_steps"] == 0
    assert sizes(events)[:2] == [2, 1]
