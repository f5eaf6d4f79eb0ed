"""Waits of a run are bounded: for a coordinator that does not answer, and for data or capacity when the run is
interrupted.
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_app import run_training
from ray_app.config.config import Config
from ray_app.data.ray_tasks import start_shared_actors
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.train.job import Job

ShortRun = Callable[..., Config]


@pytest.fixture
def frozen_coordinator(ray_cluster: None) -> Iterator[None]:
    """Freezes Ray's autoscaling coordinator, which then neither answers nor dies."""
    start_shared_actors()
    actor = ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator")
    pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    yield
    os.kill(pid, signal.SIGCONT)


@pytest.mark.usefixtures("frozen_coordinator")
def test_a_run_does_not_depend_on_the_autoscaling_coordinator(make_short_config: ShortRun) -> None:
    result = run_training(make_short_config(data__cache="memory"))
    assert result.status == "finished"
    assert result.summary["steps"] == 30


def interrupt_when(happens: Callable[[Job], Any]) -> Callable[[Job], None]:
    """Makes an observer that sends this process one SIGTERM when the condition holds."""
    sent: list[int] = []

    def observe(job: Job) -> None:
        if not sent and happens(job):
            sent.append(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    return observe


@pytest.mark.usefixtures("ray_cluster")
def test_sigterm_ends_a_run_that_waits_for_data(make_short_config: ShortRun, tmp_path: Path) -> None:
    task = {
        "task__class_path": "tests.support.stuck_task.StuckTask",
        "task__init_args": {"folder": str(tmp_path), "calls": 2},
    }
    config = make_short_config(**task, data__cache="none", data__read_task_mb=0.01)
    result = run_training(config, observe=interrupt_when(lambda _: (tmp_path / "stuck").exists()))
    assert result.status == "interrupted"
    [event] = read_events(RunPaths(result.path), "workers_abandoned")
    assert event.details["reason"] == "a worker has waited for data for 15 s"


@pytest.mark.usefixtures("ray_cluster")
def test_sigterm_ends_a_run_that_waits_for_capacity(make_short_config: ShortRun) -> None:
    busy_actors = [ray.remote(num_cpus=1)(BusyActor).remote() for _ in range(8)]
    ray.get([actor.ready.remote() for actor in busy_actors])
    result = run_training(make_short_config(data__cache="memory"), observe=interrupt_when(lambda _: True))
    assert (result.status, result.summary["steps"]) == ("interrupted", 0)
    for actor in busy_actors:
        ray.kill(actor)


class BusyActor:
    """An actor that occupies a CPU."""

    def ready(self) -> None:
        """Returns when the actor has started."""
