"""The scenario `mlflow`: the drill's own MLflow server is killed while a run is tracked, and starts again later."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_app.drill.delays import WaitForEvidence
from ray_app.drill.faults import Evidence, HookChain
from ray_app.drill.scenario import Scenario, ScenarioContext, ScenarioResult
from ray_app.driver.run import Faults
from ray_app.runlog.journal import MetricsReader, StepRecord
from ray_app.storage.files import read_json
from ray_app.track.mlflow_client import connect
from ray_app.train.job import Hooks, Job

_START_TIMEOUT_S = 120.0
_POLL_INTERVAL_S = 0.1
_STEPS_WITHOUT_SERVER = 10
_POINTS = {"loss": lambda r: r.loss, "step_ms": lambda r: r.step_ms, "workers": lambda r: float(r.workers)}


class MlflowServer:
    """A real MLflow server on the loopback interface, with its own database; it can be killed and started again."""

    uri = ""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs the server within the context, on a free port and with a temporary folder."""
        with tempfile.TemporaryDirectory(prefix="ray-app-drill-") as folder:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self._port = free.getsockname()[1]
            self._folder, self.uri = Path(folder), f"http://127.0.0.1:{self._port}"
            try:
                self.start()
                yield
            finally:
                self.kill()

    def start(self) -> int:
        """Starts the server at its address and on its database; returns the process id once the server answers.

        Raises:
            RuntimeError: The server ended, or does not answer.
        """
        address = ["--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"]
        stores = [
            "--backend-store-uri",
            f"sqlite:///{self._folder}/mlflow.db",
            "--artifacts-destination",
            str(self._folder / "files"),
        ]
        command = [sys.executable, "-m", "mlflow", "server", *address, *stores]
        settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self._folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                command, env=os.environ | settings, stdout=output, stderr=output, start_new_session=True
            )
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self.is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"the drill's MLflow server does not start: {(self._folder / 'output').read_text()[-1000:]}"
                )
            time.sleep(_POLL_INTERVAL_S)
        return self._process.pid

    def is_ready(self) -> bool:
        """Returns whether the server answers."""
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """Kills all processes of the server with SIGKILL."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass
class MlflowOutage:
    """Kills the server while a rank waits, and starts it again while the rank waits at a later step.

    It is called in the driver. The run finishes the steps between the two waits without the server.

    Args:
        evidence: Has the waits of the rank, and records what the rank waits for.
    """

    server: MlflowServer
    evidence: Evidence

    def __call__(self, job: Job) -> None:
        """See `Observe`."""
        first_wait, second_wait = self.evidence.get("held"), self.evidence.get("held_again")
        if first_wait and not self.evidence.has("server_killed"):
            # The server must die while the run uses it, not before the first points have arrived.
            if not _read_sent_step(job):
                return
            self.server.kill()
            self.evidence.put("server_killed", step=first_wait["step"])
        elif second_wait and not self.evidence.has("server_back"):
            outage = {"answers": self.server.is_ready(), "sent_step": _read_sent_step(job)}
            # On an error the scenario counts as failed, but the run must go on: the second entry ends the wait.
            try:
                self.evidence.put("server_back", step=second_wait["step"], pid=self.server.start(), before=outage)
            except RuntimeError as error:
                self.evidence.put("trouble", error=str(error))
                self.evidence.put("server_back", step=second_wait["step"], before=outage)


def mlflow(context: ScenarioContext) -> Scenario | str:
    """The MLflow server that a run is sent to, the drill's own, is killed for a while."""
    if importlib.util.find_spec("mlflow") is None or importlib.util.find_spec("sqlalchemy") is None:
        return 'mlflow is not installed (pip install "ray_app[tracking]")'
    step, server = context.choose_step(), MlflowServer()
    first = WaitForEvidence(context.evidence, "held", "server_killed", step, 0)
    second = WaitForEvidence(context.evidence, "held_again", "server_back", step + _STEPS_WITHOUT_SERVER, 0)

    @contextmanager
    def setup() -> Iterator[dict[str, Any]]:
        with server.running():
            yield {"tracking__uri": server.uri}

    return Scenario(
        [step],
        ["held", "server_killed", "held_again", "server_back"],
        lambda run: confirm_outage(run, server.uri),
        Faults(train=Hooks(after_step=HookChain((first, second)))),
        MlflowOutage(server, context.evidence),
        {"held": "server_killed", "held_again": "server_back"},
        changes={"tracking__enabled": True, "tracking__every_steps": 1, "tracking__registered_model": None},
        setup=setup,
    )


def confirm_outage(run: ScenarioResult, uri: str) -> list[str]:
    """Confirms that the run trained without the server and lost no point in MLflow; returns what is missing.

    The run must have finished all steps of the outage while the server was away. Afterwards one MLflow run must have
    every point once and in order.

    Args:
        uri: Address of the server, which answers again.
    """
    killed, back = run.evidence["server_killed"], run.evidence["server_back"]
    reader = MetricsReader(run.paths)
    reader.poll()
    records = dict(sorted(reader.records.items()))
    missing = ["the server answered while it was away"] if back["before"]["answers"] else []
    outage_steps = [
        n
        for n, r in records.items()
        if killed["step"] < n <= back["step"] and killed["time_s"] < r.time_s < back["time_s"]
    ]
    if len(outage_steps) < back["step"] - killed["step"]:
        missing.append(f"only the steps {outage_steps} were finished while the server was away")
    if back["before"]["sent_step"] > killed["step"]:
        missing.append(f"step {back['before']['sent_step']} was sent while the server was away")
    return missing + _compare_points(run, uri, records)


def _compare_points(run: ScenarioResult, uri: str, records: dict[int, StepRecord]) -> list[str]:
    """Returns a message for each difference between MLflow and the run's step records."""
    client = connect(uri)
    runs = [
        r
        for e in client.search_experiments()
        for r in client.search_runs([e.experiment_id])
        if r.info.run_name == run.paths.name
    ]
    if [r.info.run_id for r in runs] != [run.summary["mlflow_run_id"]]:
        return [f"MLflow has {len(runs)} runs of this name"]
    missing = [] if runs[0].info.status == "FINISHED" else [f"MLflow says that the run is {runs[0].info.status}"]
    for name, value_of in _POINTS.items():
        points = [(m.step, m.timestamp, m.value) for m in client.get_metric_history(runs[0].info.run_id, name)]
        expected_points = [(n, int(r.time_s * 1e3), value_of(r)) for n, r in records.items()]
        if points != expected_points:
            missing.append(
                f"of {name} MLflow has {len(points)} points, {len(set(points))} of them different, instead of the"
                f" {len(expected_points)} recorded"
            )
    return missing


def _read_sent_step(job: Job) -> int:
    """Returns the last step that the tracker has sent to MLflow, 0 if none."""
    stored: dict[str, Any] = read_json(job.paths.tracking) or {}
    return int(stored.get("sent_step", 0))
