"""Fixtures of the tests on simulated devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ray_app.testing import WorkerPool


@pytest.fixture(scope="module")
def device_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """Four worker processes for simulated devices, which only the tests of one file share.

    A process has to load the devices before its first backward, in which torch starts a thread for each device.
    """
    with WorkerPool(4, tmp_path_factory.mktemp("stores")) as pool:
        yield pool
