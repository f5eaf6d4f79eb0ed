"""A real MLflow server on loopback that can be stopped, killed and restarted, and stubs of a broken one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import urllib.request
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ray_app.models import loader
from tests.support.waiting import wait_until

Point = tuple[int, int, float]


@cache
def _migrated() -> tempfile.TemporaryDirectory[str]:
    from mlflow.tracking import MlflowClient

    folder = tempfile.TemporaryDirectory()
    MlflowClient(f"sqlite:///{folder.name}/mlflow.db").search_experiments()
    return folder


@cache
def _skip_syncs() -> None:
    """Turns off the syncs of SQLite in this process, since no test cuts the power: each commit would wait for it."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    @event.listens_for(Engine, "connect")
    def turn_off(connection: Any, _record: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous = OFF")


def make_database(path: Path) -> str:
    """Writes an MLflow database as a copy of a migrated one, since a migration takes seconds; returns its URI."""
    _skip_syncs()
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(_migrated().name) / "mlflow.db", path)
    return f"sqlite:///{path}"


class MlflowServer:
    """A real MLflow server that can be killed and restarted."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.uri = folder, f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        database_path = self.folder / "server.db"
        uri = f"sqlite:///{database_path}" if database_path.exists() else make_database(database_path)
        address = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        stores = ["--backend-store-uri", uri, "--artifacts-destination", str(self.folder / "files")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *address, *stores],
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=(self.folder / "server.log").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        wait_until(self.answers, "the MLflow server does not answer")

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "server.log").read_text()
        try:
            return urllib.request.urlopen(f"{self.uri}/health", timeout=1).status == 200
        except OSError:
            return False

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        """Stops the process: the operating system accepts connections, and no request is answered."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGCONT)


class BrokenServer:
    """A broken server.

    Args:
        port: The port on which it listens.
        answer: The answer to each request; None: no answer.
    """

    def __init__(self, port: int, answer: bytes | None) -> None:
        self.num_requests = 0
        self._answer, self._open = answer, [socket.create_server(("127.0.0.1", port))]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._open[0].accept()
                self._open.append(connection)
                connection.recv(1 << 16)
                self.num_requests += 1
                if self._answer is not None:
                    connection.sendall(self._answer)
                    connection.close()
            except OSError:
                return

    def close(self) -> None:
        for one in self._open:
            with suppress(OSError):
                # This wakes the thread that waits in `accept` or `recv`.
                one.shutdown(socket.SHUT_RDWR)
            one.close()


ERROR_500 = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\nConnection: close\r\n\r\nboom"


def mlflow_runs(uri: str, name: str) -> list[Any]:
    """Returns the MLflow runs with this name in all experiments."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return [run for run in runs if run.info.run_name == name]


def metric_history(uri: str, run_id: str, metric: str) -> list[Point]:
    """Returns the points of a metric as (step, time, value), in the order of MLflow's answer."""
    from mlflow.tracking import MlflowClient

    return [(m.step, m.timestamp, m.value) for m in MlflowClient(uri).get_metric_history(run_id, metric)]


def load_pyfunc(folder: Path) -> Any:
    """Returns the predictor of a package's `data/model` as MLflow loads it, without MLflow's checks of a signature."""
    return loader._load_pyfunc(str(folder))
