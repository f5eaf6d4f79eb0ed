"""Private names of Keras are in one module, and the installed version has them."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest
import torch

from ray_app.task.keras import library
from tests.support.paths import ROOT

keras = library.import_keras()
PACKAGE = sorted((ROOT / "ray_app" / "task" / "keras").glob("*.py"))
WITH_PRIVATE_NAMES = ("copies.py", "library.py")
CODE = "\n".join((PACKAGE[0].parent / name).read_text() for name in WITH_PRIVATE_NAMES)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_attributes(code: str) -> set[tuple[str, str]]:
    """Returns the private attributes of objects other than `self` and `cls`, each with the expression of its object."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        owner, name = None, ""
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
            owner, name = node.args[0], ast.unparse(node.args[1]).strip("'")
        if owner is not None and is_private(name) and ast.unparse(owner) not in ("self", "cls"):
            names.add((ast.unparse(owner), name))
    return names


def defined_names(code: str) -> set[str]:
    """Returns the names of functions that code defines."""
    return {node.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)}


def test_private_names_of_keras_are_only_in_two_modules() -> None:
    """Only these files are then compared with a new version of Keras."""
    functions = {name for file in PACKAGE for name in defined_names(file.read_text())}
    functions |= defined_names((ROOT / "ray_app" / "task" / "module.py").read_text())
    functions.add("_orig_mod")  # PyTorch's
    names_of = {
        file.name: names
        for file in PACKAGE
        if (names := {name for _, name in private_attributes(file.read_text())} - functions)
    }
    assert set(names_of) == set(WITH_PRIVATE_NAMES), names_of


@pytest.fixture(scope="module")
def objects() -> dict[str, list[Any]]:
    """Objects of a compiled model after a batch, by the names that `library` has for them."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
    from keras.src.utils.backend_utils import DynamicBackend

    inputs = keras.Input((4,))
    layer = keras.layers.Dense(3)
    model = keras.Model(inputs, keras.layers.Dropout(0.1)(layer(inputs)))
    model.compile("adam", "mse", metrics=["accuracy"], weighted_metrics=["mae"])
    model.train_on_batch(torch.ones(2, 4), torch.ones(2, 3))
    model.optimizer.exclude_from_weight_decay(var_names=["bias"])
    metrics = [metric for metric in model.metrics if metric.name != "loss"]
    return {
        "program": [model],
        "layer": [layer],
        "variable": [layer.kernel],
        "optimizer": [model.optimizer],
        "metric": [*metrics, keras.metrics.CategoricalAccuracy()],
        "graph": [model],
        "obj": [model.optimizer, DynamicBackend()],
        "value": [keras.losses.Huber()],
        "adapter": [ArrayDataAdapter(np.ones(2))],
    }


@pytest.mark.parametrize(("owner", "name"), sorted(private_attributes(CODE)))
def test_every_private_name_of_keras_exists(objects: dict[str, list[Any]], owner: str, name: str) -> None:
    first, *rest = owner.split(".")
    candidates = objects[first]
    for part in rest:
        candidates = [getattr(one, part) for one in candidates]
    assert any(hasattr(one, name) for one in candidates), f"Keras {keras.__version__} has no {owner}.{name}"


def test_there_are_as_many_private_names_as_the_module_uses() -> None:
    assert len(private_attributes(CODE)) >= 20


def test_the_attributes_of_a_thread_exist() -> None:
    state = library.global_state()
    keras.layers.Dense(3)
    keras.random.normal((2,))
    assert state.get_global_attribute(library._NAME_COUNTERS)["dense"] > 0
    assert isinstance(state.get_global_attribute(library._GLOBAL_GENERATOR), keras.random.SeedGenerator)
