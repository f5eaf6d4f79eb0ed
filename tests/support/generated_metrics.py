"""Metrics of torchmetrics drawn from a grammar, as a configuration of `ray_app` and updated once with all rows."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchmetrics
import torchmetrics.detection
import torchmetrics.text
from torch import Tensor, nn
from torchmetrics import classification, regression, retrieval

from ray_app.config.import_paths import load_class
from ray_app.errors import ConfigError
from ray_app.task.base import Batch
from ray_app.task.module import ModuleTask
from ray_app.task.transforms import instantiate
from tests.support.generated_programs import Program, to_tensors, write_rows

CLASSES, GROUPS = 4, 5
_NO_TEXT = ("BERTScore", "InfoLM", "SQuAD", "ROUGEScore", "Perplexity")


def _classification(prefix: str, *parts: str) -> list[str]:
    names = [name for name in classification.__all__ if name.startswith(prefix) and "Fair" not in name]
    return [f"classification.{name}" for name in names if not parts or any(part in name for part in parts)]


METRICS = {
    "binary": [name for name in _classification("Binary") if "Group" not in name],
    "class": _classification("Multiclass"),
    "labels": _classification("Multilabel"),
    "places": _classification("Multiclass", "Exact", "Score", "Accuracy", "Precision", "AUROC"),
    "number": [f"regression.{name}" for name in regression.__all__ if "Diverg" not in name and "Cos" not in name],
    "numbers": [f"regression.{name}" for name in regression.__all__],
    "retrieval": [f"retrieval.{name}" for name in retrieval.__all__],
    "text": [f"text.{name}" for name in torchmetrics.text.__all__ if name not in _NO_TEXT],
    "detection": ["detection.MeanAveragePrecision", "detection.IntersectionOverUnion"],
    "aggregation": [f"aggregation.{name}Metric" for name in ("Mean", "Sum", "Max", "Min", "Cat")],
}
OF_OWN_TASKS = ("retrieval", "text", "detection", "aggregation")
"""Kinds of metrics that a task of one's own updates."""
_ARGUMENTS: dict[str, list[Any]] = {
    "average": [None, "micro", "macro", "weighted", "none"],
    "top_k": [None, 2],
    "thresholds": [None, 5],
    "threshold": [None, 0.3],
    "ignore_index": [None, 0],
    "multidim_average": [None, "samplewise"],
    "normalize": [None, "true", "all"],
    "n_bins": [None, 4],
    "norm": [None, "l2", "max"],
    "max_fpr": [None, 0.5],
    "multioutput": [None, "raw_values", "variance_weighted"],
    "squared": [None, False],
    "empty_target_action": [None, "skip", "pos"],
    "num_outputs": [None, CLASSES],
    "class_metrics": [None, True],
}
"""Arguments of the metrics that have them."""
GRAMMAR: dict[str, list[Any]] = {
    "kind": list(METRICS),
    "metric": list(range(26)),
    "rows": [37, 60, 5, 2],
    "ties": [False, True],
    "absent": [False, True],
    "wrap": [None, "MinMaxMetric", "ClasswiseWrapper", "MultioutputWrapper"],
    **_ARGUMENTS,
}
RARE = ("wrap", "ignore_index", "multidim_average")
ALLOWED = {
    "cannot be combined from parts": "torchmetrics defines no reduction for its state.",
    "must be non-empty": "a retrieval metric itself refuses a batch of which ignore_index leaves no row.",
}
LOSSES = {"binary": "BCEWithLogits", "labels": "BCEWithLogits", "class": "CrossEntropy", "places": "CrossEntropy"}
_REQUIRED = {"beta": 2.0, "p": 3.0, "num_classes": CLASSES, "num_labels": CLASSES, "threshold": 0.5}
_REQUIRED |= {f"min_{name}": 0.5 for name in ("precision", "recall", "sensitivity", "specificity")}


def adapt(program: Program) -> Program:
    """Returns a drawn program without arguments that its metric refuses."""
    if program["kind"] in OF_OWN_TASKS:
        program["wrap"] = None
    try:
        instantiate(specification(program), "metric")
    except (ValueError, ConfigError):
        program |= {name: options[0] for name, options in _ARGUMENTS.items()} | {"wrap": None}
    return program


def specification(program: Program) -> dict[str, Any]:
    """Returns class path and arguments of the program's metric."""
    names = METRICS[program["kind"]]
    path = f"torchmetrics.{names[program['metric'] % len(names)]}"
    parameters = inspect.signature(load_class(path)).parameters
    required = {name for name, p in parameters.items() if p.default is p.empty} & _REQUIRED.keys()
    arguments = {name: program[name] for name in parameters if program.get(name) is not None}
    spec = {"class_path": path, "init_args": {name: _REQUIRED[name] for name in required} | arguments}
    if program["wrap"] is None:
        return spec
    inner = {"metric" if program["wrap"] == "ClasswiseWrapper" else "base_metric": spec}
    outputs = {"num_outputs": CLASSES} if program["wrap"] == "MultioutputWrapper" else {}
    return {"class_path": f"torchmetrics.wrappers.{program['wrap']}", "init_args": inner | outputs}


