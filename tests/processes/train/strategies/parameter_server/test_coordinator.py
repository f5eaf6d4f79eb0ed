"""What workers, parameter servers and their coordinator do in the orders that matter."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from itertools import pairwise
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from ray_app.checkpoint.format import unpack
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.driver.finalize import summarize
from ray_app.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from ray_app.runlog.journal import MetricsReader, read_events
from ray_app.task.image import ImageClassification
from ray_app.testing import TrainedRun, WorkerPool, cache_windows, read_trained_run, stream_windows
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import RendezvousStatus
from ray_app.train.strategies.parameter_server.actors import CoordinatorActor, RayServers, ServerActor
from ray_app.train.strategies.parameter_server.coordinator import Coordinator, UnitScheduler
from ray_app.train.strategies.parameter_server.server import _NO_GRADIENTS
from tests.support.local_world import CLASSES, TinyImages, make_job, write_images
from tests.support.server_world import World

ROWS = [[50, 1], [46]]
CLIPPED = {"train__grad_clip_norm": 0.5}
ONE_CYCLE = {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.02}}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("servers") / "data", ROWS)


def job_of(folder: Path, data: Path, **fields: Any) -> Job:
    defaults: dict[str, Any] = {
        "train__strategy": "parameter_server",
        "train__servers": 2,
        "train__epochs": 2,
        "checkpoint__every_epochs": None,
        "checkpoint__every_steps": 5,
        "checkpoint__keep_last": 10,
    }
    task = ImageClassification(model_args={"channels": 4, "dropout": 0.3})
    return make_job(folder, data, logical_workers=4, batch=12, **({"task": task} | defaults | fields))


def trained(job: Job, workers: int) -> TrainedRun:
    World(job, workers).run()
    return read_trained_run(job)


def consumed(job: Job) -> list[tuple[int, list[int], list[int]]]:
    """Step, rows and hashes of rows as recorded."""
    reader = MetricsReader(job.paths)
    reader.poll()
    return [(step, r.rows, r.row_hash) for step, r in sorted(reader.records.items())]


def planned(data: Path, folder: Path, pool: WorkerPool) -> list[tuple[int, list[int], list[int]]]:
    job = job_of(folder, data, train__strategy="ddp", train__servers=1)
    pool.train_to_end(job, 1, cache_windows)
    return consumed(job)


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
def test_synchronous_it_has_the_bits_of_ddp(
    pool: WorkerPool, data: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    if "train__freeze" in fields:
        save_file(fields["task"].build_model().state_dict(), tmp_path / "begin.safetensors")
        fields = {**fields, "train__init_from": str(tmp_path / "begin.safetensors")}
    plain = pool.train_new_run(
        job_of(tmp_path / "ddp", data, train__strategy="ddp", train__servers=1, **fields), 2, cache_windows
    )
    for workers, servers in ((1, 1), (3, 2)):
        run = trained(job_of(tmp_path / f"{workers}", data, train__servers=servers, **fields), workers)
        assert run.digests == plain.digests
        assert run.steps == plain.steps
    assert run.workers[-1] == [3]


class Wide(TinyImages):
    """So wide that the sum of the squares of parts is not, to the last bit, that of the whole."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, CLASSES))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are split into parts of 1 KiB."""
    monkeypatch.setattr("ray_app.train.strategies.parameter_server.layout._MIN_PART_BYTES", 1 << 10)


