"""The output of a task in other processes is copied to the directory of the run, without blocking the task."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_app.runlog.output import NewLines, copied_output
from ray_app.runlog.paths import RunPaths


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[RunPaths]:
    before = sys.stdout, sys.stderr
    yield RunPaths(tmp_path / "run")
    assert (sys.stdout, sys.stderr) == before


def test_printed_lines_are_copied_with_their_position(
    paths: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "a-canary-of-mine")
    steps, before = iter(range(9)), (sys.stdout, sys.stderr)
    with copied_output(paths, 3, "worker-a-1", lambda: f"step {next(steps)}"):
        print("shapes", (4, 8))
        print("two\nlines a-canary-of-mine")
        print("wrong", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == "shapes (4, 8)\ntwo\nlines a-canary-of-mine\n", (
        "the output still goes to its original destination"
    )
    lines = paths.output(3, "worker-a-1", "out").read_text().splitlines()
    assert [line.partition("] ")[2] for line in lines] == ["shapes (4, 8)", "two", "lines ***"]
    assert all(line.startswith("[step ") for line in lines)
    assert paths.output(3, "worker-a-1", "err").read_text().endswith("] wrong\n")


def test_a_process_that_prints_nothing_creates_no_file(paths: RunPaths) -> None:
    with copied_output(paths, 1, "worker", str):
        pass
    assert not paths.outputs.exists()


@pytest.mark.rest
def test_endless_output_is_truncated_in_the_storage(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    start_s = time.perf_counter()
    with copied_output(paths, 1, "worker", lambda: "step 1"):
        for i in range(100_000):
            print("a line of some length, again and again", i)
        print("x" * 10_000_000)
    elapsed_s = time.perf_counter() - start_s
    text = paths.output(1, "worker", "out").read_text()
    assert len(text) <= (1 << 20) + 200
    *_, last_whole, last = text.splitlines()
    assert last_whole.startswith("[step 1] a line of some length")
    assert last == f"... further output is only in {os.readlink('/proc/self/fd/1')}"
    assert elapsed_s < 20, "a print waited for the storage"
    assert len(capsys.readouterr().out) > 12_000_000


def test_an_unavailable_storage_raises_no_error(paths: RunPaths) -> None:
    paths.root.parent.mkdir(exist_ok=True)
    Path(str(paths.root)).write_text("a file where the folder should be")
    with copied_output(paths, 1, "worker", str):
        print("something")


def test_the_console_shows_a_maximum_of_twenty_lines_per_poll(paths: RunPaths) -> None:
    new_lines = NewLines(paths, 2)
    assert new_lines.poll() == []
    paths.output(1, "worker", "out").parent.mkdir(parents=True)
    paths.output(1, "worker", "out").write_text("of the start before\n")
    file = paths.output(2, "worker", "out")
    file.write_text("".join(f"line {i}\n" for i in range(50)) + "half a")
    assert new_lines.poll() == [*(f"line {i}" for i in range(20)), f"... 30 more lines in {paths.outputs}"]
    assert new_lines.poll() == []
    file.write_text(file.read_text() + " line\n")
    assert new_lines.poll() == ["half a line"]