class Scale(nn.Module):
    """Gives a column back, times a parameter, so that no score depends on the rows beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, group: Tensor) -> Tensor:
        del group
        return x * self.weight


class MetricTask(ModuleTask):
    """A task with a metric that takes something else than outputs and target."""

    def update(self, metrics: Any, outputs: Any, batch: Batch) -> None:
        kind = str(self.metric_specs["score"]["class_path"]).split(".")[1]
        update_metric(kind, metrics["score"], outputs, batch)


def update_metric(kind: str, metric: Any, outputs: Tensor, batch: Any) -> None:
    """Updates a metric as its user does, with probabilities and classes, sentences, boxes or values."""
    y, labels = batch["y"], batch["group"] % 2
    match kind:
        case "binary" | "labels":
            metric.update(outputs.sigmoid(), y.long())
        case "class" | "places":
            metric.update(outputs.softmax(1), y)
        case "retrieval":
            metric.update(outputs.sigmoid(), y.long(), indexes=batch["group"])
        case "text":
            hypotheses, truth = (
                [" ".join(f"w{word}" for word in row) for row in v.argsort(1).tolist()] for v in (outputs, y)
            )
            metric.update(hypotheses, [[text] for text in truth] if hasattr(metric, "n_gram") else truth)
        case "detection":
            pairs = (torch.cat((v[:, :2], v[:, :2] + v[:, 2:].abs() + 0.1), 1) for v in (outputs, y))
            boxes, truths = ([{"boxes": b, "labels": n} for b, n in zip(v[:, None], labels[:, None])] for v in pairs)  # noqa: B905
            metric.update([b | {"scores": b["boxes"][:, 0].sigmoid()} for b in boxes], truths)
        case "aggregation":
            metric.update(outputs)
        case _:
            metric.update(outputs, y)


def make_columns(program: Program, rows: int) -> dict[str, np.ndarray]:
    """Returns scores, target and group of each row; with `absent` a class has no row, with `ties` scores are equal."""
    source, kind = np.random.default_rng(program["seed"]), program["kind"]
    shape = dict.fromkeys(("binary", "number", "retrieval", "aggregation"), ()) | {"places": (CLASSES, 3)}
    x = source.normal(size=(rows, *shape.get(kind, (CLASSES,)))).astype(np.float32)
    x = (x * 2).round() / 2 if program["ties"] else x
    y: np.ndarray = x + source.normal(size=x.shape).astype(np.float32)
    if kind in ("number", "numbers"):
        x, y = np.abs(x) + 0.1, np.abs(y) + 0.1
    if kind in ("binary", "labels", "retrieval"):
        y = (y > (9 if program["absent"] else 0)).astype(np.int64)
    if kind in ("class", "places"):
        y = np.clip(y.argmax(1), 1 if program["absent"] else 0, None)
    return {"x": x, "y": y, "group": source.integers(0, GROUPS, rows)}


def configuration(program: Program, folder: Path) -> dict[str, Any]:
    """Writes the data of a program to a folder, and returns the fields of its configuration."""
    kind = program["kind"]
    arguments = {
        "model": {"class_path": f"{__name__}.Scale"},
        "inputs": ["x", "group"],
        "target": "y",
        "loss": {"class_path": f"torch.nn.{LOSSES.get(kind, 'MSE')}Loss"},
        "metrics": {"score": specification(program)},
    }
    task = f"{__name__}.MetricTask" if kind in OF_OWN_TASKS else "ray_app.task.module.ModuleTask"
    return {
        "task": {"class_path": task, "init_args": arguments},
        "data__path": write_rows(folder / "train", make_columns(program, 24)),
        "data__eval_path": write_rows(folder / "eval", make_columns(program, program["rows"])),
        "data__global_batch_size": 8,
        "tracking__enabled": False,
        "run__storage_path": str(folder),
    }


def compute_at_once(program: Program) -> dict[str, Any]:
    """Returns the results of the metric for one update with all rows, by the names that a collection gives them."""
    columns = to_tensors(make_columns(program, program["rows"]))
    metrics = {"score": instantiate(specification(program), "metric")}
    collection = torchmetrics.MetricCollection(metrics, compute_groups=False)
    update_metric(program["kind"], collection["score"], columns["x"], columns)
    values: dict[str, Any] = collection.compute()
    return values
