"""Workers, parameter servers and their coordinator, with failures at chosen points of a run."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from itertools import pairwise
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from safetensors.torch import save_file
from torch import nn

from ray_app.checkpoint.format import unpack
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.driver.finalize import summarize
from ray_app.errors import CheckpointError, ConfigError
from ray_app.runlog.journal import read_events, read_records
from ray_app.task.environment import restore_process_state
from ray_app.testing import TrainedRun, WorkerPool, cache_windows, read_trained_run, stream_windows
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import RendezvousStatus
from ray_app.train.strategies.parameter_server.actors import CoordinatorActor, RayServers, ServerActor
from tests.support.bit_identity import assert_bit_identical
from tests.support.local_world import CLASSES, TinyImages
from tests.support.server_world import ServerWorld, make_server_job

ROWS = [[50, 1], [46]]
CLIPPED = {"train__grad_clip_norm": 0.5}
ONE_CYCLE = {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.02}}
StepRows = tuple[int, list[int], list[int]]
"""Step, rows and row hashes of a recorded step."""


def train_on_servers(job: Job, workers: int) -> TrainedRun:
    ServerWorld(job, workers).run()
    return read_trained_run(job)


def read_consumed_rows(job: Job) -> list[StepRows]:
    """Returns step, rows and row hashes of each recorded step."""
    records, _ = read_records(job.paths)
    return [(step, r.rows, r.row_hash) for step, r in sorted(records.items())]


@pytest.fixture(scope="module")
def planned_rows(worker_pool: WorkerPool, data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[StepRows]:
    """The rows of each step by the plan, which are those of `ddp`."""
    folder = tmp_path_factory.mktemp("planned") / "run"
    job = make_server_job(folder, data, train__strategy="ddp", train__servers=1)
    worker_pool.train_to_end(job, 1, cache_windows)
    return read_consumed_rows(job)


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """A run of one worker in which nothing fails."""
    job = make_server_job(tmp_path_factory.mktemp("undisturbed") / "run", data)
    # `_same_threads` does so for a test only.
    with restore_process_state():
        return train_on_servers(job, 1)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, marks=pytest.mark.rest),
        {
            "schedule": ONE_CYCLE,
            **CLIPPED,
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05, "momentum": 0.9}},
        },
        {"train__ema_decay": 0.9, "task": TinyImages("unused"), "train__freeze": ["1.*"]},
    ],
    ids=["adam", "sgd with momentum, clipped, scheduled", "average, given, frozen and unused parameters"],
)
def test_synchronous_training_is_bit_identical_to_ddp(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    if "train__freeze" in fields:
        save_file(fields["task"].build_model().state_dict(), tmp_path / "begin.safetensors")
        fields = {**fields, "train__init_from": str(tmp_path / "begin.safetensors")}
    plain = worker_pool.train_new_run(
        make_server_job(tmp_path / "ddp", data, train__strategy="ddp", train__servers=1, **fields), 2, cache_windows
    )
    for workers, servers in ((1, 1), (3, 2)):
        run = train_on_servers(
            make_server_job(tmp_path / f"{workers}", data, train__servers=servers, **fields), workers
        )
        assert_bit_identical(run, plain)
    assert run.workers[-1] == [3]


class WideLayer(TinyImages):
    """A layer so wide that sums of squares over its parts differ from the sum over the whole in the last bit."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, CLASSES))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits parameters into parts of 1 KiB."""
    monkeypatch.setattr("ray_app.train.strategies.parameter_server.layout._MIN_PART_BYTES", 1 << 10)


