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


@pytest.fixture
def same_threads() -> Iterator[None]:
    """Gives this process its settings back after a worker's code ran in it."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
