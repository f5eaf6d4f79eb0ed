"""The scenario of an MLflow server, the drill's own, that is killed while a run is sent to it, and comes back."""

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

from ray_app.drill.delays import Hold
from ray_app.drill.faults import Evidence, Several
from ray_app.drill.scenario import Scenario, ScenarioContext, ScenarioResult
from ray_app.driver.run import Faults
from ray_app.runlog.journal import MetricsReader, StepRecord
from ray_app.storage.files import read_json
from ray_app.track.mlflow_client import connect
from ray_app.train.job import Hooks, Job

_START_S, _LOOK_S, _STEPS_WITHOUT = 120.0, 0.1, 10
_POINTS = {"loss": lambda r: r.loss, "step_ms": lambda r: r.step_ms, "workers": lambda r: float(r.workers)}


class Server:
    """A real MLflow server on loopback, with a database of its own, that can be killed and started again."""

    uri = ""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """It is there, on a port and with a folder of its own; both go with the context."""
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
        """Starts it where it was; returns the id of its process when it answers.

        Raises:
            RuntimeError: It ended, or does not answer.
        """
        where = ["--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"]
        stores = [
            "--backend-store-uri",
            f"sqlite:///{self._folder}/mlflow.db",
            "--artifacts-destination",
            str(self._folder / "files"),
        ]
        command = [sys.executable, "-m", "mlflow", "server", *where, *stores]
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self._folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                command, env=os.environ | quiet, stdout=output, stderr=output, start_new_session=True
            )
        deadline_s = time.monotonic() + _START_S
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"the drill's MLflow server does not start: {(self._folder / 'output').read_text()[-1000:]}"
                )
            time.sleep(_LOOK_S)
        return self._process.pid

    def answers(self) -> bool:
        """Whether it is there."""
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL of all its processes."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass
class Outage:
    """Kills the server while a rank waits, and starts it again when another step is reached without it; called in the
    driver.

    Args:
        server: The server.
        proofs: What the ranks wait for.
    """

    server: Server
    proofs: Evidence

    def __call__(self, job: Job) -> None:
        """See `Observe`."""
        held, again = self.proofs.get("held"), self.proofs.get("held_again")
        if held and not self.proofs.has("server_killed"):
            if not _sent(job):
                return  # it is to be struck while it is used
            self.server.kill()
            self.proofs.put("server_killed", step=held["step"])
        elif again and not self.proofs.has("server_back"):
            without = {"answers": self.server.answers(), "sent_step": _sent(job)}
            try:
                self.proofs.put("server_back", step=again["step"], pid=self.server.start(), before=without)
            except RuntimeError as error:  # the scenario counts as failed; the run must go on
                self.proofs.put("trouble", error=str(error))
                self.proofs.put("server_back", step=again["step"], before=without)


def mlflow(ground: ScenarioContext) -> Scenario | str:
    """The MLflow server that a run is sent to, the drill's own, is killed for a while."""
    if importlib.util.find_spec("mlflow") is None or importlib.util.find_spec("sqlalchemy") is None:
        return 'mlflow is not installed (pip install "ray_app[tracking]")'
    step, server = ground.step(), Server()
    first = Hold(ground.proofs, "held", "server_killed", step, 0)
    second = Hold(ground.proofs, "held_again", "server_back", step + _STEPS_WITHOUT, 0)

    @contextmanager
    def around() -> Iterator[dict[str, Any]]:
        with server.running():
            yield {"tracking__uri": server.uri}

    return Scenario(
        [step],
        ["held", "server_killed", "held_again", "server_back"],
        lambda run: lacks(run, server.uri),
        Faults(train=Hooks(after_step=Several((first, second)))),
        Outage(server, ground.proofs),
        {"held": "server_killed", "held_again": "server_back"},
        changes={"tracking__enabled": True, "tracking__every_steps": 1, "tracking__registered_model": None},
        around=around,
    )


def lacks(run: ScenarioResult, uri: str) -> list[str]:
    """What speaks against it that the server was away while steps went on, and has every point once, in order, in one
    MLflow run.

    Args:
        run: The run.
        uri: Of the server, which is back.
    """
    killed, back = run.proofs["server_killed"], run.proofs["server_back"]
    reader = MetricsReader(run.paths)
    reader.poll()
    records = dict(sorted(reader.records.items()))
    missing = ["the server answered while it was away"] if back["before"]["answers"] else []
    meanwhile = [
        n
        for n, r in records.items()
        if killed["step"] < n <= back["step"] and killed["time_s"] < r.time_s < back["time_s"]
    ]
    if len(meanwhile) < back["step"] - killed["step"]:
        missing.append(f"only the steps {meanwhile} were finished while the server was away")
    if back["before"]["sent_step"] > killed["step"]:
        missing.append(f"step {back['before']['sent_step']} was sent while the server was away")
    return missing + _differences(run, uri, records)


def _differences(run: ScenarioResult, uri: str, records: dict[int, StepRecord]) -> list[str]:
    """In what MLflow differs from the run's own record."""
    client = connect(uri)
    found = [
        r
        for e in client.search_experiments()
        for r in client.search_runs([e.experiment_id])
        if r.info.run_name == run.paths.name
    ]
    if [r.info.run_id for r in found] != [run.summary["mlflow_run_id"]]:
        return [f"MLflow has {len(found)} runs of this name"]
    missing = [] if found[0].info.status == "FINISHED" else [f"MLflow says that the run is {found[0].info.status}"]
    for name, value_of in _POINTS.items():
        has = [(m.step, m.timestamp, m.value) for m in client.get_metric_history(found[0].info.run_id, name)]
        wanted = [(n, int(r.time_s * 1e3), value_of(r)) for n, r in records.items()]
        if has != wanted:
            missing.append(
                f"of {name} MLflow has {len(has)} points, {len(set(has))} of them different, instead of the"
                f" {len(wanted)} recorded"
            )
    return missing


def _sent(job: Job) -> int:
    """The last step that MLflow has, as far as the tracker knows."""
    stored: dict[str, Any] = read_json(job.paths.tracking) or {}
    return int(stored.get("sent_step", 0))
