"""Fixtures of all tests."""

from __future__ import annotations

import gc
import json
import os
import signal
import uuid
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).parent
pytest_plugins = ["tests.support.cluster", "tests.support.train_command"]

if TYPE_CHECKING:
    from ray_app.storage.object_stores import ObjectPath
    from ray_app.testing import WorkerPool
    from tests.support.azure_server import AzureServer
    from tests.support.gcs_server import GoogleServer
    from tests.support.s3_server import S3Server


DURATIONS = TESTS / "durations.json"
"""Seconds of each file of tests, or of the tests in one process, with `make test`; `--store-durations` writes it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="run part K of N of the tests, divided by their names")
    parser.addoption("--store-durations", action="store_true", help="write the seconds of each file of tests")


def pytest_configure() -> None:
    """Sets the signal handler and the environment that every process started by a test inherits."""
    # A shell starts background processes with SIGINT ignored.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= {
        # By default Ray's workers have a lower priority than other processes, and would starve next to other tests.
        "RAY_worker_niceness": "0",
        # The results must not depend on how full the disk of the machine is: Ray and the disk cache use all of it.
        "RAY_local_fs_capacity_threshold": "1.0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks every test with its folder, and tests on real Ray without the mark `guarantee` or `rest` as `campaign`.

    With `--part` the tests of the other parts are left out.
    """
    for item in items:
        folder = _folder(item)
        item.add_marker(folder)
        if folder in ("ray", "own_cluster") and not any(map(item.get_closest_marker, ("guarantee", "rest"))):
            item.add_marker("campaign")
    if part := config.getoption("part"):
        number, parts = map(int, part.split("/"))
        others = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts + 1 != number]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    # What takes longest begins first: runs on Ray, of which most are not in `make test`, then by the stored seconds.
    seconds, on_ray = json.loads(DURATIONS.read_text()), {"ray": -2, "own_cluster": -1}
    items.sort(key=lambda item: (on_ray.get(_folder(item), 0), -seconds.get(_scope(item.nodeid), 0)))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Writes the seconds of each file with `--store-durations`."""
    if config.getoption("--store-durations"):
        seconds = Counter[str]()
        for report in (report for reports in terminalreporter.stats.values() for report in reports):
            if isinstance(report, pytest.TestReport):
                seconds[_scope(report.nodeid)] += report.duration
        rounded = {scope: round(value, 1) for scope, value in seconds.most_common()}
        DURATIONS.write_text(json.dumps(rounded, indent=1) + "\n")


def pytest_collection_finish() -> None:
    """Lets garbage collections skip the objects of the imported modules and of the tests, which live to the end.

    There are about 900,000, and a collection of all takes a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


class ByCluster(LoadScopeScheduling):
    """Runs tests that share the cluster in one process, those with Keras too, and those of each other file."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid)


def _scope(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    # Each process takes seconds to import Keras.
    if "keras" in file:
        return "keras"
    return "tests/ray" if file.startswith("tests/ray/") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByCluster:
    return ByCluster(config, log)


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports a skipped test as failed if TESTS_MAY_SKIP is "no", as in CI, where all programs are installed."""
    report = yield
    if report.skipped and os.environ.get("TESTS_MAY_SKIP") == "no":
        report.outcome, report.longrepr = "failed", f"Skipped, where nothing may be: {report.longrepr[2]}"
    return report


@pytest.fixture
def default_hangup() -> Iterator[None]:
    """SIGHUP ends this process, also if `nohup` has started it and the signal is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def worker_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """Four worker processes without Ray, which only the tests of one file share."""
    from ray_app.testing import WorkerPool

    worker_pool = WorkerPool(4, tmp_path_factory.mktemp("stores"))
    yield worker_pool
    worker_pool.close()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A server with the S3 API and one empty bucket."""
    from tests.support.s3_server import CREDENTIALS, S3Server

    with pytest.MonkeyPatch.context() as environment:
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        server = S3Server()
        yield server
        server.close()


@pytest.fixture
def s3_folder(s3_server: S3Server) -> Iterator[ObjectPath]:
    """A folder on the S3 server for one test; the server has no injected faults before and after the test."""
    s3_server.reset()
    yield s3_server.path(uuid.uuid4().hex)
    s3_server.reset()


@pytest.fixture(scope="session")
def gs_server() -> Iterator[GoogleServer]:
    """A server with the API of Google Cloud Storage and one empty bucket."""
    from tests.support.gcs_server import TOKEN, GoogleServer

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GOOGLE_BEARER_TOKEN", TOKEN)
        server = GoogleServer()
        yield server
        server.close()


@pytest.fixture(scope="session")
def az_server() -> Iterator[AzureServer]:
    """An emulator of Azure Blob Storage, with one empty container."""
    from tests.support.azure_server import KEY, AzureServer

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AZURE_STORAGE_KEY", KEY)
        server = AzureServer()
        yield server
        server.close()


@pytest.fixture
def gs_folder(gs_server: GoogleServer) -> ObjectPath:
    """A folder on the server of Google Cloud Storage for one test."""
    return gs_server.path(uuid.uuid4().hex)


@pytest.fixture
def az_folder(az_server: AzureServer) -> ObjectPath:
    """A folder on the emulator of Azure Blob Storage for one test."""
    return az_server.path(uuid.uuid4().hex)


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """Restores the settings of this process, which a worker's code may change, and the variable that MLflow sets."""
    from ray_app.task.environment import restore_process_state

    with restore_process_state(), pytest.MonkeyPatch.context() as environment:
        environment.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield
        os.environ.pop("MLFLOW_TRACKING_URI", None)