@pytest.mark.parametrize("clipped", [{}, {"train__grad_clip_norm": 0.01}])
def test_split_variables_have_the_same_bits(
    pool: WorkerPool, data: Path, tmp_path: Path, small_parts: None, clipped: dict[str, Any]
) -> None:
    fields = {"task": Wide(), "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}}, **clipped}
    plain = pool.train_new_run(
        job_of(tmp_path / "ddp", data, train__strategy="ddp", train__servers=1, **fields), 2, cache_windows
    )
    whole = trained(job_of(tmp_path / "one", data, train__servers=1, **fields), 1)
    split = World(job_of(tmp_path / "three", data, train__servers=3, **fields), 2)
    assert any(split.coordinator._served.layout.incomplete()), "nothing was split"
    split.run()
    assert read_trained_run(split.job).digests == whole.digests == plain.digests


def test_the_record_says_what_each_server_holds(data: Path, tmp_path: Path, small_parts: None) -> None:
    job = job_of(tmp_path / "run", data, train__servers=3, train__max_steps=1, task=Wide())
    World(job, 1).run()
    held = summarize(job, "finished")["parameter_servers"]
    shapes = {name: tuple(p.shape) for name, p in job.task.build_model().named_parameters()}
    rows = {name: sorted(rows for part in held for rows in part["variables"].get(name, [])) for name in shapes}
    assert {name: (found[0][0], found[-1][1]) for name, found in rows.items()} == {
        name: (0, shape[0]) for name, shape in shapes.items()
    }
    assert len(rows["1.weight"]) == 3, "it was not split"
    assert all(before[1] == after[0] for found in rows.values() for before, after in pairwise(found)), (
        "parts overlap or are missing"
    )
    row_bytes = {name: 4 * prod(shape[1:]) for name, shape in shapes.items()}
    counted = [
        [(high - low) * row_bytes[name] for name, parts in p["variables"].items() for low, high in parts] for p in held
    ]
    assert [part["bytes"] for part in held] == [sum(each) for each in counted]


def test_a_resume_on_other_workers_and_servers_changes_nothing(data: Path, tmp_path: Path) -> None:
    fields = {"train__ema_decay": 0.9, "schedule": ONE_CYCLE}
    undisturbed = trained(job_of(tmp_path / "undisturbed", data, **fields), 2)
    first = World(job_of(tmp_path / "run", data, train__servers=1, **fields), 2)
    while first.coordinator._units.complete < 8:
        first.run(turns=1)
    first.coordinator._step_log.close()
    again = World(dataclasses.replace(job_of(tmp_path / "run", data, train__servers=3, **fields), fence=2), 3)
    again.run()
    assert [e.details["step"] for e in read_events(again.job.paths, "resumed")] == [5]
    assert read_trained_run(again.job).digests == undisturbed.digests


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_worker_is_lost_and_another_joins(pool: WorkerPool, data: Path, tmp_path: Path, staleness: int) -> None:
    """It is lost when its gradient is applied but nobody was told, so that the unit is done again and must not count
    twice.
    """
    world = World(job_of(tmp_path / "run", data, train__staleness=staleness), 3)
    world.run(turns=6)
    while world.workers["1"]._result is None:
        world.run(turns=1)
    world.kill("1")
    world.run(turns=6)
    name = world.add()
    for _ in range(100):
        if world.workers[name]._result is not None:
            break
        assert not world.run(turns=1), "the new one did nothing"
    assert world.workers[name]._result is not None, "the new one gets nothing to do"
    world.run()
    job = world.job
    assert consumed(job) == planned(data, tmp_path / "plan", pool)
    assert [e.details["workers"] for e in read_events(job.paths, "formed")][-3:] == [3, 2, 3]
    if not staleness:
        assert read_trained_run(job).digests == trained(job_of(tmp_path / "undisturbed", data), 1).digests


def test_who_leaves_finishes_what_it_has_and_takes_on_nothing_more(data: Path, tmp_path: Path) -> None:
    world = World(job_of(tmp_path / "run", data), 2)
    call, sent = world.servers.call, []

    def noted(method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        sent.extend([arguments[0][1:3]] if method == "push" else [])
        return call(method, arguments)

    world.servers.call = noted  # type: ignore[method-assign]
    world.run(turns=5)
    while world.workers["1"]._result is None:
        world.run(turns=1)
    world.workers.pop("1").finish()
    assert world.coordinator._units.workers == ["0"]
    world.coordinator.update_workers({"0"}, False, False)
    world.run()
    assert len(sent) == len(set(sent)) == 4 * world.job.total_steps, "a unit was done twice"
    formed = [e.details for e in read_events(world.job.paths, "formed")]
    assert [(each["workers"], "lost_s" in each) for each in formed] == [(1, False), (2, False), (1, False)]


def test_a_gradient_counts_once(data: Path, tmp_path: Path) -> None:
    """Every server applies each gradient of each logical worker once, also when it comes twice."""
    job = job_of(
        tmp_path / "run", data, train__staleness=2, train__max_steps=4, optimizer={"class_path": "torch.optim.Adam"}
    )
    world = World(job, 2)
    call = world.servers.call

    def twice(method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        return (call(method, arguments) and call(method, arguments)) if method == "push" else call(method, arguments)

    world.servers.call = twice  # type: ignore[method-assign]
    world.run()
    state = read_trained_run(job).snapshot.optimizer["state"]
    assert {int(values["step"]) for values in state.values()} == {4 * 4}


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_lost_server_takes_all_back_to_the_last_cut(
    pool: WorkerPool, data: Path, tmp_path: Path, staleness: int
) -> None:
    world = World(job_of(tmp_path / "run", data, train__staleness=staleness), 2)
    while world.coordinator._units.complete < 8:
        world.run(turns=1)
    world.servers.lose(1)
    world.run()
    [lost] = read_events(world.job.paths, "server_lost")
    assert lost.details["back_to"] == 5
    assert consumed(world.job) == planned(data, tmp_path / "plan", pool)
    store = CheckpointStore(world.job.paths)
    assert [c.step for c in store.commits()] == [5, 10, 15, world.job.total_steps]
    rows = [rows for _, rows, _ in consumed(world.job)]
    assert [r for r in rows if 0 in r] == 2 * [[1, 0, 0, 0]]
    for (
        commit
    ) in store.commits():  # a cut holds just the gradients of the steps before it; units without rows have none
        state = unpack(store.load(commit)).optimizer["state"]
        applied = sum(map(bool, itertools.chain(*rows[: commit.step]))) if staleness else commit.step
        assert {int(values["step"]) for values in state.values()} == {applied}
    if not staleness:
        assert read_trained_run(world.job).digests == trained(job_of(tmp_path / "undisturbed", data), 1).digests


def test_large_rows_are_gathered_ahead_also_after_going_back(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"data__shuffle_window_rows": 16, "train__max_steps": 8}
    undisturbed = trained(job_of(tmp_path / "undisturbed", data, **fields), 1)
    monkeypatch.setattr("ray_app.data.feed._MIN_THREAD_BYTES", 0)
    monkeypatch.setattr("ray_app.data.prefetch._PREPARED_BYTES", 0)
    world = World(job_of(tmp_path / "run", data, **fields), 2, stream_windows)
    assert world.job.plan.steps_per_window > 1
    while world.coordinator._units.complete < 7:
        world.run(turns=1)
    world.servers.lose(0)
    world.run()
    assert [e.details["back_to"] for e in read_events(world.job.paths, "server_lost")] == [5]
    assert read_trained_run(world.job).digests == undisturbed.digests


def test_a_coordinator_that_begins_without_servers_waits_for_them(data: Path, tmp_path: Path) -> None:
    """Also after a former one whose era was a higher one, and then lost a server while it was away."""
    world = World(job_of(tmp_path / "run", data), 2)
    world.servers.lose(0)
    while world.coordinator._units.complete < 8:
        world.run(turns=1)
    former, call = world.coordinator, world.servers.call
    former._step_log.close()
    world.servers.lose(1)
    world.servers.call = lambda method, arguments: None  # type: ignore[method-assign]
    world.coordinator = Coordinator(world.job, world.servers)
    names = [world.add(), world.add()]
    world.workers = {name: world.workers[name] for name in names}
    world.run(turns=2)
    assert world.coordinator.ask(names[0], None, None, 0.0).waiting
    world.servers.call = call  # type: ignore[method-assign]
    world.run()
    assert world.coordinator._served.era > former._served.era
    assert read_trained_run(world.job).digests == trained(job_of(tmp_path / "undisturbed", data), 1).digests


def test_a_coordinator_that_begins_while_the_storage_does_not_answer_tries_again(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    world, load, refused = World(job_of(tmp_path / "run", data), 2), CheckpointStore.load_newest, []
    while world.coordinator._units.complete < 8:
        world.run(turns=1)
    world.coordinator._step_log.close()

    def fails_twice(self: CheckpointStore, on_fallback: Any, above: int) -> Any:
        if len(refused) == 2:
            return load(self, on_fallback, above=above)
        assert world.coordinator.is_waiting
        refused.append(OSError("the disk does not answer"))
        raise refused[-1]

    monkeypatch.setattr(CheckpointStore, "load_newest", fails_twice)
    world.coordinator = Coordinator(world.job, world.servers)
    world.workers = {name: world.worker(name) for name in world.workers}
    assert [world.coordinator.ask("0", None, None, 0.0).waiting for _ in range(3)] == [True, True, False]
    assert not world.coordinator.is_waiting
    world.run()
    assert [e.details["step"] for e in read_events(world.job.paths, "resumed")] == [5]
    assert read_trained_run(world.job).digests == trained(job_of(tmp_path / "undisturbed", data), 1).digests


class Handle:
    """An actor in this process, as its handle."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._actor, name))


class Patient:
    """A rendezvous that only hears who waits for the storage; it ends the threads that ask it when the test is over."""

    def __init__(self) -> None:
        self.told, self.over = threading.Event(), threading.Event()

    def status(self) -> RendezvousStatus:
        if self.over.is_set():
            raise SystemExit
        return RendezvousStatus({"0"}, set(), {}, 1, 0, None, None, False, 60.0)

    def pause_watchdog(self) -> None:
        self.told.set()


def test_a_server_that_packs_or_loads_its_state_has_more_time_than_a_step(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    world, killed = World(job_of(tmp_path / "run", data), 1), list[Any]()
    monkeypatch.setattr(CoordinatorActor, "_repeat", lambda self, monitor: None)
    actors = {str(i): Handle(ServerActor(world.job.config, world.job.total_steps)) for i in range(2)} | {
        world.job.rendezvous: Handle(None)
    }
    monkeypatch.setattr(ray, "get_actor", actors.__getitem__)
    monkeypatch.setattr(ray, "wait", lambda calls, timeout: ([], calls))
    monkeypatch.setattr(ray, "kill", lambda server, no_restart: killed.append(server))
    coordinator = CoordinatorActor(world.job, ["0", "1"], [], Hooks())
    waited: dict[str, list[int]] = {}

    def call(method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        coordinator._calls = {server: (None, time.monotonic() - 100) for server in coordinator._calls}
        coordinator._monitor_servers(RendezvousStatus({"0"}, set(), {}, 1, 0, None, None, False, 60.0))
        waited.setdefault(method, []).append(len(killed))
        killed.clear()
        return world.servers.call(method, arguments)

    monkeypatch.setattr(coordinator._served, "_servers", SimpleNamespace(call=call))
    world.coordinator, world.workers = coordinator, {}
    world.add()
    world.run()
    assert {method: set(ended) for method, ended in waited.items()} == {
        "era": {2},
        "load": {0},
        "norms": {2},
        "apply": {2},
        "state": {0},
    }


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the exit
def test_the_rendezvous_is_told_while_the_coordinator_waits_for_the_storage(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    """A checkpoint is written only after that, so the next one has to wait, and all workers with it."""
    world, rendezvous = World(job_of(tmp_path / "run", data), 1), Patient()
    actors = {str(i): Handle(ServerActor(world.job.config, world.job.total_steps)) for i in range(2)} | {
        world.job.rendezvous: Handle(rendezvous)
    }
    monkeypatch.setattr(ray, "get_actor", actors.__getitem__)
    monkeypatch.setattr(ray, "get", lambda answer, timeout=None: answer)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    world.servers = RayServers(tuple(actors[str(i)] for i in range(2)))  # type: ignore[assignment]
    monkeypatch.setattr(ray, "wait", lambda calls, timeout: (calls, []))
    written = []

    def wait(commit: Commit) -> None:
        rendezvous.told.clear()
        written.append(rendezvous.told.wait(30))

    world.coordinator = CoordinatorActor(world.job, ["0", "1"], [], Hooks(before_commit=wait))
    watching = [thread for thread in threading.enumerate() if thread.name == "watch"]
    world.workers = {"0": world.worker("0")}
    try:
        world.run()
    finally:
        rendezvous.over.set()
        for thread in watching:
            thread.join()
    assert written == [True] * 4
    assert not world.coordinator.is_waiting


def test_a_coordinator_that_cannot_begin_says_why_to_who_asks(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    def fails(self: CheckpointStore, on_fallback: Any, above: int) -> Any:
        raise CheckpointError("not one is intact")

    monkeypatch.setattr(CheckpointStore, "load_newest", fails)
    world = World(job_of(tmp_path / "run", data), 2)
    for name in world.workers:
        with pytest.raises(CheckpointError, match="not one is intact"):
            world.turn(name)


@pytest.mark.parametrize("staleness", [0, 1])
def test_work_for_a_coordinator_that_died_with_all_servers_counts_for_nothing(
    pool: WorkerPool, data: Path, tmp_path: Path, staleness: int
) -> None:
    """Ray sends what a worker said to the former coordinator again to the new one; the gradients are gone with the
    servers.
    """
    world = World(job_of(tmp_path / "run", data, train__staleness=staleness), 2)
    while world.coordinator._units.complete < 5 or not all(worker._result for worker in world.workers.values()):
        world.run(turns=1)
    former, said = world.coordinator, {name: worker._result for name, worker in world.workers.items()}
    assert 5 in [done.unit.step for done in said.values() if done is not None], "none is of the step that is restored"
    former._step_log.close()
    for place in range(2):
        world.servers.lose(place)
    world.coordinator = Coordinator(world.job, world.servers)
    for name, done in said.items():
        world.coordinator.ask(name, done, None, 0.0)
    assert world.coordinator._served.era > former._served.era
    assert world.coordinator._units._next == [5, 5, 5, 5]
    world.workers = {name: world.worker(name) for name in world.workers}
    world.run()
    assert consumed(world.job) == planned(data, tmp_path / "plan", pool)
    if not staleness:
        assert read_trained_run(world.job).digests == trained(job_of(tmp_path / "undisturbed", data), 1).digests


def test_steps_that_another_coordinator_does_again_are_counted(data: Path, tmp_path: Path) -> None:
    world = World(job_of(tmp_path / "run", data), 2)
    while world.coordinator._units.complete < 8:
        world.run(turns=1)
    world.coordinator._step_log.close()
    for place in range(2):
        world.servers.lose(place)
    world.coordinator = Coordinator(world.job, world.servers)
    world.workers = {name: world.worker(name) for name in world.workers}
    world.run()
    assert summarize(world.job, "finished")["redone_steps"] == 3


def test_a_step_does_not_end_with_some_of_its_gradients(data: Path, tmp_path: Path) -> None:
    world = World(job_of(tmp_path / "run", data), 1)
    while len(world.servers.servers[0]._sums.get(0, _NO_GRADIENTS).received) < 2:
        world.run(turns=1)
    with pytest.raises(DataError, match=r"Step 0 is to end with the gradients of \[\(0, 2\)\] only"):
        world.servers.servers[0].norms(world.coordinator._served.era, 0, [])


@pytest.mark.parametrize("staleness", [0, 1])
def test_who_calls_for_another_era_changes_nothing(data: Path, tmp_path: Path, staleness: int) -> None:
    """A worker that pulled before a server was lost sends its gradient after all have gone back."""
    world = World(job_of(tmp_path / "run", data, train__staleness=staleness), 1)
    world.run(turns=2)
    server, now = world.servers.servers[0], world.coordinator._served.era
    held, seen = server.pull(now), {step: set(found.received) for step, found in server._sums.items()}
    assert held is not None
    before = held[1].tobytes()
    zeros = held[1] * 0
    assert server.push(now - 1, 0, 3, zeros, None) is None
    assert [
        server.pull(now - 1),
        server.norms(now - 1, 0, []),
        server.apply(now - 1, 0, 1.0, 1.0),
        server.state(now - 1),
    ] == [None] * 4
    after = server.pull(now)
    assert after is not None
    assert after[1].tobytes() == before
    assert {step: set(found.received) for step, found in server._sums.items()} == seen
    assert 3 not in seen.get(0, set()), "it was sent already, and would not have counted again"
    assert server.push(now, 0, 3, zeros, None) is not None
    assert 3 in server._sums[0].received


def test_a_step_ends_once(data: Path, tmp_path: Path) -> None:
    """Whoever did not hear that it ended asks again."""
    undisturbed = trained(job_of(tmp_path / "undisturbed", data), 1)
    world = World(job_of(tmp_path / "run", data), 1)
    call = world.servers.call

    def twice(method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        return (call(method, arguments) and call(method, arguments)) if method == "apply" else call(method, arguments)

    world.servers.call = twice  # type: ignore[method-assign]
    world.run()
    assert read_trained_run(world.job).digests == undisturbed.digests


def test_a_sum_that_is_not_finite_moves_nothing(data: Path, tmp_path: Path) -> None:
    world = World(job_of(tmp_path / "run", data), 1)
    call = world.servers.call

    def overflows(method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        answers = call(method, arguments)
        return [([math.inf], rest) for _, rest in answers] if method == "norms" and answers is not None else answers

    world.servers.call = overflows  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError, match="the sum of finite gradients is not finite"):
        world.run()
    assert [server._state.step for server in world.servers.servers] == [0, 0]


def test_a_step_without_all_of_its_rows_ends_the_run(data: Path, tmp_path: Path) -> None:
    world = World(job_of(tmp_path / "run", data), 1)
    while (done := world.workers["0"]._result) is None:
        world.run(turns=1)
    world.workers["0"]._result = dataclasses.replace(done, stats=done.stats._replace(rows=done.stats.rows - 1))
    with pytest.raises(DataError, match=r"consumed 11 rows and skipped 0, 12 were planned"):
        world.run()


def test_who_waits_for_servers_does_not_hold_the_others_up(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    world, phases, found = World(job_of(tmp_path / "run", data, train__max_steps=1), 1), ["starting"], []
    monkeypatch.setattr(world.workers["0"]._membership, "enter", phases.append)
    call = world.servers.call

    def noted(method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        found.append((method, phases[-1]))
        return call(method, arguments)

    world.servers.call = noted  # type: ignore[method-assign]
    world.run()
    assert {"pull", "push"} <= {method for method, _ in found}
    assert {phase for _, phase in found} == {"reduction"}
    assert {"data", "compute"} < set(phases)


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
def test_a_server_is_lost_whatever_ended_it(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(calls: list[Any], timeout: float) -> list[Any]:
        raise error

    monkeypatch.setattr(ray, "get", fails)
    assert RayServers((Handle(SimpleNamespace(address_and_secret=lambda: None)),)).call("era", [()]) is None


def test_a_step_that_ended_on_one_server_only_is_undone(data: Path, tmp_path: Path) -> None:
    """A server is out of reach for a moment, and nobody knows whether it got the call."""
    world = World(job_of(tmp_path / "run", data), 2)
    call, missed = world.servers.call, []

    def fails_once(method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        if method == "apply" and arguments[0][1] == 7 and not missed:
            missed.append(world.servers.servers[0].apply(*arguments[0]))
            return None
        return call(method, arguments)

    world.servers.call = fails_once  # type: ignore[method-assign]
    world.run()
    assert missed
    assert read_trained_run(world.job).digests == trained(job_of(tmp_path / "undisturbed", data), 1).digests


def test_snapshots_make_the_way_back_short(data: Path, tmp_path: Path) -> None:
    world = World(job_of(tmp_path / "run", data, checkpoint__snapshot_every_steps=2), 2)
    while world.coordinator._units.complete < 9:
        world.run(turns=1)
    world.servers.lose(0)
    world.run()
    [lost] = read_events(world.job.paths, "server_lost")
    assert lost.details["back_to"] == 8


def test_a_stop_makes_a_checkpoint_at_the_next_common_step(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    world = World(job_of(tmp_path / "run", data, train__staleness=3, checkpoint__every_steps=None), 2)
    while world.coordinator._units.begun < 7:
        world.turn("0")
        if world.coordinator._units.complete < 4:
            world.turn("1")
    world.coordinator.update_workers(set(world.workers), False, True)
    begun = world.coordinator._units.begun
    world.run()
    [commit] = CheckpointStore(world.job.paths).commits()
    assert (commit.step, commit.why) == (begun, "extra")
    World(dataclasses.replace(world.job, fence=2), 1).run()
    assert consumed(world.job) == planned(data, tmp_path / "plan", pool)
    assert read_trained_run(world.job).commit.step == world.job.total_steps


def test_a_stop_ends_a_run_that_waits_for_more_workers(data: Path, tmp_path: Path) -> None:
    world = World(job_of(tmp_path / "run", data, checkpoint__every_steps=None), 2)
    world.run(turns=3)
    half_done = world.coordinator._units.begun
    world.kill("1")
    world.coordinator.update_workers(set(world.workers), True, False)
    world.run(turns=3)
    assert world.coordinator._units.complete == half_done - 1, "it went on although it should wait"
    world.coordinator.update_workers(set(world.workers), True, True)
    assert world.run(turns=5)
    assert [commit.step for commit in CheckpointStore(world.job.paths).commits()] == [half_done]


def test_who_asks_while_the_run_waits_is_answered_late(data: Path, tmp_path: Path) -> None:
    world = World(job_of(tmp_path / "run", data), 1)
    world.coordinator.update_workers(set(world.workers), True, False)
    began_s = time.monotonic()
    assert world.coordinator.ask("0", None, None, 0.2).waiting
    assert time.monotonic() - began_s >= 0.2


def test_a_stop_after_a_lost_worker_counts_what_it_had_sent(data: Path, tmp_path: Path) -> None:
    world = World(job_of(tmp_path / "run", data, train__staleness=2, checkpoint__every_steps=None), 2)
    world.run(turns=1)  # both hold two logical workers
    while (units := world.coordinator._units).begun < 3 or units.complete < 1:
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


def test_who_is_ahead_waits_at_the_bound(data: Path, tmp_path: Path) -> None:
    world = World(job_of(tmp_path / "run", data, train__staleness=2, checkpoint__every_steps=None), 2)
    world.run(turns=1)  # both hold two logical workers
    for _ in range(20):
        world.turn("0")
    units = world.coordinator._units
    assert (units.complete, units.begun) == (0, 3)


def test_parameters_that_came_with_the_last_answer_serve_unless_too_much_is_missing(data: Path, tmp_path: Path) -> None:
    """One worker runs ahead to the bound, and its next unit may not do without gradients that are not in what it got
    with its last.
    """
    world = World(job_of(tmp_path / "run", data, train__staleness=2), 2)
    call, methods = world.servers.call, list[str]()

    def noted(method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        methods.append(method)
        return call(method, arguments)

    world.servers.call = noted  # type: ignore[method-assign]
    world.turn("1")
    while world.turn("0") and world.workers["0"]._result is not None:
        pass
    ahead, methods[:] = methods.count("push") - 1, []
    assert ahead == 3 * 2
    for _ in range(2):
        world.turn("1")  # its first step is on the servers, and told
    world.turn("0")
    assert methods == ["push", "push", "pull", "push"], (
        "the one that was ahead did not look at what was missing, or the other one did"
    )
    world.run()
    assert methods.count("pull") < methods.count("push") / 2


def test_a_unit_whose_gradient_did_not_arrive_begins_with_what_the_servers_hold(data: Path, tmp_path: Path) -> None:
    """Only the connection was lost: the servers' era stays, but the model here has been through a forward."""
    task = ImageClassification(model_args={"channels": 4, "dropout": 0.3})
    world = World(job_of(tmp_path / "run", data, train__staleness=2, task=task), 1)
    call, methods = world.servers.call, list[str]()

    def loses_once(method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        methods.append(method)
        return None if method == "push" and methods.count("push") == 2 else call(method, arguments)

    world.servers.call = loses_once  # type: ignore[method-assign]
    world.run(turns=3)
    assert [method for method in methods if method in ("pull", "push")] == ["pull", "push", "push", "pull", "push"]


def test_a_gradient_that_is_not_finite_ends_the_run(data: Path, tmp_path: Path) -> None:
    world = World(job_of(tmp_path / "run", data, task=TinyImages(bad=(17,))), 2)
    with pytest.raises(NonFiniteError, match=r"manifest positions \[.*17"):
        world.run()


def test_what_does_not_fit_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.staleness is set, but only train.strategy: parameter_server"):
        job_of(tmp_path / "run", data, train__strategy="ddp", train__servers=1, train__staleness=1)
    with pytest.raises(ConfigError, match=r"data.on_bad_row is skip with train.strategy parameter_server"):
        job_of(tmp_path / "run", data, data__on_bad_row="skip")
    with pytest.raises(ConfigError, match="fp16"):
        job_of(tmp_path / "run", data, train__precision="fp16")
    with pytest.raises(ConfigError, match=r"train.servers is 40, but the model has no more than \d+ parts"):
        World(job_of(tmp_path / "run", data, train__servers=40), 1)


@given(st.integers(1, 6), st.integers(0, 3), st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=200))
def test_units_are_done_in_order_within_the_bound_and_never_by_two(
    logical: int, staleness: int, asks: list[tuple[str, bool]]
) -> None:
    units, end = UnitScheduler(logical, 3, staleness), 9
    running: dict[str, tuple[int, int]] = {}
    done = [3] * logical
    for worker, dies in asks:
        if dies:
            units.lose(worker)
            running.pop(worker, None)
            continue
        if worker in running:
            step, v = running.pop(worker)
            assert units.finish(step, v)
            assert not units.finish(step, v), "it counts twice"
            done[v] += 1
        found = units.take(worker, end)
        if found is not None:
            step, v = found
            assert step == done[v] < min(end, min(done) + staleness + 1)
            assert v not in [other for _, other in running.values()], "two do the same"
            running[worker] = found
    assert units.complete == min(done)


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_the_servers_move_their_parameters_with_a_fused_optimizer(data: Path, tmp_path: Path, name: str) -> None:
    optimizer = {"class_path": f"torch.optim.{name}", "init_args": {"lr": 0.01}}
    world = World(job_of(tmp_path / "run", data, optimizer=optimizer, train__max_steps=1), 1)
    world.run()
    used = [server._state.optimizer for server in world.servers.servers]
    assert [type(each).__name__ for each in used] == [name, name]
    assert all(group["fused"] is True for each in used for group in [each.defaults, *each.param_groups])
