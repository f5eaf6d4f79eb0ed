"""Workers that fail while others have left without an error: those go on no more, and do not make the run look ended.

And those of a run that its driver has given up.
"""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus

from ray_app.cluster.controller import backend, controller
from ray_app.errors import PreemptedError

TRAINS = WorkerStatus(running=True)
LEFT = WorkerStatus(running=False)
FAILED = WorkerStatus(running=False, error=PreemptedError("all leave"))


class Group:
    """A worker group; each worker is its own node."""

    def __init__(self, **workers: WorkerStatus) -> None:
        self.workers = workers

    def __len__(self) -> int:
        return len(self.workers)

    def has_started(self) -> bool:
        return True

    def get_workers(self) -> list[Any]:
        return [SimpleNamespace(actor=name, metadata=SimpleNamespace(node_id=name)) for name in self.workers]

    def get_latest_poll_status(self) -> WorkerGroupPollStatus:
        return WorkerGroupPollStatus(dict(enumerate(self.workers.values())), {})

    def drop(self, gone: set[int]) -> None:
        self.workers = {name: status for place, (name, status) in enumerate(self.workers.items()) if place not in gone}


class Controller(controller._Controller):
    """The controller without Ray."""

    def __init__(self, group: Group, draining: set[str], retired: set[str]) -> None:
        self._worker_group: Any = group
        self._evictor: Any = SimpleNamespace(evicted=retired)
        self._scaling_policy: Any = SimpleNamespace(
            draining_nodes=dict.fromkeys(draining, 0), suspect=lambda nodes: None
        )
        self.charged: list[tuple[int, int, int]] = []

    @property
    def _budget(self) -> Any:
        return SimpleNamespace(budget=SimpleNamespace(charge_preemption=lambda *charge: self.charged.append(charge)))

    @property
    def _rendezvous(self) -> Any:
        return SimpleNamespace(
            evict=SimpleNamespace(remote=id), status=SimpleNamespace(remote=lambda: SimpleNamespace(step=7))
        )

    @property
    def _resize_interval_s(self) -> float:
        return 10.0

    def _shutdown_worker_group(self) -> None:
        self._worker_group = None

    def _send_expected(self) -> None: ...

    def _running(self) -> str:
        return "running"


@pytest.mark.parametrize(
    ("workers", "draining", "retired", "stay", "charged"),
    [
        ({"a": LEFT, "b": FAILED}, {"a", "b"}, set(), None, []),
        ({"a": LEFT, "b": FAILED}, set(), {"a"}, None, []),
        ({"a": LEFT, "b": FAILED, "c": TRAINS}, {"a"}, set(), ["c"], [(1, 7, 1)]),
        ({"a": LEFT, "b": FAILED, "c": TRAINS}, set(), {"a"}, ["c"], []),
        ({"a": TRAINS, "b": FAILED}, {"a"}, set(), ["a"], []),
        ({"a": LEFT, "b": FAILED}, set(), set(), ["a"], []),  # it has done all steps
    ],
)
def test_who_has_left_does_not_count_as_going_on(
    workers: dict[str, WorkerStatus],
    draining: set[str],
    retired: set[str],
    stay: list[str] | None,
    charged: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None: the others start again; where all have ended without an error the next look takes the run for finished."""
    decide = "_make_and_handle_scaling_decision_for_non_running_worker_group"
    monkeypatch.setattr(backend, "ray", SimpleNamespace(get=lambda asked, timeout: asked, exceptions=ray.exceptions))
    monkeypatch.setattr(controller, "actor_id_of", lambda actor: actor)
    monkeypatch.setattr(TrainController, decide, lambda self, state: "restart")
    ours = Controller(Group(**workers), draining, retired)
    decided = ours._make_and_handle_scaling_decision_for_non_running_worker_group(None)
    assert decided == ("restart" if stay is None else "running")
    assert (None if ours._worker_group is None else list(ours._worker_group.workers)) == stay
    assert ours.charged == charged


def test_a_run_that_was_abandoned_ends_its_workers_and_its_newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up, ended = threading.Event(), list[Any]()

    async def look(self: Any) -> None:
        ended.append("looked")
        given_up.set()

    monkeypatch.setattr(TrainController, "_run_control_loop_iteration", look)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    ours: Any = Controller(Group(a=TRAINS), set(), set())
    ours._abandoned, ours._pending_workers = given_up, SimpleNamespace(limit_to=ended.append)
    ours._worker_group.abort = lambda: ended.append("aborted")
    ours._set_state = lambda state: ended.append(state.is_terminal())
    asyncio.run(ours._run_control_loop_iteration())
    assert ended == ["looked"]
    asyncio.run(ours._run_control_loop_iteration())
    assert ended == ["looked", 0, "aborted", True]
