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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ray_app.config.import_paths import explain_extra
from ray_app.drill.faults import ActOnWaits, Evidence, HookChain, WaitForEvidence
from ray_app.drill.scenario import Scenario, ScenarioContext, ScenarioResult, unmet
from ray_app.driver.run import Faults
from ray_app.runlog.journal import StepRecord, read_records
from ray_app.storage.files import read_json
from ray_app.track.mlflow_client import connect
from ray_app.train.job import Hooks, Job

_START_TIMEOUT_S = 120.0
_POLL_INTERVAL_S = 0.1
_STEPS_WITHOUT_SERVER = 10
_POINTS: dict[str, Callable[[StepRecord], float]] = {
    "loss": lambda r: r.loss,
    "step_ms": lambda r: r.step_ms,
    "workers": lambda r: float(r.workers),
}


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
        """Starts the server at its address and on its database; returns the process id once the server answers."""
        stores = ["--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db"]
        stores += ["--artifacts-destination", str(self._folder / "files")]
        address = ["--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"]
        command = [sys.executable, "-m", "mlflow", "server", *address, *stores]
        settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        log = self._folder / "output"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, env=os.environ | settings, stdout=output, stderr=output, start_new_session=True
            )
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self.is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the drill's MLflow server does not start: {log.read_text()[-1000:]}")
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


def _make_outage(server: MlflowServer, evidence: Evidence) -> ActOnWaits:
    """Returns what kills the server while a rank waits, and starts it again while the rank waits at a later step.

    The run finishes the steps between the two waits without the server.
    """

    def kill(_: dict[str, Any], job: Job) -> dict[str, Any] | None:
        # The server must die while the run uses it, not before the first points have arrived.
        if not _read_sent_step(job):
            return None
        server.kill()
        return {}

    def restart(_: dict[str, Any], job: Job) -> dict[str, Any]:
        outage = {"answers": server.is_ready(), "sent_step": _read_sent_step(job)}
        return {"pid": server.start(), "before": outage}

    return ActOnWaits(evidence, {"held": ("server_killed", kill), "held_again": ("server_back", restart)})


def mlflow(context: ScenarioContext) -> Scenario | str:
    """The MLflow server that a run is sent to, the drill's own, is killed for a while."""
    if importlib.util.find_spec("mlflow") is None or importlib.util.find_spec("sqlalchemy") is None:
        return f"mlflow is {explain_extra('mlflow')}"
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
        _make_outage(server, context.evidence),
        {"held": "server_killed", "held_again": "server_back"},
        changes={"tracking__enabled": True, "tracking__every_steps": 1, "tracking__registered_model": None},
        setup=setup,
    )


def confirm_outage(run: ScenarioResult, uri: str) -> list[str]:
    """Confirms that the run trained without the server and lost no point in MLflow; returns what is missing.

    The run must have finished all steps of the outage while the server was away. Afterwards one MLflow run, at `uri`,
    must have every point once and in order.
    """
    killed, back = run.evidence["server_killed"], run.evidence["server_back"]
    records, _ = read_records(run.paths)
    planned = range(killed["step"] + 1, back["step"] + 1)
    steps = [n for n in planned if n in records and killed["time_s"] < records[n].time_s < back["time_s"]]
    sent_step = back["before"]["sent_step"]
    return unmet(
        (not back["before"]["answers"], "the server answered while it was down"),
        (len(steps) >= len(planned), f"only the steps {steps} were finished while the server was down"),
        (sent_step <= killed["step"], f"step {sent_step} was sent while the server was down"),
    ) + _compare_points(run, uri, records)


def _compare_points(run: ScenarioResult, uri: str, records: dict[int, StepRecord]) -> list[str]:
    """Returns a message for each difference between MLflow and the run's step records."""
    client = connect(uri)
    all_runs = [r for e in client.search_experiments() for r in client.search_runs([e.experiment_id])]
    runs = [r for r in all_runs if r.info.run_name == run.paths.name]
    if [r.info.run_id for r in runs] != [run.summary["mlflow_run_id"]]:
        return [f"MLflow has {len(runs)} runs of this name"]
    status = runs[0].info.status
    missing = unmet((status == "FINISHED", f"MLflow has the run as {status}"))
    for name, value_of in _POINTS.items():
        points = [(m.step, m.timestamp, m.value) for m in client.get_metric_history(runs[0].info.run_id, name)]
        expected_points = [(n, int(r.time_s * 1e3), value_of(r)) for n, r in records.items()]
        if points != expected_points:
            pairs = zip_longest(points, expected_points)
            in_mlflow, recorded = next(pair for pair in pairs if pair[0] != pair[1])
            missing.append(
                f"of {name} MLflow has {len(points)} points, {len(set(points))} of them different, instead of the"
                f" {len(expected_points)} recorded; the first that differs is {in_mlflow}, recorded is {recorded}"
            )
    return missing


def _read_sent_step(job: Job) -> int:
    """Returns the last step that the tracker has sent to MLflow, 0 if none."""
    stored: dict[str, Any] = read_json(job.paths.tracking) or {}
    return int(stored.get("sent_step", 0))
