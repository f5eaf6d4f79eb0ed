"""The layout of a run directory (`RunPaths`), and the schema version that the files of a run carry.

`translate_format_errors` and `from_known_fields` help to read files that another version of this application wrote.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from ray_app.errors import ConfigError
from ray_app.process import temporary_folder
from ray_app.storage.files import Location
from ray_app.version import __version__


class Entry:
    """A file or folder below the `root` of an object, as an attribute of its class, such as those of `RunPaths`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: Any, _: type[Any]) -> Location:
        return cast(Location, paths.root / self._name)


@dataclass(frozen=True)
class RunPaths:
    """The layout of one run directory, `<storage_path>/<run_name>`."""

    root: Location

    @property
    def name(self) -> str:
        """The run's name."""
        return self.root.name

    @property
    def unique_name(self) -> str:
        """The run's name and a digest of its location, since two storages may have runs of the same name."""
        return f"{self.name}-{hashlib.sha256(str(self.root).encode()).hexdigest()[:12]}"

    config = Entry("config.yaml")
    """The resolved configuration of the newest start.

    The fields that decide the result are those of the first start.
    """
    code = Entry("code.json")
    """The digests of source files and the versions of libraries at the newest start.

    The file also has the names of the arguments in `config.yaml` that are defaults.
    """
    data = Entry("data.json")
    """Size and time, or ETag, of the data files at the newest start."""
    manifest = Entry("manifest.json")
    """The row groups that the run trains on."""
    classes = Entry("classes.json")
    """The classes of the rows, if rows are balanced by class."""
    schema = Entry("schema.json")
    """The types of the columns that the run trains on, and the names of its classes."""
    task = Entry("task.json")
    """The settings of the prepared task, with which it is made again without the training data; `null` if JSON does not
    keep them."""
    example = Entry("example.parquet")
    """One or two decoded rows, from which the inputs of an export are known."""
    tokenizer = Entry("tokenizer.json")
    """The tokenizer of the texts that the data was made of, if it has one; exports have a copy."""
    initial = Entry("initial.safetensors")
    """The initial parameters, if `train.init_from` names some."""
    checkpoints = Entry("checkpoints")
    """The folder of the checkpoints."""
    pins = Entry("pins")
    """The folder with one file per evaluator that still needs checkpoints."""
    evaluations = Entry("evaluations")
    """The folder with one file per step that the run's own evaluator has evaluated."""
    evaluators = Entry("evaluators")
    """The folder with one folder for each other evaluator, by its name."""
    interventions = Entry("interventions")
    """The folder with one file per step at which code in the driver's process, such as a callback of Keras, has
    answered, with the changes that it has made."""
    metrics = Entry("metrics")
    """The folder of the segments with step records."""
    events = Entry("events")
    """The folder with one file per event."""
    bad_rows = Entry("bad_rows")
    """The folder with one file per skipped row, which cannot be decoded or lacks a value that the task reads."""
    outputs = Entry("output")
    """The folder with the output of user code."""

    def output(self, fence: int, process_name: str, kind: str) -> Location:
        """Returns the file with the output of a process during a start; `kind` is `out` or `err`."""
        return self.outputs / f"{fence:04d}-{process_name}.{kind}"

    profile = Entry("profile")
    """The folder of the traces of steps, if the configuration asks for them."""
    summary = Entry("summary.json")
    """The summary of the run."""
    report = Entry("report.html")
    """The report about the run: one page with curves and tables."""
    tracking = Entry("tracking.json")
    """The MLflow run, and how far the journal has been sent to it."""
    tensorboard = Entry("tensorboard")
    """The folder of TensorBoard's event files, if the configuration asks for them."""
    fences = Entry("fences")
    """The folder with one file per start of the driver, its lease; only the newest start may write the run."""

    def fence(self, number: int) -> Location:
        """Returns the file that claims a fence."""
        return self.fences / f"{number:04d}.json"

    def checkpoint(self, step: int, fence: int) -> Location:
        """Returns the folder of a checkpoint."""
        return self.checkpoints / f"step-{step:08d}-{fence:04d}"

    def evaluations_of(self, evaluator: str | None) -> Location:
        """Returns the folder with one file per step that an evaluator has evaluated; None is the run's own."""
        return self.evaluations if evaluator is None else self.evaluators / evaluator

    def evaluation(self, step: int, evaluator: str | None = None) -> Location:
        """Returns the file with the evaluation of the checkpoint of a step."""
        return self.evaluations_of(evaluator) / f"step-{step:08d}.json"

    def ray_storage(self, fence: int) -> Path:
        """Returns the folder for the files of Ray Train during one `fit()`.

        For a run in a bucket it is a temporary folder of the driver's machine.
        """
        if isinstance(self.root, Path):
            return self.root / f"ray-{fence}"
        return temporary_folder() / self.unique_name / f"ray-{fence}"


SCHEMA_VERSION = 2
"""The version of evaluations, events, samples and segments; version 1 was that of ray_app before 0.2.0.

A new field with a default needs no new version; a new meaning of an existing field does.
"""

T = TypeVar("T")


@contextmanager
def translate_format_errors(file: Location, values: Any) -> Iterator[None]:
    """Turns errors about the contents of a file into a `ConfigError` that names the file and says what to do."""
    try:
        yield
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        version = values.get("schema_version") if isinstance(values, dict) else None
        if isinstance(version, int) and version != SCHEMA_VERSION:
            raise ConfigError(
                f"{file} has schema version {version}; this version of ray_app ({__version__}) reads {SCHEMA_VERSION}."
                f" Use the version that wrote it ({error})."
            ) from error
        raise ConfigError(
            f"{file} is damaged: {error}. Restore it from a backup, or remove it and lose its content."
        ) from error


def add_version(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a file with the schema version."""
    return {**values, "schema_version": SCHEMA_VERSION}


def from_known_fields(kind: type[T], values: dict[str, Any]) -> T:
    """Returns a dataclass with the values of a file: unknown fields are ignored, missing ones have their defaults.

    Raises:
        TypeError: A field without a default is missing, or the values are not fields by name.
    """
    if not isinstance(values, dict):
        raise TypeError(f"it must contain a mapping, but contains a {type(values).__name__}")
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})
