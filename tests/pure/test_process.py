"""Changes of a run to its process are undone, also where two runs overlap in time."""

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
def test_a_variable_is_restored_in_whichever_order_overlapping_runs_end(
    monkeypatch: pytest.MonkeyPatch, value: str | None, order: tuple[int, ...]
) -> None:
    monkeypatch.delenv(NAME, raising=False) if value is None else monkeypatch.setenv(NAME, value)
    stacks = [ExitStack() for _ in range(3)]
    for number, stack in enumerate(stacks):
        stack.enter_context(set_variables(**{NAME: str(number)}))
    assert os.environ[NAME] == "2"
    for ended, number in enumerate(order, 1):
        stacks[number].close()
        if ended < 3:
            assert os.environ[NAME] != value
    assert os.environ.get(NAME) == value


def test_the_inner_context_restores_the_value_of_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    with set_variables(**{NAME: "outer"}):
        with set_variables(**{NAME: None}):
            os.environ[NAME] = "somebody's"
        assert os.environ[NAME] == "outer"
    assert NAME not in os.environ


RETAINED_MB = """
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
"""A script that prints how many megabytes a process retains after it has freed 32 tensors of 8 MB in each of four
successive threads, and in its main thread.
"""


def retained_mb(**variables: str) -> int:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))
    } | variables
    done = subprocess.run(
        [sys.executable, "-c", RETAINED_MB], env=environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.rest
def test_freed_memory_is_retained_once_and_not_per_thread() -> None:
    assert 200 < retained_mb() < 256 + 4 * 64 + 30


@pytest.mark.rest
def test_malloc_variables_of_the_environment_take_precedence() -> None:
    assert retained_mb(MALLOC_TRIM_THRESHOLD_="131072") < 60
