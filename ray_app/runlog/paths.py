"""Every path of a run, as properties of one class.

The version that every file of the record carries, and reading what another version wrote.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ray_app.errors import ConfigError
from ray_app.storage.files import Location
from ray_app.version import __version__


@dataclass(frozen=True)
class RunPaths:
    """The layout of one run directory.

    Args:
        root: `<storage_path>/<run_name>`.
    """

    root: Location

    @property
    def name(self) -> str:
        """The run's name."""
        return self.root.name

    @property
    def unique_name(self) -> str:
        """The run's name, and a digest of where it is stored: two storages may have runs of one name."""
        return f"{self.name}-{hashlib.sha256(str(self.root).encode()).hexdigest()[:12]}"

    @property
    def config(self) -> Location:
        """The resolved configuration of the run's newest start; what decides the result is that of the first."""
        return self.root / "config.yaml"

    @property
    def code(self) -> Location:
        """The source files and libraries that it was started with, and which arguments in `config.yaml` were
        not given.
        """
        return self.root / "code.json"

    @property
    def data(self) -> Location:
        """Size and time, or ETag, of the data files as at the run's newest start."""
        return self.root / "data.json"

    @property
    def manifest(self) -> Location:
        """The row groups that the run trains on."""
        return self.root / "manifest.json"

    @property
    def classes(self) -> Location:
        """The classes by which rows are balanced, if they are."""
        return self.root / "classes.json"

    @property
    def schema(self) -> Location:
        """Types of the columns that the run trains on, and the names of its classes."""
        return self.root / "schema.json"

    @property
    def initial(self) -> Location:
        """The parameters that it began with, if `train.init_from` named some."""
        return self.root / "initial.safetensors"

    @property
    def checkpoints(self) -> Location:
        """Folder of committed checkpoints."""
        return self.root / "checkpoints"

    @property
    def holds(self) -> Location:
        """Folder with one file per follower of the checkpoints."""
        return self.root / "holds"

    @property
    def evaluations(self) -> Location:
        """Folder with one file per step that the run's own evaluator evaluated."""
        return self.root / "evaluations"

    @property
    def evaluators(self) -> Location:
        """Folder with one folder per evaluator beside the run's own, by its name."""
        return self.root / "evaluators"

    @property
    def metrics(self) -> Location:
        """Folder of rank 0's metrics by step."""
        return self.root / "metrics"

    @property
    def events(self) -> Location:
        """Folder with one file per event."""
        return self.root / "events"

    @property
    def bad_rows(self) -> Location:
        """Folder with one file per row that was skipped because it cannot be decoded."""
        return self.root / "bad_rows"

    @property
    def system(self) -> Location:
        """Folder of the looks at how busy the nodes are."""
        return self.root / "system"

    @property
    def outputs(self) -> Location:
        """Folder with what the processes of a task print."""
        return self.root / "output"

    def output(self, fence: int, who: str, kind: str) -> Location:
        """The file of a kind (`out`, `err`) of somebody's output during a start."""
        return self.outputs / f"{fence:04d}-{who}.{kind}"

    @property
    def profile(self) -> Location:
        """Folder of the traces of steps, if they were asked for."""
        return self.root / "profile"

    @property
    def summary(self) -> Location:
        """What came of the run."""
        return self.root / "summary.json"

    @property
    def report(self) -> Location:
        """The same for people: one page with curves and tables."""
        return self.root / "report.html"

    @property
    def tracking(self) -> Location:
        """The MLflow run and how far it has been fed."""
        return self.root / "tracking.json"

    @property
    def tensorboard(self) -> Location:
        """Folder of TensorBoard's event files, if they were asked for."""
        return self.root / "tensorboard"

    @property
    def fences(self) -> Location:
        """Folder with one file per start of the driver, its lease; the highest number may write."""
        return self.root / "fences"

    def fence(self, number: int) -> Location:
        """The file that claims a fence."""
        return self.fences / f"{number:04d}.json"

    def checkpoint(self, step: int, fence: int) -> Location:
        """Folder of one checkpoint."""
        return self.checkpoints / f"step-{step:08d}-{fence:04d}"

    def evaluations_of(self, evaluator: str | None) -> Location:
        """Folder with one file per step that an evaluator evaluated; None: the run's own."""
        return self.evaluations if evaluator is None else self.evaluators / evaluator

    def evaluation(self, step: int, evaluator: str | None = None) -> Location:
        """The evaluation of the checkpoint at a step."""
        return self.evaluations_of(evaluator) / f"step-{step:08d}.json"

    def ray_storage(self, fence: int) -> Path:
        """What Ray Train writes for itself during one `fit()`; for a run on S3 in a temporary folder of the driver's
        machine.
        """
        if isinstance(self.root, Path):
            return self.root / f"ray-{fence}"
        return Path(tempfile.gettempdir()) / "ray_app" / self.unique_name / f"ray-{fence}"


SCHEMA_VERSION = 1
"""Of evaluations, events, looks and segments of metrics; files without one are of version 1. A field that is added with
a default is no new version; one is due when what is there changes its meaning.
"""

T = TypeVar("T")


@contextmanager
def translate_format_errors(place: Location, values: Any) -> Iterator[None]:
    """Makes errors about what a file holds name the file, and say what to do.

    Args:
        place: The file.
        values: What it holds.

    Raises:
        ConfigError: It is of a newer version, or damaged.
    """
    try:
        yield
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        version = values.get("schema_version", 1) if isinstance(values, dict) else 1
        if isinstance(version, int) and version > SCHEMA_VERSION:
            why = (
                f"is of schema version {version}; this version of ray_app ({__version__}) reads up to {SCHEMA_VERSION}."
                f" Use the version"
            )
            raise ConfigError(f"{place} {why} that wrote it, or a newer one ({error}).") from error
        raise ConfigError(
            f"{place} is damaged: {error}. Restore it from a backup, or remove it: what stands in it is lost."
        ) from error


def add_version(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a file, with the version that they are written in."""
    return {**values, "schema_version": SCHEMA_VERSION}


def from_known_fields(kind: type[T], values: dict[str, Any]) -> T:
    """Makes a dataclass from the values of a file; what a newer version adds is left out, what an older one lacks has
    its default.

    Raises:
        TypeError: A field that has no default is missing, or it holds no fields at all.
    """
    if not isinstance(values, dict):
        raise TypeError(f"it should hold fields by name, it holds {type(values).__name__}")
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})
