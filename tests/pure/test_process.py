"""What a run changes in its process is put back, also where two runs overlap in time."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from ray_app.process import set_variables

NAME = "RAY_APP_TEST_VARIABLE"


@pytest.mark.parametrize("value", [None, "theirs"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_variable_is_what_it_was_in_whatever_order_those_end_who_set_it(
    monkeypatch: pytest.MonkeyPatch, value: str | None, order: tuple[int, ...]
) -> None:
    monkeypatch.delenv(NAME, raising=False) if value is None else monkeypatch.setenv(NAME, value)
    times = [ExitStack() for _ in range(3)]
    for number, each in enumerate(times):
        each.enter_context(set_variables(**{NAME: str(number)}))
    assert os.environ[NAME] == "2"
    for ended, number in enumerate(order, 1):
        times[number].close()
        if ended < 3:
            assert os.environ[NAME] != value
    assert os.environ.get(NAME) == value


def test_the_inner_one_gives_back_what_the_outer_one_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    with set_variables(**{NAME: "outer"}):
        with set_variables(**{NAME: None}):
            os.environ[NAME] = "somebody's"
        assert os.environ[NAME] == "outer"
    assert NAME not in os.environ


HELD_MB = """
import resource, threading, torch
from ray_app.process import keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20

def step():
    held = [torch.ones(2 << 20) for _ in range(32)]

step()
before = resident()
keep_freed_memory()
for _ in range(4):
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
step()
print(resident() - before)
"""
"""Megabytes that a process holds after 32 tensors of 8 MB in each of four threads, one after the other, and in its main
thread.
"""


def held_mb(**variables: str) -> int:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))
    } | variables
    done = subprocess.run([sys.executable, "-c", HELD_MB], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_freed_memory_is_kept_for_the_next_step_once_and_not_for_every_thread() -> None:
    assert 200 < held_mb() < 256 + 4 * 64 + 30


@pytest.mark.rest
def test_what_the_environment_says_of_malloc_counts_more() -> None:
    assert held_mb(MALLOC_TRIM_THRESHOLD_="131072") < 60
