"""Fixtures of all tests."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

pytest_plugins = ["tests.cluster"]

if TYPE_CHECKING:
    from local_world import Pool

    from ray_app.record.s3 import S3Path
    from tests.s3_server import S3Server


def pytest_configure() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would every process that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Four worker processes without Ray."""
    from local_world import Pool

    made = Pool(4, tmp_path_factory.mktemp("stores"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A server that speaks S3, with one empty bucket."""
    from tests.s3_server import CREDENTIALS, S3Server

    with pytest.MonkeyPatch.context() as environment:
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        server = S3Server()
        yield server
        server.close()


@pytest.fixture
def s3_folder(s3_server: S3Server) -> Iterator[S3Path]:
    """A place on it for one test, which begins and ends without faults."""
    s3_server.reset()
    yield s3_server.path(uuid.uuid4().hex)
    s3_server.reset()


@pytest.fixture
def same_threads() -> Iterator[None]:
    """Gives this process its settings back after a worker's code ran in it."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
