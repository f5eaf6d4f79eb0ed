"""Runs side by side, and one run, as notebooks show them."""

from __future__ import annotations

from pathlib import Path

import pytest

import ray_app
from ray_app import compare_runs
from ray_app.errors import ConfigError
from ray_app.report.comparison import run_cell
from ray_app.report.facts import read_facts
from tests.support.made_run import MadeRun, full_run


def two_runs(folder: Path) -> list[Path]:
    for name, rate, accuracy in (("slow", 0.001, 0.91), ("fast", 0.1, 0.97)):
        run = MadeRun(
            folder, name, optimizer__init_args={"lr": rate}, tracking__uri=f"http://user:hunter2-{name}@mlflow"
        )
        run.start()
        run.steps(1, 30, 3.0)
        run.evaluate(10, 5.0, {"accuracy": 0.5, "loss": 1.0})
        run.evaluate(30, 7.0, {"accuracy": accuracy, "loss": 0.3})
        run.end(8.0)
    return [folder / "slow", folder / "fast"]


def test_runs_are_compared_in_what_came_of_them_and_what_was_configured_otherwise(tmp_path: Path) -> None:
    comparison = compare_runs(two_runs(tmp_path))
    slow, fast = comparison.rows
    assert list(slow) == list(fast)
    assert (slow["run"], slow["best accuracy"], slow["at step"]) == ("slow", 0.91, 30)
    assert (fast["run"], fast["best accuracy"], fast["optimizer.init_args.lr"]) == ("fast", 0.97, "0.1")
    assert slow["optimizer.init_args.lr"] == "0.001"
    assert slow["workers"] == "2"
    assert [name for name in slow if "." in name] == ["optimizer.init_args.lr"]
    assert "0.9700" in repr(comparison).splitlines()[2]


def test_a_comparison_shows_a_curve_of_each_run_and_no_secret(tmp_path: Path) -> None:
    page = compare_runs(two_runs(tmp_path))._repr_html_()
    assert page.count("<svg") == 4  # loss and accuracy, for wide and narrow pages
    assert page.count('class="curve blue"') == page.count('class="curve orange"') == 4
    assert "hunter2" not in page


def test_runs_that_have_not_begun_are_compared_too(tmp_path: Path) -> None:
    MadeRun(tmp_path, "empty")
    comparison = compare_runs([tmp_path / "empty"])
    assert comparison.rows[0]["steps"] == 0
    assert comparison.rows[0]["best loss"] is None
    assert "<svg" not in comparison._repr_html_()


@pytest.mark.parametrize("runs", [[], "runs/one"])
def test_what_is_no_list_of_runs_is_refused(runs: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"give a list of results or of run directories"):
        compare_runs(runs)


def test_a_run_is_shown_with_the_style_of_the_report_for_itself_alone(tmp_path: Path) -> None:
    text = '<script>alert("x")</script>'
    shown = run_cell(read_facts(full_run(tmp_path, text=text).paths))
    assert text not in shown
    assert "<script" not in shown
    assert "accuracy" in shown
    style = shown[shown.index("<style>") + 7 : shown.index("</style>")].strip()
    assert style.startswith(".ray-app {")
    assert style.endswith("}")
    assert ":root" not in style
    assert style.count("{") == style.count("}")


def test_secrets_of_a_run_are_hidden_where_it_is_shown(tmp_path: Path) -> None:
    secret = "a-key-that-nobody-sees"
    run = full_run(tmp_path, text=f"refused: {secret}", task__init_args={"api_key": secret})
    shown = run_cell(read_facts(run.paths))
    assert "refused: " in shown
    assert secret not in shown


def test_every_public_name_is_there() -> None:
    assert all(getattr(ray_app, name) is not None for name in ray_app.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trainer'"):
        _ = ray_app.trainer
