"""Settings of a version and of a run are data: what they name is imported only if the configuration names it, too."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ray_app.task
from ray_app import load_config, load_for_training, load_model
from ray_app.checkpoint.format import params_digest
from ray_app.driver.trained_run import load_trained_task
from ray_app.errors import ConfigError
from ray_app.models import loader
from ray_app.models.export import write_export
from ray_app.predict.predict import model_of_package
from ray_app.preflight.inputs import make_task
from ray_app.retrain.gate import PackageFiles
from ray_app.runlog.paths import RunPaths
from ray_app.task.base import Task
from ray_app.task.module import ModuleTask
from tests.support.paths import ROOT

LINEAR = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 1, "out_features": 2}}
LOSS = {"class_path": "torch.nn.CrossEntropyLoss"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "ModuleTask": {"model": LINEAR, "inputs": ["x"], "target": "y", "loss": LOSS},
    "LightningTask": {"module": LINEAR, "batch": ["x", "y"], "target": "y"},
    "LoopTask": {"train": "script.train", "module": LINEAR, "rows": ["x", "y"], "target": "y"},
    "KerasTask": {"model": "program.make", "inputs": "x", "target": "y"},
    "ObjectDetection": {"detector": LINEAR},
    "CausalLanguageModel": {"model": LINEAR},
}
"""Arguments of the tasks that need some."""


def task_classes() -> Iterator[type[Task]]:
    """Yields all tasks of ray_app that can be made."""
    for module in pkgutil.walk_packages(ray_app.task.__path__, "ray_app.task."):
        for kind in vars(importlib.import_module(module.name)).values():
            is_task = isinstance(kind, type) and issubclass(kind, Task) and kind.__module__ == module.name
            if is_task and not inspect.isabstract(kind):
                yield kind


TASKS = sorted(task_classes(), key=lambda kind: kind.__qualname__)


@pytest.fixture
def executed_marker(tmp_path: Path) -> Path:
    return tmp_path / "it ran"


def hostile(marker: Path) -> dict[str, Any]:
    return {"class_path": "os.mkdir", "init_args": {"path": str(marker)}}


def changes(value: Any, spec: Any) -> Iterator[Any]:
    """Yields a value with a specification in its place, inside it, and at each place in it."""
    yield from (spec, [spec], {"x": spec}, {"x": [{"y": spec}]})
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        for changed in changes(inner, spec):
            outer = copy.copy(value)
            outer[key] = changed
            yield outer


@pytest.mark.parametrize("kind", TASKS, ids=lambda kind: kind.__qualname__)
def test_no_setting_of_a_task_brings_code(kind: type[Task], executed_marker: Path) -> None:
    """Every setting, and every argument, is changed in turn, at each place in it; words that are data stay data."""
    task = kind(**ARGUMENTS.get(kind.__qualname__, {}))
    stored = json.loads(json.dumps(vars(task)))
    words = {"classes": ["os.mkdir", "class_path"], "kinds": {"class_path": "number"}, "fitted": {"of": "os.mkdir"}}
    assert vars(task.restore(stored | words, "It")) == stored | words
    for name in [*stored, *inspect.signature(kind).parameters, "of_nobody"]:
        for changed in changes(stored.get(name), hostile(executed_marker)):
            with pytest.raises(ConfigError, match="none of its code was executed"):
                task.restore(stored | {name: changed}, "It")
    for name in kind.functions:
        with pytest.raises(ConfigError, match=f"its task has {name} = "):
            task.restore(stored | {name: "os.mkdir"}, "It")
    for name in stored:
        if "class_path" in str(stored[name]):
            with pytest.raises(ConfigError, match=f"its task has {name} = None"):
                task.restore({key: value for key, value in stored.items() if key != name}, "It")
    assert not executed_marker.exists()


def test_arguments_of_libraries_are_those_of_the_configuration() -> None:
    """LoRA's `megatron_core` names a module that peft imports."""
    [kind] = [kind for kind in TASKS if kind.__qualname__ == "CausalLanguageModel"]
    task = kind(model=LINEAR)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="its task has lora = "):
        task.restore(vars(task) | {"lora": {"megatron_config": {}, "megatron_core": "evil"}}, "It")


def test_arguments_that_are_imported_are_listed_as_functions() -> None:
    """`load_class(self.x)` imports a text, which `Task.restore` knows to be code by `functions` alone."""
    for kind in TASKS:
        for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(kind)))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "load_class":
                argument = ast.unparse(node.args[0])
                assert (
                    not argument.startswith("self.")
                    or argument == "self.model['class_path']"
                    or any(argument == f"self.{name}" for other in TASKS for name in other.functions)
                ), argument


