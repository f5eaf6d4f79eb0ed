"""Early stopping: a pure function of planned evaluations, whatever came when."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_app.runlog.evaluations import Verdict, check_patience

PLANNED = range(10, 101, 10)


def of(values: list[float | None], patience: int = 2, min_delta: float = 0.0, mode: str = "max") -> Verdict | None:
    return check_patience(dict(zip(PLANNED, values, strict=False)), PLANNED, patience, min_delta, mode)


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([0.1, 0.3, 0.2, 0.2], {}, Verdict(40, 20)),
        ([0.1, 0.3, 0.2, 0.3, 0.4], {}, Verdict(40, 20)),  # equal is no improvement
        ([0.1, 0.3, 0.2, 0.31, 0.2], {}, None),
        ([0.1, 0.3, 0.35, 0.39], {"min_delta": 0.1}, Verdict(40, 40)),  # the best is the best, improvement or not
        ([3.0, 1.0, 2.0, 2.0], {"mode": "min"}, Verdict(40, 20)),
        ([math.nan, math.nan], {}, Verdict(20, 10)),
        ([math.nan, 0.2, math.nan, math.nan], {}, Verdict(40, 20)),
        ([0.3, None, 0.2, None, 0.1], {}, Verdict(50, 10)),  # what can never be evaluated does not count
        ([0.3, 0.2], {"patience": 1}, Verdict(20, 10)),
        ([], {}, None),
    ],
)
def test_examples(values: list[float | None], options: dict, expected: Verdict | None) -> None:
    assert of(values, **options) == expected


@given(
    st.lists(st.floats(-1, 1) | st.just(math.nan), max_size=10),
    st.integers(1, 4),
    st.sets(st.integers(0, 9)),
    st.sampled_from(["max", "min"]),
)
def test_nothing_that_comes_late_or_out_of_order_changes_a_verdict(
    values: list[float], patience: int, known: set[int], mode: str
) -> None:
    whole = dict(zip(PLANNED, values, strict=False))
    final = check_patience(whole, PLANNED, patience, 0.0, mode)
    part = {step: value for i, (step, value) in enumerate(whole.items()) if i in known}
    early = check_patience(part, PLANNED, patience, 0.0, mode)
    assert early in (None, final), "a verdict from a part is the verdict"
    if final is not None:
        assert (
            check_patience({s: v for s, v in whole.items() if s <= final.stop_step}, PLANNED, patience, 0.0, mode)
            == final
        )
        assert final.best_step <= final.stop_step
