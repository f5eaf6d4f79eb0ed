"""Classes that a configuration names by import path: how they are imported, and how optimizers are declared.

`require` names the extra of the package that installs an optional library. The package is on no index, so its messages
ask for the path of the package.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from ray_app.config.sections import ClassSpec
from ray_app.errors import ConfigError, RayAppError
from ray_app.process import current_folder


def load_class(spec: ClassSpec | str) -> Any:
    """Imports a class, a function, or a method; raises `ImportError` or `AttributeError` if it is missing."""
    path = spec if isinstance(spec, str) else spec.class_path
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        try:
            return reduce(getattr, parts[cut:], importlib.import_module(module))
        except ModuleNotFoundError as error:
            if cut == 1 or not f"{module}.".startswith(f"{error.name}."):
                raise
    raise ImportError(f"{path!r} names no module; an import path looks like torch.optim.AdamW")


@contextmanager
def explain_constructor(field: str, class_path: str, arguments: Iterable[str]) -> Iterator[None]:
    """Raises ConfigError with the field of the configuration for any error of a constructor in the block."""
    try:
        yield
    except (RayAppError, MemoryError):
        raise
    except Exception as error:
        # A TypeError says by itself that an argument is missing or unknown.
        reason = str(error) if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{field} {class_path} cannot be created with {sorted(arguments)}: {reason.rstrip('.')}."
        ) from error


def refuse_hiding_files() -> None:
    """Raises `ConfigError` for a file of the user with the name of a module of Python or of a library that is in use.

    The folders of the user come first in the search path of the other processes of a run, which would import the file
    in the place of the module.
    """
    package = str(Path(__file__).resolve().parents[2])
    folders = [package, str(current_folder()), *os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    files: dict[str, Path] = {}
    for folder in dict.fromkeys(map(Path, filter(None, folders))):
        if not is_installed(folder / "a.py"):
            for file in (*folder.glob("*/__init__.py"), *folder.glob("*.py")):
                files.setdefault(file.parent.name if file.name == "__init__.py" else file.stem, file)
    for name, file in files.items():
        module = sys.modules.get(name)
        hidden = Path(getattr(module, "__file__", None) or file)
        # Frozen modules are found first.
        is_frozen = getattr(getattr(module, "__spec__", None), "origin", None) == "frozen"
        if is_installed(hidden) and not is_frozen and hidden.resolve() != file.resolve():
            raise ConfigError(
                f"{file} hides the module {name} ({hidden}) from the workers, which search this folder first. Rename"
                " the file, or start from another folder."
            )


def is_installed(file: Path) -> bool:
    """Returns whether a file belongs to Python or to an installed library."""
    # Ray's copies of libraries are in the last one, in any folder that Ray is in.
    libraries = {"site-packages", "dist-packages", "lib-dynload", "thirdparty_files"}
    return not libraries.isdisjoint(file.parts) or file.is_relative_to(sysconfig.get_path("stdlib"))


TASK_OPTIMIZER = "ray_app.task.whole_batches.OwnOptimizer"
"""Import path that stands for the optimizer that the task itself makes (`configure_optimizers`)."""


@dataclass(frozen=True)
class OptimizerSpec(ClassSpec):
    """An optimizer.

    Args:
        class_path: Import path, such as `torch.optim.AdamW`.
        init_args: Keyword arguments of the class, except the parameters.
        groups: Parameter groups with their own options. Each is a mapping that selects parameters by `names` (patterns;
            `*` matches any text), by `norms_and_biases: true` (all parameters of at most one dimension, in
            normalization layers and biases), or by both, and sets options of the optimizer, such as `lr` and
            `weight_decay`. A parameter belongs to the first group that selects it. All other parameters use
            `init_args`; their learning rate is the one that is recorded. Schedules change the learning rate of each
            group. Default: no groups.
    """

    groups: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class TurnSpec(OptimizerSpec):
    """One of several alternating optimizers.

    Args:
        class_path: See `OptimizerSpec`.
        init_args: See `OptimizerSpec`.
        groups: See `OptimizerSpec`.
        parameters: Names of the parameters that it updates; `*` matches any text. Every trained parameter belongs to
            exactly one optimizer.
        steps: Number of consecutive steps of one turn of this optimizer.
        schedule: Learning-rate schedule, which advances after each step of this optimizer. Default: none.
    """

    parameters: list[str] = field(default_factory=list)
    steps: int = 1
    schedule: ClassSpec | None = None


def iter_class_paths(parent: str, value: Any) -> Iterator[tuple[str, str, str]]:
    """Yields the name of the section, the field below it, and the path of each `class_path` in a value."""
    if isinstance(value, list | tuple):
        for number, element in enumerate(value):
            yield from iter_class_paths(f"{parent}[{number}]", element)
    elif isinstance(value, dict):
        if isinstance(value.get("class_path"), str):
            yield parent, ".class_path", value["class_path"]
        for name, element in value.items():
            yield from iter_class_paths(parent if name == "init_args" else f"{parent}.{name}", element)


EXTRAS = {
    "mlflow": "tracking",
    "torchvision": "vision",
    "pycocotools": "detection",
    "botocore": "s3",
    "google_crc32c": "tfrecord",
    "tokenizers": "text",
    "transformers": "text",
    "peft": "lora",
    "keras": "keras",
    "optuna": "tune",
}
"""The extra that installs an optional library, by the import name of the library."""


def require(library: str, feature: str, otherwise: str = "") -> None:
    """Raises `ConfigError` if a feature (the beginning of a sentence) needs an optional library that is not installed.

    `library` is its import name; `otherwise` is what can be done instead of installing it.
    """
    if importlib.util.find_spec(library) is None:
        advice = f", or {otherwise}" if otherwise else ""
        raise ConfigError(f"{feature} needs {library}, which is {explain_extra(library)}{advice}.")


def explain_extra(library: str) -> str:
    """Returns the end of a sentence about an optional library that is not installed, with the command."""
    return f'not installed: pip install "PATH_TO_RAY_APP[{EXTRAS[library]}]"'
