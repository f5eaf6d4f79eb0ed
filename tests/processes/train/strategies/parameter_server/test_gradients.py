"""Gradients between workers and parameter servers: each is applied once and in its step, or ends the run."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from ray_app.errors import DataError, NonFiniteError
from ray_app.task.image import ImageClassification
from ray_app.testing import read_trained_run
from ray_app.train.membership import SingleProcessMembership
from ray_app.train.strategies.parameter_server.protocol import CoordinatorReply, UnitResult
from tests.support.local_world import TinyImages
from tests.support.server_world import ServerWorld, make_server_job


def test_a_gradient_that_arrives_twice_is_applied_once(data: Path, tmp_path: Path) -> None:
    """Each server applies each gradient of each logical worker once."""
    job = make_server_job(
        tmp_path / "run", data, train__staleness=2, train__max_steps=4, optimizer={"class_path": "torch.optim.Adam"}
    )
    world = ServerWorld(job, 2)
    call = world.servers.call

    def push_twice(method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        return (call(method, arguments) and call(method, arguments)) if method == "push" else call(method, arguments)

    world.servers.call = push_twice
    world.run()
    state = read_trained_run(job).snapshot.optimizer["state"]
    assert {int(values["step"]) for values in state.values()} == {4 * 4}


def test_a_step_with_missing_gradients_is_refused(data: Path, tmp_path: Path) -> None:
    world = ServerWorld(make_server_job(tmp_path / "run", data), 1)
    while len(world.received(0)) < 2:
        world.run(turns=1)
    with pytest.raises(DataError, match=r"Step 0 would end with the gradients of only \[\(0, 2\)\]"):
        world.servers.servers[0].norms(world.era, 0, [])


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_call_for_another_era_changes_no_state(data: Path, tmp_path: Path, staleness: int) -> None:
    """A worker that pulled before a server was lost sends its gradient after all servers have rolled back."""
    world = ServerWorld(make_server_job(tmp_path / "run", data, train__staleness=staleness), 1)
    world.run(turns=2)
    server, era = world.servers.servers[0], world.era
    pulled, received = server.pull(era), world.received(0)
    assert pulled is not None
    before = pulled[1].tobytes()
    zeros = pulled[1] * 0
    assert server.push(era - 1, 0, 3, zeros, None) is None
    assert [
        server.pull(era - 1),
        server.norms(era - 1, 0, []),
        server.apply(era - 1, 0, 1.0, 1.0),
        server.state(era - 1),
    ] == [None] * 4
    after = server.pull(era)
    assert after is not None
    assert after[1].tobytes() == before
    assert world.received(0) == received
    assert 3 not in received, "the gradient arrived already, and would not count again"
    assert server.push(era, 0, 3, zeros, None) is not None
    assert 3 in world.received(0)


def test_a_gradient_sum_that_is_not_finite_changes_no_state(data: Path, tmp_path: Path) -> None:
    world = ServerWorld(make_server_job(tmp_path / "run", data), 1)
    call = world.servers.call

    def overflow(method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        answers = call(method, arguments)
        return [([math.inf], rest) for _, rest in answers] if method == "norms" and answers is not None else answers

    world.servers.call = overflow
    with pytest.raises(NonFiniteError):
        world.run()
    assert [steps for steps, *_ in call("pull", [(world.era,)] * 2)] == [0, 0]


def test_a_step_with_missing_rows_ends_the_run(monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path) -> None:
    world = ServerWorld(make_server_job(tmp_path / "run", data), 1)
    ask = world.coordinator.ask

    def drop_row(worker: str, done: UnitResult | None, *rest: Any) -> CoordinatorReply:
        lacking = done and dataclasses.replace(done, stats=done.stats._replace(rows=done.stats.rows - 1))
        return ask(worker, lacking, *rest)

    monkeypatch.setattr(world.coordinator, "ask", drop_row)
    world.add()
    with pytest.raises(DataError, match=r"skipped 0, 12 were planned"):
        world.run()


def test_a_worker_that_waits_for_servers_is_in_the_phase_reduction(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    world = ServerWorld(make_server_job(tmp_path / "run", data, train__max_steps=1), 1)
    phases, calls = ["starting"], []
    monkeypatch.setattr(SingleProcessMembership, "enter", lambda _, phase: phases.append(phase))
    call = world.servers.call

    def record_phase(method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        calls.append((method, phases[-1]))
        return call(method, arguments)

    world.servers.call = record_phase
    world.run()
    assert {"pull", "push"} <= {method for method, _ in calls}
    assert {phase for _, phase in calls} == {"reduction"}
    assert {"data", "compute"} < set(phases)


def test_a_worker_pulls_only_when_its_parameters_lack_required_gradients(data: Path, tmp_path: Path) -> None:
    """One worker runs ahead to the bound; its next unit needs gradients that are not in its last answer."""
    world = ServerWorld(make_server_job(tmp_path / "run", data, train__staleness=2), 2)
    call, methods = world.servers.call, list[str]()

    def record_method(method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        methods.append(method)
        return call(method, arguments)

    world.servers.call = record_method
    world.turn("1")
    while world.turn("0") and "0" in world.results:
        pass
    units_ahead, methods[:] = methods.count("push") - 1, []
    assert units_ahead == 3 * 2
    for _ in range(2):
        # The servers get the first step of this worker, and the coordinator its report.
        world.turn("1")
    world.turn("0")
    assert methods == ["push", "push", "pull", "push"], (
        "the worker ahead did not check for missing gradients, or the other worker did"
    )
    world.run()
    assert methods.count("pull") < methods.count("push") / 2


def test_a_unit_with_a_lost_gradient_starts_from_pulled_parameters(data: Path, tmp_path: Path) -> None:
    """Only the connection was lost: the era of the servers stays, but the model of the worker has run a forward."""
    task = ImageClassification(model_args={"channels": 4, "dropout": 0.3})
    world = ServerWorld(make_server_job(tmp_path / "run", data, train__staleness=2, task=task), 1)
    call, methods = world.servers.call, list[str]()

    def lose_second_push(method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        methods.append(method)
        return None if method == "push" and methods.count("push") == 2 else call(method, arguments)

    world.servers.call = lose_second_push
    world.run(turns=3)
    assert [method for method in methods if method in ("pull", "push")] == ["pull", "push", "push", "pull", "push"]


def test_a_gradient_that_is_not_finite_ends_the_run(data: Path, tmp_path: Path) -> None:
    world = ServerWorld(make_server_job(tmp_path / "run", data, task=TinyImages(bad_rows=(17,))), 2)
    with pytest.raises(NonFiniteError, match=r"manifest positions \[.*17"):
        world.run()


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_the_servers_update_their_parameters_with_a_fused_optimizer(data: Path, tmp_path: Path, name: str) -> None:
    optimizer = {"class_path": f"torch.optim.{name}", "init_args": {"lr": 0.01}}
    world = ServerWorld(make_server_job(tmp_path / "run", data, optimizer=optimizer, train__max_steps=1), 1)
    world.run()
    assert [type(used_optimizer).__name__ for used_optimizer in world.optimizers] == [name, name]
    assert all(
        group["fused"] is True
        for used_optimizer in world.optimizers
        for group in [used_optimizer.defaults, *used_optimizer.param_groups]
    )
