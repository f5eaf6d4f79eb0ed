"""Early stopping: a pure function of the planned evaluations, independent of their order of arrival."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_app.runlog.evaluations import Verdict, check_patience

PLANNED = range(10, 101, 10)


def verdict_of(
    values: list[float | None], patience: int = 2, min_delta: float = 0.0, mode: str = "max"
) -> Verdict | None:
    return check_patience(dict(zip(PLANNED, values, strict=False)), PLANNED, patience, min_delta, mode)


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([0.1, 0.3, 0.2, 0.2], {}, Verdict(40, 20)),
        # An equal value is not an improvement.
        ([0.1, 0.3, 0.2, 0.3, 0.4], {}, Verdict(40, 20)),
        ([0.1, 0.3, 0.2, 0.31, 0.2], {}, None),
        # The best step is the best value even if it improves by less than min_delta.
        ([0.1, 0.3, 0.35, 0.39], {"min_delta": 0.1}, Verdict(40, 40)),
        ([3.0, 1.0, 2.0, 2.0], {"mode": "min"}, Verdict(40, 20)),
        ([math.nan, math.nan], {}, Verdict(20, 10)),
        ([math.nan, 0.2, math.nan, math.nan], {}, Verdict(40, 20)),
        # An evaluation that can never take place does not count.
        ([0.3, None, 0.2, None, 0.1], {}, Verdict(50, 10)),
        ([0.3, 0.2], {"patience": 1}, Verdict(20, 10)),
        ([], {}, None),
    ],
)
def test_the_verdict_follows_patience_min_delta_and_mode(
    values: list[float | None], options: dict, expected: Verdict | None
) -> None:
    assert verdict_of(values, **options) == expected


@given(
    st.lists(st.floats(-1, 1) | st.just(math.nan), max_size=10),
    st.integers(1, 4),
    st.sets(st.integers(0, 9)),
    st.sampled_from(["max", "min"]),
)
def test_late_or_unordered_evaluations_do_not_change_a_verdict(
    values: list[float], patience: int, arrived: set[int], mode: str
) -> None:
    all_values = dict(zip(PLANNED, values, strict=False))
    final = check_patience(all_values, PLANNED, patience, 0.0, mode)
    some_values = {step: value for i, (step, value) in enumerate(all_values.items()) if i in arrived}
    early = check_patience(some_values, PLANNED, patience, 0.0, mode)
    assert early in (None, final), "a verdict from some evaluations is the final verdict"
    if final is not None:
        assert (
            check_patience({s: v for s, v in all_values.items() if s <= final.stop_step}, PLANNED, patience, 0.0, mode)
            == final
        )
        assert final.best_step <= final.stop_step
