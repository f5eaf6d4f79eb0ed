"""What the GPU's table reads from a trace, on traces that are made here."""

from __future__ import annotations

import pytest

from benchmarks.gpu_cluster import hidden


@pytest.mark.parametrize(
    ("exchange", "computing", "part"),
    [
        ([(0, 10)], [(5, 20)], 0.5),
        ([(0, 10), (20, 30)], [(0, 4), (2, 10), (29, 40)], 0.55),
        ([(0, 10), (5, 15)], [(0, 15)], 1.0),
        ([(0, 10)], [], 0.0),
        ([], [(0, 10)], 0.0),
    ],
)
def test_the_part_of_an_exchange_that_computing_hides(
    exchange: list[tuple[float, float]], computing: list[tuple[float, float]], part: float
) -> None:
    assert hidden(exchange, computing) == pytest.approx(part)
