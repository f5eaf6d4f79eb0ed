"""`~` in a path of a configuration or a command is the home folder."""

from pathlib import Path
from typing import Any

import pytest

from ray_app.cli.report import main
from ray_app.config.config import Config, default_tracking_uri, expand_home
from ray_app.driver.parsing import load_config, parse_with_sections
from ray_app.predict.predict import PredictSection
from ray_app.storage.files import to_location
from tests.support.run_directory import RunDirectory

TASK = ["--task.class_path=ray_app.task.tabular.TabularRegression"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "field", ["run__storage_path", "data__path", "data__eval_path", "data__cache_dir", "train__init_from"]
)
def test_a_path_of_the_configuration_is_expanded(home: Path, field: str) -> None:
    section, name = field.split("__")
    assert getattr(getattr(Config().replace(**{field: "~/a/b"}), section), name) == str(home / "a/b")


def test_paths_of_a_file_and_of_a_command_line_are_expanded(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(
        "task: {class_path: ray_app.task.tabular.TabularRegression}\nrun: {storage_path: ~/runs}\ndata: {path:"
        " ~/data}\n"
    )
    config = load_config(file, tracking__uri="sqlite:///~/m.db")
    assert (config.run.storage_path, config.data.path) == (str(home / "runs"), str(home / "data"))
    assert default_tracking_uri(config) == f"sqlite:///{home}/m.db"
    arguments = [*TASK, "--data.path=~/d", "--predict.data=~/rows", "--predict.out=~/out", "--predict.run=~/runs/a"]
    section: Any = parse_with_sections(arguments, {"predict": PredictSection}, "ray-app predict", False)[1]["predict"]
    assert (section.data, section.out, section.run) == (str(home / "rows"), str(home / "out"), str(home / "runs/a"))


def test_paths_in_class_arguments_are_expanded_and_other_texts_are_not(home: Path) -> None:
    arguments = {"a": ["~/x", {"b": "~/y"}], "c": "~", "d": "~x", "e": "a ~/b", "f": 3, "g": "s3://b/~/x"}
    assert expand_home(arguments) == arguments | {"a": [str(home / "x"), {"b": str(home / "y")}]}


def test_paths_given_to_commands_are_expanded(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert to_location("~/runs/a") == home.resolve() / "runs/a"
    assert to_location("~") == home.resolve()
    run = RunDirectory(home / "runs")
    run.start()
    run.end(1.0)
    assert main(["--run=~/runs/run", "--out=~/page.html"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(home.resolve() / "page.html")
    assert (home / "page.html").exists()
