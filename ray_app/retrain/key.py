"""What a training depends on, as digests of contents; their digest is the key under which it is done once."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ray_app.config.config import Config, result_fields
from ray_app.data.dataset.below import files_below
from ray_app.data.dataset.contents import contents, sha256
from ray_app.data.dataset.files import find, is_folder, place_of, relative
from ray_app.errors import DataError
from ray_app.record.files import Location
from ray_app.retrain.section import RetrainSection
from ray_app.runs.preparing.code import classes_in, files_of
from ray_app.runs.preparing.initial import find_beginning

_DESCRIPTION = "dataset.json"


@dataclass(frozen=True)
class Delivery:
    """The files of the data as it is now: SHA-256 of the content by relative path.

    Args:
        train: Of `data.path`.
        evaluation: Of `data.eval_path`.
        gate: Of `retrain.gate_path`. No training depends on it, so deliveries that differ in it alone are equal.
    """

    train: dict[str, str]
    evaluation: dict[str, str]
    gate: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def digest(self) -> str:
        """SHA-256 over what is trained and evaluated on.

        The manifest of a run knows paths and row counts alone; this one sees a label that was changed.
        """
        return digest_of([sorted(self.train.items()), sorted(self.evaluation.items())])

    def twice(self) -> list[str]:
        """Files with the content of another one, of the same or another data set, as text for people."""
        first: dict[str, str] = {}
        found = []
        for kind, files in (("training", self.train), ("evaluation", self.evaluation), ("gate", self.gate)):
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
        code: Digest of the source files of the task, the optimizer, the schedule and classes in their arguments, and of ray_app.
        judging: Digest of what decides whether data or a model is accepted: the settings, and the gate's data if it has its own.
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


def delivered(config: Config, memory: Location | None = None, gate_path: str | None = None) -> Delivery:
    """The digests of all files of the data; those that were changed since the last look are read.

    Args:
        config: Names the data.
        memory: Folder where the digests are kept for the next look; not given: all files are read, and nothing is kept.
        gate_path: The gate's own data, if it has any.

    Raises:
        DataError: There are none.
        StorageError: S3 does not answer.
    """
    paths = {"train": config.data.path, "evaluation": str(config.data.eval_path)} | ({"gate": gate_path} if gate_path is not None else {})
    return Delivery(**{name: _contents(path, memory / f"{name}.json" if memory is not None else None) for name, path in paths.items()})


def inputs_of(config: Config, section: RetrainSection, delivery: Delivery, champion: str) -> Inputs:
    """The inputs of a round; the parameters that `train.init_from` names count by their content.

    Args:
        config: The configuration.
        section: How to retrain.
        delivery: The data.
        champion: What of the champion the training depends on, such as the digest of its parameters; empty if nothing.

    Raises:
        ConfigError: There are no such parameters, or a class cannot be imported.
    """
    config = find_beginning(config, None).config
    fields = result_fields(config, "")
    fields |= {"retrain.data": section.data, "retrain.start": section.start}
    if section.data == "new_and_sample":
        fields["retrain.old_fraction"] = section.old_fraction
    judging = section.judging() | {"metric": config.evaluate.metric, "mode": config.evaluate.mode, "gate": delivery.gate}
    return Inputs(delivery.digest, digest_of(fields), _code(config), digest_of(judging), champion)


def digest_of(value: Any) -> str:
    """SHA-256 of a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _contents(path: str, memory: Location | None) -> dict[str, str]:
    target = place_of(path)
    is_one = find(target) is not None
    files = [target] if is_one else files_below(target, ".parquet") if is_folder(target) else []
    if not files:
        raise DataError(f"data path {path!r} holds no *.parquet file (looked at {target}); deliver the data first.")
    root = target.parent if is_one else target
    found = contents(root, [relative(file, root) for file in files], memory)
    if find(root / _DESCRIPTION):  # of what stands in it only the classes count: it also says when and from what it was made
        found[_DESCRIPTION] = digest_of(json.loads((root / _DESCRIPTION).read_text()).get("classes"))
    return found


def _code(config: Config) -> str:
    package = Path(__file__).resolve().parents[1]
    files = {str(file.relative_to(package)): file for file in package.rglob("*.py")}
    for class_path in sorted(classes_in(config)):
        files |= files_of(class_path)
    return digest_of({name: sha256(file) for name, file in sorted(files.items())})
