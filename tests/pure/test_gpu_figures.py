"""The measurements of the GPU table: their order, the effect of a failed one on the others, and their use of traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu import LINES, ORDER
from benchmarks.gpu_cluster import hidden
from benchmarks.gpu_lines import Line, Outcome, Result, look_at
from benchmarks.gpu_workers import Bench


@pytest.mark.parametrize(
    ("reduction", "computation", "part"),
    [
        ([(0, 10)], [(5, 20)], 0.5),
        ([(0, 10), (20, 30)], [(0, 4), (2, 10), (29, 40)], 0.55),
        ([(0, 10), (5, 15)], [(0, 15)], 1.0),
        ([(0, 10)], [], 0.0),
        ([], [(0, 10)], 0.0),
    ],
)
def test_the_share_of_a_reduction_that_overlaps_with_computation(
    reduction: list[tuple[float, float]], computation: list[tuple[float, float]], part: float
) -> None:
    assert hidden(reduction, computation) == pytest.approx(part)


def broken(bench: Bench) -> Outcome:
    raise RuntimeError("a worker said:\n" + "\n".join(f"line {number}" for number in range(20)))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench("cpu", tmp_path)


def test_a_failed_measurement_has_the_end_of_its_traceback_and_the_others_run(bench: Bench) -> None:
    results: list[Result] = []
    look_at(
        [Line("first", broken, 60), Line("second", lambda _: Outcome("seen", True), 60)], bench, 100, results.append
    )
    assert [(result.name, result.status) for result in results] == [("first", "failed"), ("second", "passed")]
    assert results[0].trace.splitlines() == [f"line {number}" for number in range(10, 20)]
    assert results[1].trace == ""


@pytest.mark.parametrize("look", [broken, lambda _: Outcome("other bits", False)])
def test_no_measurement_follows_a_failed_start(bench: Bench, look: Callable[[Bench], Outcome]) -> None:
    results: list[Result] = []
    lines = [Line("start", look, 60, stops=True), Line("second", lambda _: Outcome("seen", True), 60)]
    look_at(lines, bench, 100, results.append)
    assert [(result.name, result.status) for result in results] == [("start", "failed"), ("second", "left out")]
    assert results[1].text == "start failed"


def test_the_start_precedes_all_computing_measurements_and_alone_stops_the_rest() -> None:
    assert [line.name for line in LINES] == list(ORDER)
    assert [line.name for line in LINES if line.stops] == ["start: two steps, a checkpoint between them"]
    assert [line.name for line in LINES].index("start: two steps, a checkpoint between them") == 1
