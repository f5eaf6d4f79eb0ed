"""The source files, libraries and defaults that a run was started with, and the report of their changes."""

from __future__ import annotations

import importlib
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_app.config.config import Config, digest, flatten, from_yaml
from ray_app.errors import RunExistsError
from ray_app.preflight.changes import (
    CodeVersions,
    compare_code,
    describe_code_changes,
    fill_defaults,
    read_code_versions,
    read_stored_code,
    store_code,
)
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.stored_config import read_config

TASK = """
from ray_app.task.tabular import TabularRegression
from mine_of_code.helper import SMOOTHING

class Mine(TabularRegression):
    def __init__(self, target: str = "y", width: int = 3, secret: object = object()) -> None:
        super().__init__(target)
"""


@pytest.fixture
def write_user_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Returns a function that writes a package with a task of the user."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(helper: str = "SMOOTHING = 0.0\n") -> Path:
        folder = tmp_path / "mine_of_code"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("")
        (folder / "task.py").write_text(TASK)
        (folder / "helper.py").write_text(helper)
        for name in [name for name in sys.modules if name.startswith("mine_of_code")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        return folder

    return make


def config_of(class_path: str = "mine_of_code.task.Mine") -> Config:
    return Config().replace(task__class_path=class_path, data__path="data")


def test_the_code_versions_cover_the_files_that_the_task_imports(write_user_package: Callable[..., Path]) -> None:
    write_user_package()
    first = read_code_versions(config_of())
    assert set(first.files) == {"mine_of_code", "mine_of_code.task", "mine_of_code.helper"}
    assert {"python", "ray_app", "torch", "numpy"} <= first.versions.keys()
    write_user_package("SMOOTHING = 0.1\n")
    second = read_code_versions(config_of())
    other = replace(second, versions=second.versions | {"torch": "1.0"})
    assert compare_code(first, other) == [
        "the content of mine_of_code.helper changed",
        f"torch {first.versions['torch']} -> 1.0",
    ]
    assert compare_code(first, first) == []


def test_changed_code_is_refused_or_described_as_configured(
    write_user_package: Callable[..., Path], tmp_path: Path
) -> None:
    write_user_package()
    paths, config = RunPaths(tmp_path / "run"), config_of()
    paths.config.parent.mkdir()
    assert describe_code_changes(paths, config, read_code_versions(config)) == [], (
        "a run of an earlier version has no record of its code"
    )
    paths.config.write_text(fill_defaults(config)[0].to_yaml())
    store_code(paths, read_code_versions(config))
    assert describe_code_changes(paths, config, read_code_versions(config)) == []
    write_user_package("SMOOTHING = 0.1\n")
    assert describe_code_changes(paths, config, read_code_versions(config)) == [
        "the content of mine_of_code.helper changed"
    ]
    with pytest.raises(RunExistsError, match=r"(?s)started with different code.*- the content of"):
        describe_code_changes(paths, config.replace(run__changed="refuse"), read_code_versions(config))
    values = yaml.safe_load(paths.config.read_text())
    values["optimizer"]["init_args"]["lr"] = 0.5
    paths.config.write_text(yaml.safe_dump(values))
    changes = describe_code_changes(paths, config, read_code_versions(config))
    assert "the default of optimizer.init_args.lr was 0.5, is 0.001" in changes


def test_classes_without_a_source_file_have_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tmp_path / "packed.zip"
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("zipped_of_code.py", TASK.replace("from mine_of_code.helper import SMOOTHING", ""))
    monkeypatch.syspath_prepend(str(packed))
    assert list(read_code_versions(config_of("zipped_of_code.Mine")).files) == ["zipped_of_code"]

    digests = []
    # The cells of a notebook have no source file.
    for smoothing in (0.0, 0.1, 0.1):
        cell = f"class Cell:\n    def loss(self):\n        return {smoothing}\n"
        exec(compile(cell, "<cell>", "exec"), vars(sys.modules["__main__"]))
        monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
        digests.append(read_code_versions(config_of("__main__.Cell")).files)
    assert digests[0].keys() == {"__main__"}
    assert digests[1] == digests[2] != digests[0]


@pytest.mark.parametrize(
    "settings",
    [
        {
            "optimizer": {
                "class_path": "torch.optim.SGD",
                "init_args": {"lr": 0.1},
                "groups": [{"names": ["*.bias"], "lr": 0.2}],
            }
        },
        {
            "optimizer": None,
            "optimizers": {
                "one": {
                    "class_path": "torch.optim.Adam",
                    "parameters": ["a.*"],
                    "steps": 3,
                    "groups": [{"norms_and_biases": True}],
                },
                "two": {
                    "class_path": "torch.optim.SGD",
                    "parameters": ["b.*"],
                    "schedule": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 3}},
                },
            },
        },
    ],
)
def test_the_stored_configuration_contains_all_optimizer_settings(
    settings: dict[str, Any], write_user_package: Callable[..., Path], tmp_path: Path
) -> None:
    write_user_package()
    config = config_of().replace(**settings)
    complete, names = fill_defaults(config)
    paths = RunPaths(tmp_path / "run")
    paths.config.parent.mkdir()
    paths.config.write_text(complete.to_yaml())
    store_code(paths, read_code_versions(config))
    assert read_config(paths) == config
    assert digest(read_config(paths), "data") == digest(config, "data")
    if "optimizers" in settings:
        assert {"optimizers.one.init_args.betas", "optimizers.two.schedule.init_args.gamma"} <= set(names)


def test_the_stored_configuration_has_all_defaults_and_the_original_digest(
    write_user_package: Callable[..., Path], tmp_path: Path
) -> None:
    write_user_package()
    config = config_of().replace(
        optimizer={"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001}},
        schedule={
            "class_path": "torch.optim.lr_scheduler.ChainedScheduler",
            "init_args": {
                "schedulers": [{"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 3}}]
            },
        },
    )
    complete, names = fill_defaults(config)
    text = complete.to_yaml()
    stored = flatten(from_yaml(text).to_dict())
    assert stored["optimizer.init_args.betas"] == [0.9, 0.999]
    assert (stored["task.init_args.width"], "task.init_args.secret" in stored) == (3, False)
    assert stored["schedule.init_args.schedulers"][0]["init_args"] == {"step_size": 3, "gamma": 0.1, "last_epoch": -1}
    assert "schedule.init_args.schedulers.0.init_args.gamma" in names
    assert "optimizer.init_args.lr" not in names

    paths = RunPaths(tmp_path / "run")
    paths.config.parent.mkdir()
    paths.config.write_text(text)
    store_code(paths, read_code_versions(config))
    assert read_config(paths) == config
    assert digest(read_config(paths), "data") == digest(config, "data")
    assert read_config(paths, with_defaults=True) == complete
    store_code(paths, CodeVersions({}, {}))
    assert (read_stored_code(paths) or CodeVersions({}, {})).defaults == names, (
        "config.yaml stays as the first start wrote it, so the defaults stay too"
    )
