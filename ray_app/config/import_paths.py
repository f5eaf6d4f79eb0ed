"""Import paths of the configuration.

What moves the parameters, as it stands in a configuration.

Libraries that only some need, and the extra of the package that brings each; no index has the package, so messages say
where it is.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from ray_app.config.sections import ClassSpec
from ray_app.errors import ConfigError


def load_class(spec: ClassSpec | str) -> Any:
    """Imports what a configuration names: a class, a function, or one of a class
    (`transformers.AutoModel.from_pretrained`).

    Raises:
        ImportError: There is no such module, or something that it needs is missing.
        AttributeError: The module has nothing of this name.
    """
    path = spec if isinstance(spec, str) else spec.class_path
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        try:
            return reduce(getattr, parts[cut:], importlib.import_module(module))
        except ModuleNotFoundError as error:
            if cut == 1 or not f"{module}.".startswith(f"{error.name}."):
                raise
    raise ImportError(f"{path!r} names no module; an import path is such as torch.optim.AdamW")


TASK_OPTIMIZER = "ray_app.task.whole_batches.OwnOptimizer"
"""Stands for the optimizer that the task makes."""


@dataclass(frozen=True)
class OptimizerSpec(ClassSpec):
    """An optimizer.

    Args: class_path: Import path, such as `torch.optim.AdamW`. init_args: Keyword arguments of the class, but for the
        parameters. groups: Parameters with options of their own, each a mapping: `names`, patterns with `*` for any
        text, or `norms_and_biases: true`,
            which is all parameters of at most one dimension (those of normalisation layers, and biases), or both; and
            options of the optimizer, such as `lr` and `weight_decay`. A parameter is in the first group that names it;
            the others have `init_args`, and the learning rate that is recorded is theirs. Schedules move each group's
            rate. Not given: none.
    """

    groups: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class TurnSpec(OptimizerSpec):
    """One of several optimizers that take turns.

    Args: class_path: See `OptimizerSpec`. init_args: See `OptimizerSpec`. groups: See `OptimizerSpec`. parameters:
        Names of the parameters that it moves, with `*` for any text; each that is trained belongs to one optimizer.
        steps: Steps in a row that are its turn. schedule: Its learning-rate schedule, moved after each step of its own
        turns; not given: none.
    """

    parameters: list[str] = field(default_factory=list)
    steps: int = 1
    schedule: ClassSpec | None = None


EXTRAS = {
    "mlflow": "tracking",
    "tensorboard": "tensorboard",
    "torchvision": "vision",
    "pycocotools": "detection",
    "sklearn": "digits",
    "botocore": "s3",
    "google_crc32c": "tfrecord",
    "tokenizers": "text",
    "peft": "lora",
}
"""The extra, by the name that is imported."""


def require(library: str, asked: str, otherwise: str = "") -> None:
    """Refuses what needs a library that is not installed.

    Args:
        library: The name that is imported.
        asked: What needs it, as the beginning of a sentence.
        otherwise: What else can be done than to install it.

    Raises:
        ConfigError: It is not there.
    """
    if importlib.util.find_spec(library) is None:
        advice = f", or {otherwise}" if otherwise else ""
        raise ConfigError(
            f"{asked} needs {library}, which is not installed: pip install"
            f' "PATH_TO_RAY_APP[{EXTRAS[library]}]"{advice}.'
        )
