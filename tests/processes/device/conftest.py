"""Fixtures of the tests on simulated devices."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_app.testing import WorkerPool
from tests.support.local_world import write_images


@pytest.fixture(scope="module")
def device_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """Four worker processes for simulated devices, which only the tests of one file share.

    A process has to load the devices before its first backward, in which torch starts a thread for each device.
    """
    with WorkerPool(4, tmp_path_factory.mktemp("stores")) as pool:
        yield pool


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strategies")
    write_images(folder / "eval", [[40]])
    # The last step has one row.
    return write_images(folder / "data", [[50, 1], [46]])
