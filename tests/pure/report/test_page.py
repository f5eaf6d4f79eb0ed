"""The HTML report of run directories that are written by hand."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ray_app.cli.report import main
from ray_app.config.sections import FailureSection
from ray_app.driver.finalize import report_end
from ray_app.errors import TaskError
from ray_app.report.charts import (
    Clock,
    log_ticks,
    number,
    rows_per_second_over_time,
    seconds,
    smooth_points,
    sparkline,
    thin_points,
    ticks,
    time_ticks,
    whole_ticks,
)
from ray_app.report.facts import describe_cluster, logical_worker_shares, read_facts
from ray_app.report.figures import learning_figures
from ray_app.report.html import render, write_report
from ray_app.report.tables import budgets, by_class, counters, happenings, time_parts
from ray_app.runlog.history import Course
from ray_app.runlog.journal import Event, StepRecord
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import put_json
from ray_app.watch.terminal import format_loss_curve
from tests.support.paths import ROOT
from tests.support.run_directory import RunDirectory, make_full_run, png

SECTIONS = ["figures", "learning", "cluster", "classes", "ledger", "configuration"]
_VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """The tags, attributes and text of an HTML page; raises if an element is not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.ids: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids += [str(value) for name, value in attrs if name == "id"]
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(run: RunDirectory) -> Page:
    page = Page(render(read_facts(run.paths)))
    assert [name for name in page.ids if name in SECTIONS] == SECTIONS
    return page


def test_the_report_of_a_finished_run_has_all_sections(tmp_path: Path) -> None:
    run = make_full_run(tmp_path)
    page = page_of(run)
    for fragment in (
        "1 of 5 failures, 1 preemption, 1 resize, 1 driver restart",
        "workers 2 → 1 → 2",
        "10 steps redone",
        "Confusion matrix",
        "taken for",
        "best accuracy",
        "Evaluation harder: accuracy",
        "0.9800",
        "came after 1 h 23 min without a driver",
    ):
        assert fragment in page.text, fragment
    assert page.tags.count("svg") >= 8
    assert page.tags.count("img") == 6


