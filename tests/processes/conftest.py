"""Fixtures of the tests in processes."""

from pathlib import Path

import pytest

from tests.support.local_world import write_images


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a data set of small images, which no test changes; the last step of an epoch has one row."""
    return write_images(tmp_path_factory.mktemp("images") / "data", [[50, 1], [46]])
