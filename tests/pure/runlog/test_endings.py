"""The list of how the runs of a storage ended: a report reads only the summary of the run that it compares with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ray_app.report.facts import Earlier, read_facts
from ray_app.runlog.endings import RunEnd, metric_key, put_summary, read_ends
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import put_json
from tests.support.run_directory import START_S, RunDirectory


def summary(
    value: float | None, ended_s: float = START_S - 10, status: str = "finished", metric: str = "accuracy"
) -> dict[str, Any]:
    best = None if value is None else {"step": 300, "metric": metric, "value": value}
    return {"status": status, "ended_s": ended_s, "best": best}


def write_other_runs(folder: Path, count: int) -> None:
    """Writes runs next to the reported one; the last but one is the best."""
    for number in range(count):
        run = RunDirectory(folder, f"near{number}", START_S - 1000)
        put_summary(run.paths, summary(0.99 if number == count - 2 else 0.9 - number / 1000))


@pytest.fixture
def summaries_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the name of the run for each summary that is read."""
    run_names: list[str] = []
    original = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "summary.json":
            run_names.append(path.parent.name)
        return original(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    return run_names


def earlier_of_report(folder: Path) -> Earlier | None:
    run = RunPaths(folder / "run")
    if not run.config.exists():
        RunDirectory(folder).start()
    return read_facts(run).earlier


def test_a_report_reads_only_the_summary_of_the_best_run(tmp_path: Path, summaries_read: list[str]) -> None:
    write_other_runs(tmp_path, 30)
    for name, content in (
        ("failed", summary(1.0, status="failed")),
        ("without", summary(None)),
        ("other", summary(1.0, metric="rmse")),
    ):
        put_summary(RunDirectory(tmp_path, name).paths, content)
    put_summary(RunDirectory(tmp_path, "nan").paths, summary(float("nan")))
    put_summary(RunDirectory(tmp_path, "later").paths, summary(1.0, START_S + 100))
    best = earlier_of_report(tmp_path)
    assert best is not None
    assert (best.name, best.value, best.of) == ("near28", 0.99, 30)
    assert sorted(set(summaries_read)) == ["near28", "run"]
    assert len(summaries_read) == 2, "each of the two summaries is read once"


def test_the_summary_of_an_unlisted_run_is_read_once(tmp_path: Path, summaries_read: list[str]) -> None:
    """A run is unlisted if an earlier version wrote it, its driver stopped before listing it, or it was copied."""
    for name, value in (("one", 0.5), ("two", 0.7)):
        put_json(RunDirectory(tmp_path, name).paths.summary, summary(value))
    for name, text in (("half", "{"), ("list", "[]"), ("never", '{"status": "failed", "best": null, "ended_s": null}')):
        RunDirectory(tmp_path, name).paths.summary.write_text(text)
    for expected in ({"one", "two"}, set()):
        summaries_read.clear()
        best = earlier_of_report(tmp_path)
        assert best is not None
        assert (best.name, best.of) == ("two", 2)
        assert set(summaries_read) - {"half", "list", "never", "run", "two"} == expected - {"two"}
    (tmp_path / "two" / "summary.json").unlink()
    best = earlier_of_report(tmp_path)
    assert best is not None
    assert best.name == "one", "the best run has no summary any more"


def test_a_run_that_ends_again_is_listed_with_its_last_end(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, "again")
    put_summary(run.paths, summary(0.9, START_S - 50))
    put_summary(run.paths, summary(0.4, START_S - 20))
    [end] = read_ends(tmp_path)
    assert end == RunEnd("again", START_S - 20, metric_key("accuracy"), 0.4)
    assert len(list((tmp_path / ".ends").iterdir())) == 1
    # A driver that stopped before it removed the older entry leaves this file.
    (tmp_path / ".ends" / RunEnd("again", START_S - 50, metric_key("accuracy"), 0.9).name).touch()
    assert read_ends(tmp_path) == [end]


def test_an_entry_that_the_summary_does_not_confirm_is_ignored(tmp_path: Path) -> None:
    for name, value in (("stale", 0.5), ("good", 0.6)):
        put_summary(RunDirectory(tmp_path, name).paths, summary(value))
    (tmp_path / ".ends" / RunEnd("stale", START_S - 1, metric_key("accuracy"), 0.99).name).touch()
    (tmp_path / ".ends" / "no end").touch()
    (tmp_path / ".ends" / RunEnd("gone", START_S - 1, metric_key("accuracy"), 0.99).name).touch()
    best = earlier_of_report(tmp_path)
    assert best is not None
    assert best.name == "good"


def test_a_run_that_cannot_be_listed_still_has_its_summary(tmp_path: Path) -> None:
    paths = RunDirectory(tmp_path).paths
    (tmp_path / ".ends").write_text("no folder")
    put_summary(paths, summary(0.5))
    assert json.loads(paths.summary.read_bytes())["status"] == "finished"
    put_summary(paths, {"status": "failed", "ended_s": None})
    assert json.loads(paths.summary.read_bytes())["status"] == "failed"


def test_an_unreadable_folder_is_not_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples are `lost+found` and the run of another user; the user of the tests may read everything."""
    write_other_runs(tmp_path, 2)
    (tmp_path / "lost+found").mkdir()
    original, denied = Path.read_bytes, list[Path]()

    def read_bytes(path: Path) -> bytes:
        if path.parent.name == "lost+found":
            denied.append(path)
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert sorted(end.run for end in read_ends(tmp_path)) == ["near0", "near1"]
    assert denied, "no read was denied"
