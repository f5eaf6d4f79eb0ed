"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from local_world import Pool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Four worker processes without Ray."""
    from local_world import Pool

    made = Pool(4, tmp_path_factory.mktemp("stores"))
    yield made
    made.close()
