"""The comparison of runs, and one run, as notebooks show them."""

from __future__ import annotations

from pathlib import Path

import pytest

import ray_app
from ray_app import compare_runs
from ray_app.errors import ConfigError
from ray_app.report.facts import read_facts
from ray_app.report.html import run_cell
from tests.support.run_directory import RunDirectory, make_full_run


def make_two_runs(folder: Path) -> list[Path]:
    for name, rate, accuracy in (("slow", 0.001, 0.91), ("fast", 0.1, 0.97)):
        run = RunDirectory(
            folder, name, optimizer__init_args={"lr": rate}, tracking__uri=f"http://user:hunter2-{name}@mlflow"
        )
        run.start()
        run.steps(1, 30, 3.0)
        run.evaluate(10, 5.0, {"accuracy": 0.5, "loss": 1.0})
        run.evaluate(30, 7.0, {"accuracy": accuracy, "loss": 0.3})
        run.end(8.0)
    return [folder / "slow", folder / "fast"]


def test_a_comparison_has_results_and_the_fields_in_which_runs_differ(tmp_path: Path) -> None:
    comparison = compare_runs(make_two_runs(tmp_path))
    slow, fast = comparison.rows
    assert list(slow) == list(fast)
    assert (slow["run"], slow["best accuracy"], slow["at step"]) == ("slow", 0.91, 30)
    assert (fast["run"], fast["best accuracy"], fast["optimizer.init_args.lr"]) == ("fast", 0.97, "0.1")
    assert slow["optimizer.init_args.lr"] == "0.001"
    assert slow["workers"] == "2"
    assert [name for name in slow if "." in name] == ["optimizer.init_args.lr"]
    assert "0.9700" in repr(comparison).splitlines()[2]


def test_a_comparison_shows_a_curve_of_each_run_and_no_secret(tmp_path: Path) -> None:
    page = compare_runs(make_two_runs(tmp_path))._repr_html_()
    # Loss and accuracy are drawn for wide and for narrow pages.
    assert page.count("<svg") == 4
    assert page.count('class="curve blue"') == page.count('class="curve orange"') == 4
    assert "hunter2" not in page


def test_runs_without_steps_are_compared(tmp_path: Path) -> None:
    RunDirectory(tmp_path, "empty")
    comparison = compare_runs([tmp_path / "empty"])
    assert comparison.rows[0]["steps"] == 0
    assert comparison.rows[0]["best loss"] is None
    assert "<svg" not in comparison._repr_html_()


@pytest.mark.parametrize("runs", [[], "runs/one"])
def test_an_argument_that_is_not_a_list_of_runs_is_refused(runs: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"pass a list of results or run directories"):
        compare_runs(runs)


def test_the_notebook_cell_of_a_run_limits_the_style_of_the_report_to_itself(tmp_path: Path) -> None:
    text = '<script>alert("x")</script>'
    cell_html = run_cell(read_facts(make_full_run(tmp_path, text=text).paths))
    assert text not in cell_html
    assert "<script" not in cell_html
    assert "accuracy" in cell_html
    style = cell_html[cell_html.index("<style>") + 7 : cell_html.index("</style>")].strip()
    assert style.startswith(".ray-app {")
    assert style.endswith("}")
    assert ":root" not in style
    assert style.count("{") == style.count("}")


def test_the_notebook_cell_of_a_run_hides_secrets(tmp_path: Path) -> None:
    secret = "a-key-that-nobody-sees"
    run = make_full_run(tmp_path, text=f"refused: {secret}", task__init_args={"api_key": secret})
    cell_html = run_cell(read_facts(run.paths))
    assert "refused: " in cell_html
    assert secret not in cell_html


def test_each_public_name_of_the_package_exists() -> None:
    assert all(getattr(ray_app, name) is not None for name in ray_app.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trainer'"):
        _ = ray_app.trainer
