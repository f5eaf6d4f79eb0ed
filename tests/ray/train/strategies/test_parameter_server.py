"""Parameter servers on a real Ray cluster: convergence, lost workers, lost servers, and changed numbers of both."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_app import load_config, run_training
from ray_app.checkpoint.format import params_digest
from ray_app.checkpoint.store import CheckpointStore
from ray_app.config.config import Config
from ray_app.drill.faults import HookChain
from ray_app.driver.run import Faults
from ray_app.errors import NonFiniteError
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.train.job import Hooks, Job
from tests.support.cluster import record_of
from tests.support.injector import DelayUntilFile, Kill, RaiseNonFinite, Stall
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("ray_cluster")
ShortRun = Callable[..., Config]
SERVERS: dict[str, Any] = {
    "train__strategy": "parameter_server",
    "train__servers": 2,
    "scaling__min_workers": 2,
    "scaling__max_workers": 2,
}


def rows_of(record: list[tuple[int, float, list[int], list[int]]]) -> list[tuple[int, list[int], list[int]]]:
    return [(step, rows, hashes) for step, _, rows, hashes in record]


def test_asynchronous_workers_learn_the_digits(digits: Path, tmp_path: Path) -> None:
    """A worker is killed during training, and the run continues with other numbers of workers and servers."""
    config = load_config(ROOT / "conf" / "digits.yaml").replace(
        **SERVERS,
        train__staleness=2,
        train__epochs=12,
        data__path=str(digits / "train"),
        data__eval_path=str(digits / "eval"),
        run__storage_path=str(tmp_path),
        tracking__enabled=False,
        run__name="run",
    )
    stop, kill = (
        RaiseNonFinite(str(tmp_path / "stopped"), step=160, rank=0),
        Kill(str(tmp_path / "killed"), step=60, rank=1),
    )
    with pytest.raises(NonFiniteError, match="injected"):
        run_training(config, faults=Faults(train=Hooks(after_step=HookChain((kill, stop)))))
    assert (kill.num_fired, stop.num_fired) == (1, 1)
    result = run_training(config.replace(train__servers=1, scaling__max_workers=3))
    assert [e.details["step"] for e in read_events(RunPaths(result.path), "resumed")] == [115]
    assert result.summary["metrics"]["accuracy"] >= 0.97
    assert result.summary["rows"] == 12 * 1438
    [best] = [c for c in CheckpointStore(RunPaths(result.path)).commits() if c.step == result.summary["best"]["step"]]
    assert params_digest(dict(result.load_model().state_dict())) == best.params_digest


def test_a_kill_and_a_resume_on_other_workers_keep_the_result(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path
) -> None:
    """The run is synchronous, so it is bit-identical to the undisturbed run of another strategy."""
    stop, kill = (
        RaiseNonFinite(str(tmp_path / "stopped"), step=20, rank=0),
        Kill(str(tmp_path / "killed"), step=13, rank=1),
    )
    with pytest.raises(NonFiniteError, match="injected"):
        run_training(make_short_config(**SERVERS), faults=Faults(train=Hooks(after_step=HookChain((kill, stop)))))
    assert (kill.num_fired, stop.num_fired) == (1, 1)
    paths = RunPaths(tmp_path / "runs" / "run")
    assert len(read_events(paths, "resumed")) == 0, "a lost worker reset the others to a checkpoint"
    summary = run_training(make_short_config(**SERVERS | {"train__servers": 1, "scaling__max_workers": 3})).summary
    assert [e.details["step"] for e in read_events(paths, "resumed")] == [16]
    assert summary["params_digest"] == reference_run["params_digest"]
    assert record_of(paths.root) == reference_run["record"]


def make_killer(actor: str, proof: Path, sent: int = signal.SIGKILL) -> Callable[[Job], None]:
    """Makes an observer that kills or stops the process of an actor after the first checkpoint and writes its pid to
    `proof`.
    """

    def watch(job: Job) -> None:
        if proof.exists() or not read_events(job.paths, "checkpointed"):
            return
        handle = ray.get_actor(actor.format(f"{job.paths.unique_name}-{job.fence}"))
        pid = ray.get(handle.__ray_call__.remote(lambda self: os.getpid()))
        os.kill(pid, sent)
        proof.write_text(str(pid))

    return watch


def is_gone(proof: Path) -> bool:
    return not Path(f"/proc/{proof.read_text()}").exists()


@pytest.mark.rest
def test_a_killed_server_is_restored(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    config, watch = make_short_config(**SERVERS, train__staleness=2), make_killer("server-{}-1", killed)
    result = run_training(
        config, faults=Faults(train=Hooks(after_step=DelayUntilFile(str(killed), step=12))), observe=watch
    )
    assert is_gone(killed)
    [lost] = read_events(RunPaths(result.path), "server_lost")
    assert lost.details["back_to"] in (8, 16)
    assert result.summary["status"] == "finished"
    assert result.summary["restarts"]["failures"] == 0
    assert rows_of(record_of(result.path)) == rows_of(reference_run["record"])


def test_a_server_that_hangs_is_killed_and_restored(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path
) -> None:
    """Each logical worker has a worker, so the server hangs after all gradients of a step have arrived; the coordinator
    waits for it first.
    """
    stopped = tmp_path / "stopped"
    fields = SERVERS | {"scaling__min_workers": 4, "scaling__max_workers": 4, "failure__step_timeout_s": 10.0}
    config, watch = make_short_config(**fields), make_killer("server-{}-0", stopped, signal.SIGSTOP)
    result = run_training(
        config, faults=Faults(train=Hooks(after_step=DelayUntilFile(str(stopped), step=12))), observe=watch
    )
    assert is_gone(stopped), "the hanging server still lives"
    assert [e.details["back_to"] for e in read_events(RunPaths(result.path), "server_lost")] == [8]
    assert result.summary["restarts"]["failures"] == 0, "workers were killed instead of the server"
    assert result.summary["params_digest"] == reference_run["params_digest"]
    assert record_of(result.path) == reference_run["record"]


def test_a_killed_coordinator_resumes_from_the_newest_checkpoint(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    watch = make_killer("parameters-{}", killed)
    result = run_training(
        make_short_config(**SERVERS),
        faults=Faults(train=Hooks(after_step=DelayUntilFile(str(killed), step=12))),
        observe=watch,
    )
    assert is_gone(killed)
    [resumed] = read_events(RunPaths(result.path), "resumed")
    assert resumed.details["step"] == 8
    assert result.summary["restarts"]["failures"] == 0, "a worker failed with the coordinator"
    assert result.summary["params_digest"] == reference_run["params_digest"]
    assert record_of(result.path) == reference_run["record"]


def test_a_worker_that_hangs_is_killed(
    make_short_config: ShortRun, reference_run: dict[str, Any], tmp_path: Path
) -> None:
    stall = Stall(str(tmp_path / "stalled"), "data", rank=1, step=13)
    result = run_training(
        make_short_config(**SERVERS, failure__step_timeout_s=6.0), faults=Faults(train=Hooks(at=stall))
    )
    assert (stall.num_fired, stall.is_dead) == (1, True)
    stacks = [e.details["stacks"] for e in read_events(RunPaths(result.path), "stacks") if e.details["doing"] == "data"]
    assert any("injector.py" in stack for stack in stacks)
    assert result.summary["redone_steps"] == 0
    assert result.summary["params_digest"] == reference_run["params_digest"]
    assert record_of(result.path) == reference_run["record"]