def test_a_training_metric_of_the_task_is_drawn_with_that_of_the_evaluations(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.start()
    run.steps(1, 50, 2.0, metrics={"accuracy": 0.5, "right_words": 0.25}, weight=40.0)
    run.evaluate(50, 9.0, {"accuracy": 0.75, "loss": 1.0})
    figures = {figure.title: figure for figure in learning_figures(read_facts(run.paths))}
    assert [name for _, name in figures["Accuracy"].legend] == ["training", "evaluation"]
    assert [name for _, name in figures["Right words"].legend] == ["training"]
    assert "Evaluation: accuracy" not in figures
    assert figures["Loss"].unit == "mean by weight"


@pytest.mark.parametrize("has_eval_data", [True, False])
def test_the_report_of_a_run_without_steps_says_so(tmp_path: Path, has_eval_data: bool) -> None:
    run = RunDirectory(tmp_path, data__eval_path="made" if has_eval_data else None)
    run.start()
    text = page_of(run).text
    assert "No step has been recorded." in text
    assert ("No checkpoint has been evaluated." if has_eval_data else "No evaluation data was configured") in text


def test_the_report_of_a_run_that_never_started_says_so(tmp_path: Path) -> None:
    text = page_of(RunDirectory(tmp_path)).text
    assert "Nothing has happened." in text
    assert "none said how it ended" in text


def test_the_report_of_a_run_with_one_step_has_no_goodput(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.start()
    run.steps(1, 1, 2.0)
    assert "Goodput needs at least two steps." in page_of(run).text


def test_the_report_lists_rows_of_each_logical_worker_and_skipped_rows(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, data__on_bad_row="skip", data__shard="file")
    run.start()
    run.steps(1, 50, 2.0)
    assert "cannot be decoded" not in page_of(run).text
    for position in range(25):
        location = {"position": 1000 - position, "path": f"part-{position}.parquet", "row_group": 3, "row": 7}
        put_json(run.paths.bad_rows / f"{1000 - position:012d}.json", {**location, "reason": f"<b>cut {position}</b>"})
    page = page_of(run)
    text = " ".join(page.text.split())
    assert "Used by each logical worker logical workerrows 0800 1800 As data.shard: file shares them out." in text
    assert "25 of at most 100 (data.max_bad_rows), skipped 0 times in all. The first 20, and why" in text
    assert "part-24.parquet, row group 3, row 7<b>cut 24</b>" in text, "the bad rows are not sorted by position"
    assert "part-4.parquet," not in text
    assert page.ids.index("cluster") < page.ids.index("rows") < page.ids.index("classes")


def test_the_rows_of_many_logical_workers_are_summarized() -> None:
    records = [StepRecord(1, 0, 0.0, 1.0, 0.1, 1.0, 1.0, 0.0, 2, list(range(30)), [0] * 30, "1.1")] * 2
    shares = logical_worker_shares([sum(column) for column in zip(*(record.rows for record in records), strict=True)])
    assert shares is not None
    assert (shares.logical_workers, shares.min_rows, shares.max_rows, len(shares.first)) == (30, 0, 58, 20)
    assert (shares.first[19].rows, shares.first[19].part) == (38, 38 / 58)


def test_a_run_of_one_logical_worker_without_bad_rows_has_no_section_of_rows(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.start()
    assert "rows" not in page_of(run).ids
    assert logical_worker_shares([32]) is None, "one logical worker has shares"


def test_a_running_run_and_one_with_a_vanished_driver_have_different_states(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.start()
    run.steps(1, 50, 2.0)
    assert read_facts(run.paths).status == "vanished"
    run.write_live_lease()
    before = sorted(str(path) for path in run.paths.root.rglob("*"))
    write_report(run.paths)
    after = sorted(str(path) for path in run.paths.root.rglob("*"))
    assert set(after) - set(before) == {str(run.paths.report)}
    text = page_of(run).text
    assert "run running" in " ".join(text.split())
    assert "make it again with ray-app report" in text


def test_the_report_of_a_failed_run_has_the_reason(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.start()
    run.steps(1, 20, 2.0, losses={3: math.nan, 20: math.inf})
    run.end(9.0, "failed", reason="the gradient is not finite <at all>")
    text = page_of(run).text
    assert "the gradient is not finite <at all>" in text
    assert "2 steps whose loss was NaN or infinite are left out." in text


def test_traced_steps_are_linked(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.start()
    run.steps(1, 20, 2.0)
    for file in ("profile/steps-00000003-00000004.json.gz", "javascript:alert(1)", "profile/../../x"):
        run.event("profiled", 1.0, first=3, step=4, file=file)
    facts = read_facts(run.paths)
    assert re.findall(r'<a href="([^"]*)" download>', render(facts)) == ["profile/steps-00000003-00000004.json.gz"]


def test_the_traceback_of_a_task_error_is_shown_once_per_event(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.start()
    trace = "  File my_task.py\nKeyError: 'x'"
    raised = [str(TaskError("KeyError: 'x' (my_task.py, line 3, in loss)", trace, f"rank {rank}")) for rank in range(2)]
    run.event("failed", 1.0, number=1, errors={"0": raised[0], "1": raised[1]}, step=3, left=0)
    run.end(9.0, "failed", reason=raised[1])
    [description] = [text for _, kind, text in happenings(read_facts(run.paths)) if kind == "failed"]
    assert description.count(trace) == 1
    page = page_of(run)
    assert page.text.count("  File my_task.py") == 3, (
        "the traceback is not shown at the top and for the two events, of the failure and of the end"
    )
    assert not any("File my_task.py" in str(value) for _, _, value in page.attributes)


def test_values_of_the_run_are_escaped_text(tmp_path: Path) -> None:
    hostile = "</title></svg></style><script>alert(1)</script><img src=http://evil/x onerror=alert(1)>\"'{{ 7*7 }}"
    name = '<b onclick="x">run'
    run = make_full_run(tmp_path, name, text=hostile)
    run.event("fallback", 5000.0, checkpoint=hostile, reason=hostile)
    examples = [
        {"row": hostile, "truth": hostile, "predicted": hostile, "confidence": hostile, "image": image}
        for image in _IMAGES
    ]
    tables = {hostile: [hostile], "confusion_matrix": [[hostile]]}
    run.evaluate(50, 30, {hostile: 1.0, "accuracy": 1.0}, classes=[hostile], examples=examples, tables=tables)
    page = page_of(run)
    clean = Page(render(read_facts(make_full_run(tmp_path / "clean").paths)))
    assert set(page.tags) <= set(clean.tags), "the page has elements that are not in the template"
    assert {(tag, key) for tag, key, _ in page.attributes} <= {(tag, key) for tag, key, _ in clean.attributes} | {
        ("img", "alt")
    }
    assert hostile in page.text
    assert name in page.text
    assert [value for tag, key, value in page.attributes if (tag, key) == ("img", "src")] == [png()]


_IMAGES = [
    png(),
    "http://evil/x.png",
    "javascript:alert(1)",
    png() + '" onerror="x',
    png() + "\n",
    "data:image/svg+xml;base64,AAAA",
    7,
    None,
]


def test_the_report_fetches_nothing_and_has_no_script(tmp_path: Path) -> None:
    page = page_of(make_full_run(tmp_path))
    assert "script" not in page.tags
    assert not [item for item in page.attributes if item[1].startswith("on")]
    addresses = [
        value or "" for _, key, value in page.attributes if key in ("src", "href", "xlink:href", "srcset", "action")
    ]
    assert [value for value in addresses if not value.startswith("data:image/png;base64,")] == []
    policy = next(
        value
        for tag, key, value in page.attributes
        if tag == "meta" and key == "content" and "default-src" in (value or "")
    )
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    style = (ROOT / "ray_app/report/templates/report.css").read_text()
    assert "url(" not in style
    assert "@import" not in style


@pytest.mark.rest
def test_thinning_keeps_extremes_and_both_ends() -> None:
    numbers = random.Random(1)
    points = [(float(x), numbers.random()) for x in range(1_000_000)]
    points[777_777] = (777_777.0, 50.0)
    points[123_456] = (123_456.0, -50.0)
    kept = thin_points(points)
    assert len(kept) <= 1000
    assert kept == sorted(kept)
    assert {points[0], points[-1], (777_777.0, 50.0), (123_456.0, -50.0)} <= set(kept)
    assert set(kept) <= set(points)
    assert thin_points(points[:1000]) == points[:1000]


@pytest.mark.rest
def test_the_report_of_a_long_run_is_small(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.start()
    run.steps(1, 30_000, 1.0, each_s=0.001, losses={20_001: 99.0})
    html = render(read_facts(run.paths))
    assert len(html) < 400_000


def test_budgets_count_the_failures_of_the_newest_start(tmp_path: Path) -> None:
    failures, preemptions = budgets(read_facts(make_full_run(tmp_path).paths))
    assert (failures.used, failures.allowed, failures.ever) == (0, 5, 1)
    assert (preemptions.used, preemptions.allowed, preemptions.ever) == (0, None, 1)


def test_a_failure_of_storage_is_reported_and_charged_to_no_budget(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.start()
    done_s = run.steps(1, 100, 3.0)
    run.event("storage_failed", done_s, errors={"0": "StorageError: s3://b/part-0: timed out"}, step=100, left=0)
    done_s = run.steps(101, 200, done_s + 5, generation="1.2")
    run.event("finished", done_s)
    # The run had finished before this start.
    run.start(done_s + 10, fence=2)
    run.event("finished", done_s + 20, fence=2)
    facts = read_facts(run.paths)
    assert (
        facts.story == "1 failure of the storage; 2 workers throughout; nothing lost: 0 steps redone; back after 5.1 s"
    )
    numbers = {name: number for name, number, _ in counters(facts)}
    assert (numbers["failures of the storage"], numbers["driver restarts"]) == ("1", "0")
    message = "the storage failed at step 100, 0 workers left: StorageError: s3://b/part-0: timed out"
    assert message in [text for _, kind, text in happenings(facts) if kind == "storage failed"]
    page = render(facts)
    assert page.count(message) >= 3, "the failure is not in the table, next to the curve of workers and on the timeline"
    assert [budget.used for budget in budgets(facts)] == [0, 0]


def test_the_parts_of_the_time_sum_to_one(tmp_path: Path) -> None:
    facts = read_facts(make_full_run(tmp_path).paths)
    parts = time_parts(facts)
    assert sum(part for *_, part in parts) == pytest.approx(1)
    assert all(part >= 0 for *_, part in parts)
    assert parts[0][2] == facts.goodput


def test_many_classes_are_shown_as_lists_instead_of_a_matrix(tmp_path: Path) -> None:
    classes = by_class(read_facts(make_full_run(tmp_path, classes=60).paths))
    assert classes is not None
    assert (classes.matrix, len(classes.pairs), len(classes.per_class), classes.left_out) == ([], 25, 30, 30)
    assert classes.per_class[0][0] == "class 0", "the classes are not sorted by recall"
    assert classes.pairs[0][2] == 3


def test_a_malformed_confusion_matrix_is_left_out(tmp_path: Path) -> None:
    for number_, table in enumerate(([[1, 2]], [[1, "x"], [1, 2]], "text", [[1, 2], [3]], 7)):
        run = RunDirectory(tmp_path, f"run{number_}")
        run.evaluate(
            1, 1.0, {"accuracy": 1.0}, tables={"confusion_matrix": table, "f1": [1.0, None]}, classes=["a", "b"]
        )
        classes = by_class(read_facts(run.paths))
        assert classes is not None
        assert (classes.matrix, classes.per_class) == ([], [("a", [1.0]), ("b", [None])])


def step(number_: int, workers: int) -> StepRecord:
    return StepRecord(number_, 0, float(number_), 1.0, 0.1, 1.0, 1000.0, 0.0, workers, [8], [1], "1.1")


def test_one_line_describes_failures_and_changes_of_the_cluster() -> None:
    limits = FailureSection()
    calm = [step(1, 2), step(2, 2)]
    assert describe_cluster([], Course([], [], []), limits) == "nothing went wrong"
    assert describe_cluster([], Course(calm, [], calm), limits) == "nothing went wrong; 2 workers throughout"
    events = [
        Event("formed", 2.1, 1, {"lost_s": 2.05}),
        Event("failed", 2.2, 1, {"left": 1}),
        Event("resized", 3.0, 1, {}),
    ]
    records = [*calm, step(3, 1), step(4, 2)]
    line = "1 of 5 failures, 1 resize; workers 2 → 1 → 2; nothing lost: 0 steps redone; back after 950 ms"
    assert describe_cluster(events, Course(records, [], records), limits) == line
    assert "1 step redone" in describe_cluster(events, Course(records, [step(2, 2)], records), limits)
    # The records of steps that were done again may be lost with rank 0: nothing says then that none was.
    resumed = [*events, Event("resumed", 2.5, 1, {"step": 2, "source": "checkpoint"})]
    assert "nothing lost" not in describe_cluster(resumed, Course(records, [], records), limits)
    many = [step(i, 1 + i % 3) for i in range(1, 20)]
    assert (
        describe_cluster([], Course(many, [], many), limits) == "nothing went wrong; 18 changes between 1 and 3 workers"
    )


def test_the_clock_of_charts_leaves_out_pauses() -> None:
    clock = Clock([100.0, 500.0], [101.0, 130.0, 501.0, 520.0])
    assert [clock.at(t) for t in (100.0, 130.0, 500.0, 520.0)] == [0.0, 30.0, 30.0, 50.0]
    assert [(p.at_s, p.seconds, p.number) for p in clock.pauses] == [(30.0, 370.0, 2)]
    assert clock.end_s == 50.0


def test_a_system_clock_that_was_set_back_leaves_curves_monotonic(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.start()
    for first, ahead_s in ((1, 0.0), (21, 7200.0), (41, -7200.0), (61, 0.0)):
        run.steps(first, first + 19, ahead_s + first, each_s=1.0)
    facts = read_facts(run.paths)
    render(facts)
    times_s, speeds = zip(*rows_per_second_over_time(facts.records, facts.clock), strict=True)
    assert list(times_s) == sorted(times_s)
    width_s = times_s[1] - times_s[0]
    assert sum(speeds) * width_s == pytest.approx(sum(sum(r.rows) for r in facts.records[1:]))


def test_ticks_and_numbers_of_axes_are_rounded() -> None:
    assert ticks(0, 1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert whole_ticks(0, 2.2, 5) == [0, 1, 2]
    assert time_ticks(0, 400, 5) == [0, 120, 240, 360]
    assert log_ticks(0.02, 3, 7) == pytest.approx([0.1, 1.0])
    assert log_ticks(0.2, 3, 8) == pytest.approx([0.2, 0.5, 1.0, 2.0])
    assert [number(v) for v in (0, 0.25, 12345, 2.5e6, 1.5e-6)] == ["0", "0.25", "12.35k", "2.5M", "1.5e-6"]
    assert [number(v) for v in (9999.9, 999_999, -999_999, 999_999_999)] == ["10k", "1M", "-1M", "1G"]
    assert [seconds(v) for v in (0.9999, 59.4, 59.7, 3599.7)] == ["1 s", "59 s", "1 min", "1 h"]
    assert [seconds(v) for v in (0, 0.25, 2.5, 42.4, 200, 7500, 90000)] == [
        "0 s",
        "250 ms",
        "2.5 s",
        "42 s",
        "3 min 20 s",
        "2 h 5 min",
        "1 d 1 h",
    ]


def test_the_loss_curve_of_the_console_has_one_character_per_value(tmp_path: Path) -> None:
    assert sparkline([3, 2, 1, math.nan], "abc") == "cba"
    assert sparkline([], "abc") == ""
    assert sparkline([1e-4, 1e-2, 1.0], "abc") == "abc"
    assert sparkline([0.0, 1e-2, 1.0], "abc") == "aac"
    assert sparkline([1, 1], "abc") == "aa"
    assert len(smooth_points(np.array([(float(i), 1.0) for i in range(1000)]))) == 120
    run = RunDirectory(tmp_path)
    run.steps(1, 100, 0.0)
    facts = read_facts(run.paths)
    assert re.fullmatch(r"2\.3009 [▁▂▃▄▅▆▇█]{40} 1\.0196", format_loss_curve(facts, "utf-8"))
    assert format_loss_curve(facts, "ascii").isascii()
    assert Console().encoding


def test_the_report_command_prints_the_path_of_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_full_run(tmp_path)
    assert main(["--run", str(run.paths.root)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(run.paths.report)
    assert main(["--run", str(run.paths.root), "--out", str(tmp_path / "elsewhere" / "page.html")]) == 0
    assert (tmp_path / "elsewhere" / "page.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("path", ["", "nowhere", "run/config.yaml", "ftp://x"])
def test_a_path_that_is_not_a_run_directory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    make_full_run(tmp_path)
    assert main(["--run", path if "://" in path else str(tmp_path / path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("ConfigError: ")
    assert {
        "": "Folders in it: before, run.",
        "nowhere": "no subfolders",
        "run/config.yaml": "is a file",
        "ftp://x": "s3://",
    }[path] in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["before", "run"]


def test_a_failure_to_write_the_report_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make_full_run(tmp_path)
    next(iter(run.paths.metrics.iterdir())).write_text(json.dumps({"step": [1]}))
    assert report_end(run.paths) is None
    assert "The report could not be written: ConfigError" in caplog.text
    assert ".json is damaged: " in caplog.text
    assert report_end(RunPaths(tmp_path / "nowhere")) is None


def test_the_report_hides_secrets(tmp_path: Path) -> None:
    secret = "hunter2-and-then-some"
    run = RunDirectory(tmp_path, task__init_args={"api_key": secret}, data__path="s3://me:password99@bucket/x")
    run.start()
    run.event("failed", 1.0, number=1, errors={"0": f"refused: {secret}"}, step=0, left=0)
    html = render(read_facts(run.paths))
    assert "task.init_args.api_key" in html
    assert "hunter2" not in html
    assert "password99" not in html


def test_the_report_says_which_process_noticed_the_loss_of_the_driver(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.start()
    run.steps(1, 20, 1.0)
    run.event("driver_lost", 9.0, status="interrupted", step=0, noticed_by="process 1 on here")
    assert read_facts(run.paths).status == "interrupted"
    assert "noticed by process 1 on here" in page_of(run).text
