"""What a training depends on, as digests of contents; their digest is the key under which it is done once."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ray_app.config import Config, result_fields
from ray_app.data.contents import contents, sha256
from ray_app.data.places import files_below, relative
from ray_app.errors import DataError, RegistryError
from ray_app.retrain.section import RetrainSection
from ray_app.task.base import Task
from ray_app.track.sources import sources_of

_DESCRIPTION = "dataset.json"


@dataclass(frozen=True)
class Delivery:
    """The files of the data as it is now: SHA-256 of the content by relative path.

    Args:
        train: Of `data.path`.
        evaluation: Of `data.eval_path`.
    """

    train: dict[str, str]
    evaluation: dict[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 over all of it. The manifest of a run knows paths and row counts alone; this one sees a label that was changed."""
        return digest_of([sorted(self.train.items()), sorted(self.evaluation.items())])

    def twice(self) -> list[str]:
        """Files with the content of another one of the training or the evaluation data, as text for people."""
        first: dict[str, str] = {}
        found = []
        for kind, files in (("training", self.train), ("evaluation", self.evaluation)):
            for path, digest in files.items():
                name = f"{kind} file {path}"
                if path.endswith(".parquet") and digest in first:
                    found.append(f"{name} has the content of {first[digest]}")
                first.setdefault(digest, name)
        return found


@dataclass(frozen=True)
class Inputs:
    """What a round is about.

    Args:
        data: Digest of the delivery.
        config: Digest of the fields that decide the result, and of how retraining chooses rows and parameters to begin with.
        code: Digest of the task's source files and of ray_app.
        judging: Digest of the settings that decide whether data or a model is accepted.
        champion: What of the champion the training depends on; empty if it depends on nothing of it.
    """

    data: str
    config: str
    code: str
    judging: str
    champion: str = ""

    @property
    def training_key(self) -> str:
        """Equal keys give equal parameters."""
        return digest_of([self.data, self.config, self.code, self.champion])

    @property
    def key(self) -> str:
        """Equal keys give equal parameters and are judged alike, against the same champion."""
        return digest_of(asdict(self))


def delivered(config: Config) -> Delivery:
    """Reads all files of the data once.

    Raises:
        DataError: There are none.
    """
    return Delivery(_contents(config.data.path), _contents(str(config.data.eval_path)))


def inputs_of(config: Config, section: RetrainSection, delivery: Delivery, task: Task, champion: str) -> Inputs:
    """The inputs of a round.

    Args:
        config: The configuration.
        section: How to retrain.
        delivery: The data.
        task: The configured task.
        champion: What of the champion the training depends on, such as the digest of its parameters; empty if nothing.
    """
    fields = result_fields(config, "")
    fields |= {"retrain.data": section.data, "retrain.start": section.start}
    if section.data == "new_and_sample":
        fields["retrain.old_fraction"] = section.old_fraction
    judging = section.judging() | {"metric": config.evaluate.metric, "mode": config.evaluate.mode}
    return Inputs(delivery.digest, digest_of(fields), _code(type(task)), digest_of(judging), champion)


def digest_of(value: Any) -> str:
    """SHA-256 of a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _contents(path: str) -> dict[str, str]:
    target = Path(path).resolve()
    files = files_below(target, ".parquet") if target.is_dir() else [target] if target.is_file() else []
    if not files:
        raise DataError(f"data path {path!r} holds no *.parquet file (looked at {target}); deliver the data first.")
    root = target if target.is_dir() else target.parent
    found = contents(root, (relative(file, root) for file in files))
    if (root / _DESCRIPTION).is_file():  # of what stands in it only the classes count: it also says when and from what it was made
        found[_DESCRIPTION] = digest_of(json.loads((root / _DESCRIPTION).read_text()).get("classes"))
    return found


def _code(task: type[Task]) -> str:
    package = Path(__file__).resolve().parents[1]
    files = {str(file.relative_to(package)): file for file in package.rglob("*.py")}
    try:
        files |= sources_of(task.__module__).files
    except RegistryError:  # it can be trained all the same; then its own file counts
        module = __import__(task.__module__, fromlist=["_"])
        files[task.__module__] = Path(str(module.__file__))
    return digest_of({name: sha256(file) for name, file in sorted(files.items())})
