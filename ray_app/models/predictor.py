"""Prediction with an export: from images, rows and texts to names of classes, with plain arrays as the other way.

The task of a package is made again from its settings, which are data: only tasks of ray_app, and only with transforms
of torchvision, so that nothing that a package names is imported besides these.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from torch import nn

from ray_app.config.import_paths import iter_class_paths, load_class
from ray_app.errors import DataError
from ray_app.models import loader
from ray_app.models.inputs import decode_inputs, is_one_row
from ray_app.task.base import Task
from ray_app.task.ragged import to_batch
from ray_app.task.texts import TOKENIZER_FILE, TextEncoder

_TASKS = (
    "ray_app.task.detection.ObjectDetection",
    "ray_app.task.image.ImageClassification",
    "ray_app.task.image.TutorialCnn",
    "ray_app.task.language_model.CausalLanguageModel",
    "ray_app.task.module.ModuleTask",
    "ray_app.task.tabular.TabularClassification",
    "ray_app.task.tabular.TabularRegression",
)
"""Tasks of which `decode`, `predictions` and `answers` execute nothing that the settings name, but transforms."""
_TRANSFORM = re.compile(r"torchvision\.transforms(\.v2)?\.[A-Z]\w*")
_MODULE_TASK = "ray_app.task.module.ModuleTask"


class ModelPredictor:
    """Predicts with a loaded model.

    Args:
        arrays: Predicts from arrays to arrays.
        task: The task of the model; None if it is not made again.
        reason: Why the task is missing, as a sentence.
        texts: Encodes texts, where the model was trained on those of a tokenizer.
    """

    def __init__(self, arrays: loader.Predictor, task: Task | None, reason: str, texts: TextEncoder | None) -> None:
        self._arrays, self._task = arrays, task
        self._reason, self._texts = reason, texts

    @property
    def module(self) -> nn.Module:
        """The model in plain PyTorch, which takes the inputs of the package as tensors."""
        return self._arrays.module

    def predict(self, data: Any, scores: bool = False) -> Any:
        """Predicts one input, or several.

        Args:
            data: An image (path, bytes, image of Pillow, uint8 array of height, width and channels), a list of images,
                or a folder of them; a row of a table as a dictionary, or rows as a table of pandas, Polars or Arrow, a
                dictionary of sequences, or a list of dictionaries; a text or a list of texts; the path of a Parquet
                data set; or decoded fields as arrays, by name if there are several.
            scores: Whether to return the outputs of the model.

        Returns:
            The answer to one input; a list of answers to several. For a classification an answer is a dictionary with
            `label`, `probability`, and `probabilities` by class; for labels that do not exclude each other with
            `labels`, those above 0.5, and `probabilities`; for a regression a number; for a detection a list of
            objects, each with `label`, `probability` and `box` (left, top, right, bottom in pixels); for other tasks
            what `Task.answers` returns. With `scores`, and for a task of a class that is not part of ray_app, the
            outputs as an array (rows, ...), or a dictionary of arrays.

        Warns:
            UserWarning: See `loader.Predictor.predict`.

        Raises:
            DataError: An input cannot be decoded; the message names the file.
            ValueError: An array or a row does not match the input of the model.
        """
        if self._task is None:
            self._refuse_undecoded(data)
            return self._arrays.predict(data)
        if self._task.encoding is not None and not isinstance(data, str | Path):
            tensors, is_single = self._arrays.tensors(data), is_one_row(data)
        elif self._takes(data):
            tensors, is_single = self._arrays.tensors(data), False
        else:
            decoded = decode_inputs(self._task, data, self._texts)
            batch = to_batch(decoded.fields)
            inputs = {spec["name"]: batch[spec["name"]].numpy() for spec in self._arrays.inputs}
            tensors, is_single = self._arrays.tensors(inputs), decoded.is_single
        outputs = self._arrays.outputs(tensors)
        if scores:
            return loader.to_arrays(outputs)
        answers = self._task.answers(outputs[""] if list(outputs) == [""] else outputs, tensors)
        return answers[0] if is_single else answers

    def _takes(self, data: Any) -> bool:
        """Returns whether data is decoded already: an array of the shape of each input of the model."""
        inputs = self._arrays.inputs
        if not loader.is_by_name(data):
            return len(inputs) == 1 and _has_shape(data, inputs[0]["shape"])
        return all(spec["name"] in data and _has_shape(data[spec["name"]], spec["shape"]) for spec in inputs)

    def _refuse_undecoded(self, data: Any) -> None:
        items = data if isinstance(data, list | tuple) else [data]
        if any(isinstance(one, str | bytes | Path) or hasattr(one, "getexif") for one in items):
            raise DataError(
                f"predict got {type(data).__name__}, but {self._reason} {self._arrays.describe_allowed()} Or use"
                " result.predict or ray-app predict --predict.run, which decode with the task's code."
            )


def _has_shape(values: Any, shape: list[int]) -> bool:
    actual = getattr(values, "shape", None)
    if actual is None or isinstance(values, str | bytes) or len(actual) != len(shape) + 1:
        return False
    return all(length in (-1, size) for length, size in zip(shape, actual[1:], strict=True))


def make_predictor(data: Path, described: dict[str, Any], arrays: loader.Predictor) -> ModelPredictor:
    """Makes the predictor of a package.

    Args:
        data: The folder with `package.json`.
        described: The content of `package.json`.
    """
    file = data / TOKENIZER_FILE
    texts = TextEncoder(**json.loads(file.read_text())) if file.is_file() else None
    # The code of a package with a file for each module has run already; its own task is at hand.
    task = getattr(arrays.module, "task", None)
    reason = "" if task is not None else _why_no_task(described["task"])
    if task is None and not reason:
        settings = dict(described["task"]["settings"])
        if described["task"]["class_path"] == _MODULE_TASK:
            # Otherwise the task would make its loss, an object of any class, to know it.
            settings["activation"] = settings.get("activation") or "none"
        task = load_class(described["task"]["class_path"]).from_settings(settings)
    return ModelPredictor(arrays, task, reason, texts)


def _why_no_task(stored: dict[str, Any]) -> str:
    """Returns why the task of a package is not made again, as the end of a sentence; "" if it can be."""
    if stored["class_path"] not in _TASKS:
        return f"the model has the task {stored['class_path']}, but loading a package runs no code that it names."
    if not isinstance(stored["settings"], dict):
        return "the package lacks the settings of its task: JSON cannot store them, or one is a secret."
    paths = iter_class_paths("", stored["settings"].get("evaluate_transforms"))
    if foreign := [path for _, _, path in paths if not _TRANSFORM.fullmatch(path)]:
        return (
            f"its evaluate_transforms name {foreign[0]}, but loading a package runs no code that it names, except"
            " transforms of torchvision."
        )
    return ""


def names_code(stored: dict[str, Any]) -> bool:
    """Whether a stored task is of another class than those above, or its settings name import paths."""
    return stored["class_path"] not in _TASKS or any(iter_class_paths("", stored["settings"]))