@pytest.mark.parametrize("clipped", [pytest.param({}, marks=pytest.mark.rest), {"train__grad_clip_norm": 0.01}])
def test_training_with_split_variables_is_bit_identical_to_ddp(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, small_parts: None, clipped: dict[str, Any]
) -> None:
    fields = {"task": WideLayer(), "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}}, **clipped}
    plain = worker_pool.train_new_run(
        make_server_job(tmp_path / "ddp", data, train__strategy="ddp", train__servers=1, **fields), 2, cache_windows
    )
    whole = train_on_servers(make_server_job(tmp_path / "one", data, train__servers=1, **fields), 1)
    split = ServerWorld(make_server_job(tmp_path / "three", data, train__servers=3, **fields), 2)
    assert split.splits_variables, "nothing was split"
    split.run()
    assert read_trained_run(split.job).digests == whole.digests == plain.digests


def test_the_summary_reports_the_variables_of_each_server(data: Path, tmp_path: Path, small_parts: None) -> None:
    job = make_server_job(tmp_path / "run", data, train__servers=3, train__max_steps=1, task=WideLayer())
    ServerWorld(job, 1).run()
    servers = summarize(job, "finished")["parameter_servers"]
    shapes = {name: tuple(p.shape) for name, p in job.task.build_model().named_parameters()}
    spans_by_name = {
        name: sorted(span for server in servers for span in server["variables"].get(name, [])) for name in shapes
    }
    assert {name: (spans[0][0], spans[-1][1]) for name, spans in spans_by_name.items()} == {
        name: (0, shape[0]) for name, shape in shapes.items()
    }
    assert len(spans_by_name["1.weight"]) == 3, "the largest variable was not split into three parts"
    assert all(before[1] == after[0] for spans in spans_by_name.values() for before, after in pairwise(spans)), (
        "parts overlap or are missing"
    )
    row_bytes = {name: 4 * prod(shape[1:]) for name, shape in shapes.items()}
    part_bytes = [
        [(high - low) * row_bytes[name] for name, parts in server["variables"].items() for low, high in parts]
        for server in servers
    ]
    assert [server["bytes"] for server in servers] == [sum(sizes) for sizes in part_bytes]


def test_a_resume_on_other_workers_and_servers_is_bit_identical(data: Path, tmp_path: Path) -> None:
    fields = {"train__ema_decay": 0.9, "schedule": ONE_CYCLE}
    undisturbed = train_on_servers(make_server_job(tmp_path / "undisturbed", data, **fields), 2)
    first = ServerWorld(make_server_job(tmp_path / "run", data, train__servers=1, **fields), 2)
    first.run_until(8)
    first.close()
    resumed = ServerWorld(
        dataclasses.replace(make_server_job(tmp_path / "run", data, train__servers=3, **fields), fence=2), 3
    )
    resumed.run()
    assert [e.details["step"] for e in read_events(resumed.job.paths, "resumed")] == [5]
    assert read_trained_run(resumed.job).digests == undisturbed.digests


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_lost_worker_and_a_joining_worker_leave_the_rows_as_planned(
    data: Path, planned_rows: list[StepRows], undisturbed: TrainedRun, tmp_path: Path, staleness: int
) -> None:
    """The worker is lost after its gradient is applied and before it reports: its unit runs again and counts once."""
    world = ServerWorld(make_server_job(tmp_path / "run", data, train__staleness=staleness), 3)
    world.run(turns=6)
    while "1" not in world.results:
        world.run(turns=1)
    world.kill("1")
    world.run(turns=6)
    name = world.add()
    for _ in range(100):
        if name in world.results:
            break
        assert not world.run(turns=1), "the run ended without the joining worker"
    assert name in world.results, "the joining worker gets no unit"
    world.run()
    job = world.job
    assert read_consumed_rows(job) == planned_rows
    assert [e.details["workers"] for e in read_events(job.paths, "formed")][-3:] == [3, 2, 3]
    if not staleness:
        assert read_trained_run(job).digests == undisturbed.digests


def test_a_leaving_worker_finishes_its_unit_and_takes_no_other(data: Path, tmp_path: Path) -> None:
    world = ServerWorld(make_server_job(tmp_path / "run", data), 2)
    call, pushed_units = world.servers.call, []

    def record_pushes(method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        pushed_units.extend([arguments[0][1:3]] if method == "push" else [])
        return call(method, arguments)

    world.servers.call = record_pushes
    world.run(turns=5)
    while "1" not in world.results:
        world.run(turns=1)
    world.workers.pop("1").finish()
    assert world.units.workers == ["0"]
    world.coordinator.update_workers({"0"}, False, False)
    world.run()
    assert len(pushed_units) == len(set(pushed_units)) == 4 * world.job.total_steps, "a unit was done twice"
    formed = [e.details for e in read_events(world.job.paths, "formed")]
    assert [(event["workers"], "lost_s" in event) for event in formed] == [(1, False), (2, False), (1, False)]


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_lost_server_rolls_all_servers_back_to_the_last_checkpoint(
    data: Path, planned_rows: list[StepRows], undisturbed: TrainedRun, tmp_path: Path, staleness: int
) -> None:
    world = ServerWorld(make_server_job(tmp_path / "run", data, train__staleness=staleness), 2)
    world.run_until(8)
    world.servers.lose(1)
    world.run()
    [lost] = read_events(world.job.paths, "server_lost")
    assert lost.details["back_to"] == 5
    assert read_consumed_rows(world.job) == planned_rows
    store = CheckpointStore(world.job.paths)
    assert [c.step for c in store.commits()] == [5, 10, 15, world.job.total_steps]
    rows = [rows for _, rows, _ in read_consumed_rows(world.job)]
    assert [r for r in rows if 0 in r] == 2 * [[1, 0, 0, 0]]
    # A checkpoint has the gradients of exactly the steps before it; units without rows have no gradient.
    for commit in store.commits():
        state = unpack(store.load(commit)).optimizer["state"]
        applied = sum(map(bool, itertools.chain(*rows[: commit.step]))) if staleness else commit.step
        assert {int(values["step"]) for values in state.values()} == {applied}
    if not staleness:
        assert read_trained_run(world.job).digests == undisturbed.digests


def test_prefetching_large_rows_is_bit_identical_after_a_rollback(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"data__shuffle_window_rows": 16, "train__max_steps": 8}
    undisturbed = train_on_servers(make_server_job(tmp_path / "undisturbed", data, **fields), 1)
    monkeypatch.setattr("ray_app.data.feed._MIN_THREAD_BYTES", 0)
    monkeypatch.setattr("ray_app.data.windows._PREPARED_BYTES", 0)
    world = ServerWorld(make_server_job(tmp_path / "run", data, **fields), 2, stream_windows)
    assert world.job.plan.steps_per_window > 1
    world.run_until(7)
    world.servers.lose(0)
    world.run()
    assert [e.details["back_to"] for e in read_events(world.job.paths, "server_lost")] == [5]
    assert read_trained_run(world.job).digests == undisturbed.digests


def test_a_coordinator_that_starts_without_servers_waits_for_them(
    data: Path, undisturbed: TrainedRun, tmp_path: Path
) -> None:
    """The former coordinator had a higher era, and a server is lost before the new coordinator starts."""
    world = ServerWorld(make_server_job(tmp_path / "run", data), 2)
    world.servers.lose(0)
    world.run_until(8)
    former_era, call = world.era, world.servers.call
    world.servers.lose(1)
    world.servers.call = lambda method, arguments: None
    world.restart_coordinator()
    world.run(turns=2)
    assert world.coordinator.ask("0", None, None, 0.0).waiting
    world.servers.call = call
    world.run()
    assert world.era > former_era
    assert read_trained_run(world.job).digests == undisturbed.digests


def test_a_coordinator_that_starts_without_storage_retries(
    monkeypatch: pytest.MonkeyPatch, data: Path, undisturbed: TrainedRun, tmp_path: Path
) -> None:
    world = ServerWorld(make_server_job(tmp_path / "run", data), 2)
    load, raised_errors = CheckpointStore.load_newest, []
    world.run_until(8)

    def fail_twice(self: CheckpointStore, on_fallback: Any, above: int) -> Any:
        if len(raised_errors) == 2:
            return load(self, on_fallback, above=above)
        assert world.coordinator.is_waiting
        raised_errors.append(OSError("the disk does not answer"))
        raise raised_errors[-1]

    monkeypatch.setattr(CheckpointStore, "load_newest", fail_twice)
    world.restart_coordinator()
    assert [world.coordinator.ask("0", None, None, 0.0).waiting for _ in range(3)] == [True, True, False]
    assert not world.coordinator.is_waiting
    world.run()
    assert [e.details["step"] for e in read_events(world.job.paths, "resumed")] == [5]
    assert read_trained_run(world.job).digests == undisturbed.digests


class Handle:
    """The handle of an actor that runs in this process."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._actor, name))


class FakeRendezvous:
    """A rendezvous that only records watchdog pauses; when the test is over, it ends the threads that call it."""

    def __init__(self) -> None:
        self.paused, self.is_over = threading.Event(), threading.Event()

    def status(self) -> RendezvousStatus:
        if self.is_over.is_set():
            raise SystemExit
        return RendezvousStatus({"0"}, set(), {}, 1, 0, None, None, False, 60.0)

    def pause_watchdog(self) -> None:
        self.paused.set()


# The rendezvous raises `SystemExit` in the threads of the coordinator.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_that_packs_or_loads_its_state_has_more_time_than_a_step(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    world, killed = ServerWorld(make_server_job(tmp_path / "run", data), 1), list[Any]()
    rendezvous = FakeRendezvous()
    rendezvous.is_over.set()
    actors = {str(i): Handle(ServerActor(world.job.config, world.job.total_steps)) for i in range(2)}
    monkeypatch.setattr(ray, "get_actor", actors.__getitem__)
    monkeypatch.setattr(ray, "wait", lambda calls, timeout: ([], calls))
    monkeypatch.setattr(ray, "kill", lambda server, no_restart: killed.append(server))
    coordinator = CoordinatorActor(world.job, rendezvous, ["0", "1"], [], Hooks())
    killed_by_method: dict[str, list[int]] = {}

    def call(_: RayServers, method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        # Without a limit for a step, every server hangs.
        coordinator.monitor_servers(RendezvousStatus({"0"}, set(), {}, 1, 0, None, None, False, 0.0))
        killed_by_method.setdefault(method, []).append(len(killed))
        killed.clear()
        return world.servers.call(method, arguments)

    monkeypatch.setattr(RayServers, "call", call)
    world.coordinator, world.workers = coordinator, {}
    world.add()
    world.run()
    assert {method: set(counts) for method, counts in killed_by_method.items()} == {
        "era": {2},
        "load": {0},
        "norms": {2},
        "apply": {2},
        "state": {0},
    }


@pytest.mark.rest
# The rendezvous raises `SystemExit` in the threads of the coordinator.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_coordinator_pauses_the_watchdog_while_it_waits_for_the_storage(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    """A checkpoint is written only after the pause, so the next checkpoint waits, and all workers with it."""
    world, rendezvous = ServerWorld(make_server_job(tmp_path / "run", data), 1), FakeRendezvous()
    actors = {str(i): Handle(ServerActor(world.job.config, world.job.total_steps)) for i in range(2)}
    monkeypatch.setattr(ray, "get_actor", actors.__getitem__)
    monkeypatch.setattr(ray, "get", lambda answer, timeout=None: answer)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    world.servers = RayServers(tuple(actors[str(i)] for i in range(2)))
    monkeypatch.setattr(ray, "wait", lambda calls, timeout: (calls, []))
    pauses = []

    def wait_for_pause(commit: Commit) -> None:
        rendezvous.paused.clear()
        pauses.append(rendezvous.paused.wait(30))

    world.coordinator = CoordinatorActor(world.job, rendezvous, ["0", "1"], [], Hooks(before_commit=wait_for_pause))
    watch_threads = [thread for thread in threading.enumerate() if thread.name == "watch"]
    world.workers = {"0": world.worker("0")}
    try:
        world.run()
    finally:
        rendezvous.is_over.set()
        for thread in watch_threads:
            thread.join()
    assert pauses == [True] * 4
    assert not world.coordinator.is_waiting


def test_a_coordinator_that_cannot_start_raises_its_error_in_each_worker(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    def fail(self: CheckpointStore, on_fallback: Any, above: int) -> Any:
        raise CheckpointError("not one is intact")

    monkeypatch.setattr(CheckpointStore, "load_newest", fail)
    world = ServerWorld(make_server_job(tmp_path / "run", data), 2)
    for name in world.workers:
        with pytest.raises(CheckpointError):
            world.turn(name)


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.rest)])
def test_results_for_a_coordinator_that_died_with_all_servers_are_dropped(
    data: Path, planned_rows: list[StepRows], undisturbed: TrainedRun, tmp_path: Path, staleness: int
) -> None:
    """Ray sends a worker's result for the former coordinator to the new one; its gradient is lost with the servers."""
    world = ServerWorld(make_server_job(tmp_path / "run", data, train__staleness=staleness), 2)
    while world.units.complete < 5 or len(world.results) < 2:
        world.run(turns=1)
    former_era, results = world.era, world.results
    assert 5 in [result.unit.step for result in results.values()], "no result is of the restored step"
    for server in range(2):
        world.servers.lose(server)
    world.restart_coordinator()
    for name, result in results.items():
        world.coordinator.ask(name, result, None, 0.0)
    assert world.era > former_era
    assert world.next_steps == [5, 5, 5, 5]
    world.run()
    assert read_consumed_rows(world.job) == planned_rows
    if not staleness:
        assert read_trained_run(world.job).digests == undisturbed.digests


def test_steps_that_a_new_coordinator_repeats_are_counted(data: Path, tmp_path: Path) -> None:
    world = ServerWorld(make_server_job(tmp_path / "run", data), 2)
    world.run_until(8)
    for server in range(2):
        world.servers.lose(server)
    world.restart_coordinator()
    world.run()
    assert summarize(world.job, "finished")["redone_steps"] == 3


def test_a_step_that_is_applied_twice_counts_once(data: Path, undisturbed: TrainedRun, tmp_path: Path) -> None:
    """A coordinator that got no answer calls again."""
    world = ServerWorld(make_server_job(tmp_path / "run", data), 1)
    call = world.servers.call

    def apply_twice(method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        return (call(method, arguments) and call(method, arguments)) if method == "apply" else call(method, arguments)

    world.servers.call = apply_twice
    world.run()
    assert read_trained_run(world.job).digests == undisturbed.digests


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.ActorDiedError(),
        ray.exceptions.NodeDiedError("gone"),
        ray.exceptions.OutOfMemoryError("the memory monitor ended it"),
        ray.exceptions.GetTimeoutError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_error_of_ray_that_ends_a_server_marks_it_lost(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(calls: list[Any], timeout: float) -> list[Any]:
        raise error

    monkeypatch.setattr(ray, "get", fail)
    assert RayServers((Handle(SimpleNamespace(address_and_secret=lambda: None)),)).call("era", [()]) is None


def test_a_step_that_ended_on_one_server_only_is_undone(data: Path, undisturbed: TrainedRun, tmp_path: Path) -> None:
    """A server is out of reach for a moment; the coordinator does not know whether the call arrived."""
    world = ServerWorld(make_server_job(tmp_path / "run", data), 2)
    call, lost_answers = world.servers.call, []

    def fail_once(method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        if method == "apply" and arguments[0][1] == 7 and not lost_answers:
            lost_answers.append(world.servers.servers[0].apply(*arguments[0]))
            return None
        return call(method, arguments)

    world.servers.call = fail_once
    world.run()
    assert lost_answers
    assert read_trained_run(world.job).digests == undisturbed.digests


def test_a_lost_server_rolls_back_to_the_last_snapshot(data: Path, tmp_path: Path) -> None:
    world = ServerWorld(make_server_job(tmp_path / "run", data, checkpoint__snapshot_every_steps=2), 2)
    world.run_until(9)
    world.servers.lose(0)
    world.run()
    [lost] = read_events(world.job.paths, "server_lost")
    assert lost.details["back_to"] == 8


def test_a_stop_commits_a_checkpoint_at_the_next_common_step(
    data: Path, planned_rows: list[StepRows], tmp_path: Path
) -> None:
    world = ServerWorld(make_server_job(tmp_path / "run", data, train__staleness=3, checkpoint__every_steps=None), 2)
    while world.units.begun < 7:
        world.turn("0")
        if world.units.complete < 4:
            world.turn("1")
    world.coordinator.update_workers(set(world.workers), False, True)
    begun = world.units.begun
    world.run()
    [commit] = CheckpointStore(world.job.paths).commits()
    assert (commit.step, commit.why) == (begun, "extra")
    ServerWorld(dataclasses.replace(world.job, fence=2), 1).run()
    assert read_consumed_rows(world.job) == planned_rows
    assert read_trained_run(world.job).commit.step == world.job.total_steps


def test_a_stop_ends_a_run_that_waits_for_more_workers(data: Path, tmp_path: Path) -> None:
    world = ServerWorld(make_server_job(tmp_path / "run", data, checkpoint__every_steps=None), 2)
    world.run(turns=3)
    half_done = world.units.begun
    world.kill("1")
    world.coordinator.update_workers(set(world.workers), True, False)
    world.run(turns=3)
    assert world.units.complete == half_done - 1, "the run went on although it should wait for workers"
    world.coordinator.update_workers(set(world.workers), True, True)
    assert world.run(turns=5)
    assert [commit.step for commit in CheckpointStore(world.job.paths).commits()] == [half_done]


def test_the_coordinator_delays_its_answer_while_the_run_waits(data: Path, tmp_path: Path) -> None:
    world = ServerWorld(make_server_job(tmp_path / "run", data), 1)
    world.coordinator.update_workers(set(world.workers), True, False)
    began_s = time.monotonic()
    assert world.coordinator.ask("0", None, None, 0.2).waiting
    assert time.monotonic() - began_s >= 0.2


def test_a_stop_after_a_lost_worker_counts_the_gradients_it_sent(data: Path, tmp_path: Path) -> None:
    world = ServerWorld(make_server_job(tmp_path / "run", data, train__staleness=2, checkpoint__every_steps=None), 2)
    # Each worker has two logical workers after this turn.
    world.run(turns=1)
    while (units := world.units).begun < 3 or units.complete < 1:
        world.turn("0")
        if units.complete < 1:
            world.turn("1")
    world.kill("0")
    world.coordinator.update_workers(set(world.workers), False, True)
    world.run()
    store = CheckpointStore(world.job.paths)
    [commit] = store.commits()
    assert {int(values["step"]) for values in unpack(store.load(commit)).optimizer["state"].values()} == {
        4 * commit.step
    }


def test_a_worker_that_runs_ahead_waits_at_the_staleness_bound(data: Path, tmp_path: Path) -> None:
    world = ServerWorld(make_server_job(tmp_path / "run", data, train__staleness=2, checkpoint__every_steps=None), 2)
    # Each worker has two logical workers after this turn.
    world.run(turns=1)
    for _ in range(20):
        world.turn("0")
    units = world.units
    assert (units.complete, units.begun) == (0, 3)


def test_more_servers_than_parts_of_the_model_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.servers is 40, but the model has no more than \d+ parts"):
        ServerWorld(make_server_job(tmp_path / "run", data, train__servers=40), 1)
