"""How the runs of a storage ended: a report reads the summary of the run that it compares with, and of no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ray_app.report.facts import Earlier, read_facts
from ray_app.runlog.endings import RunEnd, metric_key, put_summary, read_ends
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import put_json
from tests.support.made_run import BEGAN_S, MadeRun


def summary(
    value: float | None, ended_s: float = BEGAN_S - 10, status: str = "finished", metric: str = "accuracy"
) -> dict[str, Any]:
    best = None if value is None else {"step": 300, "metric": metric, "value": value}
    return {"status": status, "ended_s": ended_s, "best": best}


def neighbours(folder: Path, count: int) -> None:
    """Runs beside the one that is reported; the last but one is the best."""
    for number in range(count):
        run = MadeRun(folder, f"near{number}", BEGAN_S - 1000)
        put_summary(run.paths, summary(0.99 if number == count - 2 else 0.9 - number / 1000))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose summary is read, one after the other."""
    found: list[str] = []
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "summary.json":
            found.append(path.parent.name)
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    return found


def earlier(folder: Path) -> Earlier | None:
    run = RunPaths(folder / "run")
    if not run.config.exists():
        MadeRun(folder).start()
    return read_facts(run).earlier


def test_a_report_reads_the_summary_of_the_best_and_of_no_other(tmp_path: Path, read: list[str]) -> None:
    neighbours(tmp_path, 30)
    for name, made in (
        ("failed", summary(1.0, status="failed")),
        ("without", summary(None)),
        ("other", summary(1.0, metric="rmse")),
    ):
        put_summary(MadeRun(tmp_path, name).paths, made)
    put_summary(MadeRun(tmp_path, "nan").paths, summary(float("nan")))
    put_summary(MadeRun(tmp_path, "later").paths, summary(1.0, BEGAN_S + 100))
    found = earlier(tmp_path)
    assert found is not None
    assert (found.name, found.value, found.of) == ("near28", 0.99, 30)
    assert sorted(set(read)) == ["near28", "run"]
    assert len(read) == 2, "the run itself has none yet"


def test_runs_that_are_not_listed_are_read_once(tmp_path: Path, read: list[str]) -> None:
    """Of an earlier version, of a driver that was stopped before it listed its run, or copied from elsewhere."""
    for name, value in (("one", 0.5), ("two", 0.7)):
        put_json(MadeRun(tmp_path, name).paths.summary, summary(value))
    for name, text in (("half", "{"), ("list", "[]"), ("never", '{"status": "failed", "best": null, "ended_s": null}')):
        MadeRun(tmp_path, name).paths.summary.write_text(text)  # type: ignore[union-attr]
    for expected in ({"one", "two"}, set()):
        read.clear()
        found = earlier(tmp_path)
        assert found is not None
        assert (found.name, found.of) == ("two", 2)
        assert set(read) - {"half", "list", "never", "run", "two"} == expected - {"two"}
    (tmp_path / "two" / "summary.json").unlink()
    found = earlier(tmp_path)
    assert found is not None
    assert found.name == "one", "its summary no longer says so"


def test_a_run_that_ends_again_is_listed_as_it_ended_last(tmp_path: Path) -> None:
    run = MadeRun(tmp_path, "again")
    put_summary(run.paths, summary(0.9, BEGAN_S - 50))
    put_summary(run.paths, summary(0.4, BEGAN_S - 20))
    [end] = read_ends(tmp_path)
    assert end == RunEnd("again", BEGAN_S - 20, metric_key("accuracy"), 0.4)
    assert len(list((tmp_path / ".ends").iterdir())) == 1
    (
        tmp_path / ".ends" / RunEnd("again", BEGAN_S - 50, metric_key("accuracy"), 0.9).name
    ).touch()  # its driver was stopped before it removed it
    assert read_ends(tmp_path) == [end]


def test_what_the_summary_does_not_confirm_is_not_believed(tmp_path: Path) -> None:
    for name, value in (("stale", 0.5), ("good", 0.6)):
        put_summary(MadeRun(tmp_path, name).paths, summary(value))
    (tmp_path / ".ends" / RunEnd("stale", BEGAN_S - 1, metric_key("accuracy"), 0.99).name).touch()
    (tmp_path / ".ends" / "no end").touch()
    (tmp_path / ".ends" / RunEnd("gone", BEGAN_S - 1, metric_key("accuracy"), 0.99).name).touch()
    found = earlier(tmp_path)
    assert found is not None
    assert found.name == "good"


def test_a_run_that_cannot_be_listed_has_its_summary(tmp_path: Path) -> None:
    paths = MadeRun(tmp_path).paths
    (tmp_path / ".ends").write_text("no folder")
    put_summary(paths, summary(0.5))
    assert json.loads(paths.summary.read_bytes())["status"] == "finished"
    put_summary(paths, {"status": "failed", "ended_s": None})
    assert json.loads(paths.summary.read_bytes())["status"] == "failed"


def test_a_folder_that_may_not_be_read_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `lost+found` at the top of a disk, or a colleague's run; the tests' user may read everything."""
    neighbours(tmp_path, 2)
    (tmp_path / "lost+found").mkdir()
    real, denied = Path.read_bytes, list[Path]()

    def read_bytes(path: Path) -> bytes:
        if path.parent.name == "lost+found":
            denied.append(path)
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert sorted(end.run for end in read_ends(tmp_path)) == ["near0", "near1"]
    assert denied, "nobody was refused"