# The ways on which settings of a file reach a task.


@pytest.fixture(params=["torch.export", "safetensors"])
def export(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns an export of a task of a model, in each format."""
    task = ModuleTask(LINEAR, ["x"], "y", LOSS)
    task.kinds, task.activation = {"x": "number", "y": "integer"}, "softmax"
    with monkeypatch.context() as patch:
        if request.param == "safetensors":
            patch.setattr(torch.export, "export", lambda *_, **__: 1 / 0)
        rows = {"x": np.ones((2, 1), np.float32), "y": np.zeros(2, np.int64)}
        model = task.build_model()
        described = write_export(
            task,
            model,
            rows,
            tmp_path / "export",
            {"run": "r", "step": 1, "params_digest": params_digest(dict(model.state_dict()))},
        )
    assert described["format"] == request.param
    return tmp_path / "export"


def with_settings(export: Path, settings: dict[str, Any]) -> None:
    """Changes the settings in an export, as an attacker does: without digests."""
    (export / "export.json").unlink()
    for name in ("package.json", "task.json"):
        file = export / "data" / "model" / name
        if file.exists():
            described = json.loads(file.read_text())
            (described["task"] if name == "package.json" else described)["settings"] |= settings
            file.write_text(json.dumps(described))


def predict(export: Path) -> None:
    fields = {"task__class_path": "ray_app.task.module.ModuleTask", "data__path": "x"}
    arguments = {"model": LINEAR, "inputs": ["x"], "target": "y", "loss": LOSS}
    config = load_config(ROOT / "conf" / "digits.yaml").replace(**fields, task__init_args=arguments)
    model, _, _ = model_of_package(config, str(export))
    model.load(torch.device("cpu"))
    model.task.decode({"x": np.ones(1, np.float32), "y": np.zeros(1, np.int64)})


def gate(export: Path) -> None:
    files = {file.name: file.read_bytes() for file in (export / "data" / "model").iterdir()}
    task = ModuleTask(LINEAR, ["x"], "y", LOSS)
    task.fitted = {"of": "this data"}
    package = PackageFiles("champion", files, task)
    package.load(torch.device("cpu"))
    package.restore().decode({"x": np.ones(1, np.float32), "y": np.zeros(1, np.int64)})


WAYS: dict[str, Callable[[Path], Any]] = {
    "predict": predict,
    "gate": gate,
    "load_model": lambda export: load_model(export).predict({"x": np.ones((1, 1), np.float32)}),
    "load_for_training": load_for_training,
}


@pytest.mark.parametrize("name", ["model", "evaluate_transforms"])
@pytest.mark.parametrize("way", WAYS)
def test_a_version_with_other_settings_runs_nothing(export: Path, executed_marker: Path, way: str, name: str) -> None:
    if way in ("predict", "gate"):
        WAYS[way](export)
    spec = hostile(executed_marker)
    with_settings(export, {name: spec if name == "model" else [spec]})
    is_exported = (export / "data" / "model" / loader.EXPORTED).exists()
    if way == "load_model" and is_exported:
        WAYS[way](export)
    else:
        with pytest.raises(ConfigError, match=r"none of its code was executed|but .* was trained with"):
            WAYS[way](export)
    if not is_exported:
        with pytest.raises(ValueError, match="trust=True"):
            loader.load(export / "data" / "model")
    assert not executed_marker.exists()


def test_the_settings_that_a_run_keeps_bring_no_code(tmp_path: Path, executed_marker: Path) -> None:
    """`task.json` in a run's directory is data, other than its `config.yaml`."""
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    config = load_config(ROOT / "conf" / "digits.yaml")
    paths.config.write_text(config.to_yaml())
    task = make_task(config)
    settings = json.loads(json.dumps(vars(task)))
    paths.task.write_text(json.dumps(settings | {"classes": ["a"]}))
    assert load_trained_task(paths, config, task).classes == ["a"]
    paths.task.write_text(json.dumps(settings | {"transforms": [hostile(executed_marker)]}))
    with pytest.raises(ConfigError, match=r"task\.json is refused"):
        load_trained_task(paths, config, task)
    assert not executed_marker.exists()


def test_the_code_of_a_version_is_importable_only_with_trust(export: Path) -> None:
    """A file in `code/` would otherwise stand in for an optional library that is not installed."""
    before = list(sys.path)
    predict(export)
    assert sys.path == before
