"""What a run changes in its process is put back, also where two runs overlap in time."""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack

import pytest

from ray_app.process import variables

NAME = "RAY_APP_TEST_VARIABLE"


@pytest.mark.parametrize("value", [None, "theirs"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_variable_is_what_it_was_in_whatever_order_those_end_who_set_it(
    monkeypatch: pytest.MonkeyPatch, value: str | None, order: tuple[int, ...]
) -> None:
    monkeypatch.delenv(NAME, raising=False) if value is None else monkeypatch.setenv(NAME, value)
    times = [ExitStack() for _ in range(3)]
    for number, each in enumerate(times):
        each.enter_context(variables(**{NAME: str(number)}))
    assert os.environ[NAME] == "2"
    for ended, number in enumerate(order, 1):
        times[number].close()
        if ended < 3:
            assert os.environ[NAME] != value
    assert os.environ.get(NAME) == value


def test_the_inner_one_gives_back_what_the_outer_one_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    with variables(**{NAME: "outer"}):
        with variables(**{NAME: None}):
            os.environ[NAME] = "somebody's"
        assert os.environ[NAME] == "outer"
    assert NAME not in os.environ
