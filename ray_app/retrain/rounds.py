"""The record of retrainings: a round's stages, each written once, and the audit of everything that was decided.

Every path of the retrainings of a model, as properties of one class.

What a training depends on, as digests of contents; their digest is the key under which it is done once.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ray_app.config.config import Config, result_fields
from ray_app.data.dataset import hash_files, sha256
from ray_app.driver.model_export import user_name
from ray_app.errors import DataError
from ray_app.preflight.changes import iter_import_paths, source_files
from ray_app.preflight.initial_parameters import load_initial_parameters
from ray_app.retrain.options import RetrainSection
from ray_app.storage.data_files import files_below, find_file, is_folder, locate_data, relative_path
from ray_app.storage.files import (
    Location,
    list_files,
    list_folders,
    put_json,
    read_all_json,
    read_json,
    remove_tree,
    to_location,
)

_KEY_CHARS, _NAME_CHARS = 12, 64


@dataclass(frozen=True)
class RetrainPaths:
    """The layout of `<run.storage_path>/retraining/<model>`, beside the runs.

    Args:
        root: That folder. Its lease (`RunPaths(root)`) lets one scheduler at a time retrain the model.
    """

    root: Location

    @classmethod
    def of(cls, config: Config) -> RetrainPaths:
        """The folder of a configuration's registered model."""
        return cls(
            to_location(config.run.storage_path) / "retraining" / folder_name(str(config.tracking.registered_model))
        )

    @property
    def audit(self) -> Location:
        """Folder with one numbered file per decision."""
        return self.root / "audit"

    @property
    def rounds(self) -> Location:
        """Folder with one folder per key."""
        return self.root / "rounds"

    @property
    def contents(self) -> Location:
        """Folder with the digests of the data's files, by which those that were not changed are not read again."""
        return self.root / "contents"

    @property
    def deciding(self) -> Location:
        """Folder whose lease is held while the alias moves, for seconds: a rollback does not wait for a training."""
        return self.root / "deciding"

    def entry(self, number: int) -> Location:
        """One decision."""
        return self.audit / f"{number:06d}.json"

    def round(self, key: str) -> Location:
        """Folder with one file per stage of a round, each written once."""
        return self.rounds / key

    def data(self, key: str) -> Location:
        """The data set that was put together for a training key."""
        return self.root / "data" / key[:_KEY_CHARS]

    def selection(self, key: str) -> Location:
        """The evaluation rows by which the best checkpoint is chosen."""
        return self.root / "data" / f"selection-{key[:_KEY_CHARS]}"

    def parameters(self, digest: str) -> Location:
        """The parameters of a champion that a run began with."""
        return self.root / "champions" / f"{digest}.safetensors"

    def run_name(self, training_key: str) -> str:
        """Name of the run that trains what a key stands for."""
        return f"{self.root.name}-{training_key[:_KEY_CHARS]}"


def folder_name(model: str) -> str:
    """A model's name as a folder and the beginning of run names; another one where it has characters that these may not
    have.
    """
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", model)[:_NAME_CHARS].strip("._-")
    if plain == model:
        return model
    return f"{plain or 'model'}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


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
        config: Digest of the fields that decide the result, and of how retraining chooses rows and parameters to begin
            with.
        code: Digest of the source files of the task, the optimizer, the schedule and classes in their arguments, and of
            ray_app.
        judging: Digest of what decides whether data or a model is accepted: the settings, and the gate's data if it has
            its own.
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
    paths = {"train": config.data.path, "evaluation": str(config.data.eval_path)} | (
        {"gate": gate_path} if gate_path is not None else {}
    )
    return Delivery(
        **{
            name: _contents(path, memory / f"{name}.json" if memory is not None else None)
            for name, path in paths.items()
        }
    )


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
    config = load_initial_parameters(config, None).config
    fields = result_fields(config, "")
    fields |= {"retrain.data": section.data, "retrain.start": section.start}
    if section.data == "new_and_sample":
        fields["retrain.old_fraction"] = section.old_fraction
    judging = section.judging() | {
        "metric": config.evaluate.metric,
        "mode": config.evaluate.mode,
        "gate": delivery.gate,
    }
    return Inputs(delivery.digest, digest_of(fields), _code(config), digest_of(judging), champion)


def digest_of(value: Any) -> str:
    """SHA-256 of a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _contents(path: str, memory: Location | None) -> dict[str, str]:
    target = locate_data(path)
    is_one = find_file(target) is not None
    files = [target] if is_one else files_below(target, ".parquet") if is_folder(target) else []
    if not files:
        raise DataError(f"data path {path!r} holds no *.parquet file (looked at {target}); deliver the data first.")
    root = target.parent if is_one else target
    found = hash_files(root, [relative_path(file, root) for file in files], memory)
    if find_file(
        root / _DESCRIPTION
    ):  # of what stands in it only the classes count: it also says when and from what it was made
        found[_DESCRIPTION] = digest_of(json.loads((root / _DESCRIPTION).read_text()).get("classes"))
    return found


def _code(config: Config) -> str:
    package = Path(__file__).resolve().parents[1]
    files = {str(file.relative_to(package)): file for file in package.rglob("*.py")}
    for class_path in sorted(iter_import_paths(config)):
        files |= source_files(class_path)
    return digest_of({name: sha256(file) for name, file in sorted(files.items())})


STAGES = ("decided", "validated", "trained", "registered", "judged", "concluded", "recorded")
"""In this order; data that is refused goes from `validated` to `concluded`."""


@dataclass(frozen=True)
class Round:
    """What was done for one key. Each stage is written once, after its effects, so that a stopped round goes on where
    it was.

    Args:
        paths: The model's retrainings.
        key: The round's key.
    """

    paths: RetrainPaths
    key: str

    def read(self, stage: str) -> dict[str, Any] | None:
        """What a stage came to; None if it is not done."""
        return read_json(self.paths.round(self.key) / f"{stage}.json")

    def put(self, stage: str, value: dict[str, Any]) -> dict[str, Any]:
        """Writes a stage with the time, unless it is there; returns what is there."""
        put_json(self.paths.round(self.key) / f"{stage}.json", {**value, "at": now()}, if_absent=True)
        return self.read(stage) or {}

    def clear(self) -> None:
        """Removes all stages, also those that a removal before left because it was interrupted.

        Raises:
            OSError: Some are still there; what is begun now would take them for its own.
        """
        folder = self.paths.round(self.key)
        remove_tree(folder)
        left = [stage for stage in STAGES if self.read(stage) is not None]
        if left:
            raise OSError(
                f"{folder} cannot be emptied: {', '.join(left)} are still there. Remove it by hand, then start again."
            )

    @property
    def inputs(self) -> Inputs:
        """What the round is about."""
        return Inputs(**(self.read("decided") or {})["inputs"])

    @property
    def is_done(self) -> bool:
        """Whether everything about it was decided and recorded."""
        return self.read("recorded") is not None


def open_rounds(paths: RetrainPaths) -> list[Round]:
    """Rounds that were stopped before their end, by key."""
    rounds = [Round(paths, key) for key in sorted(list_folders(paths.rounds))]
    return [one for one in rounds if not one.is_done and one.read("decided") is not None]


def audit(paths: RetrainPaths, id: str, what: str, why: str, details: dict[str, Any]) -> None:
    """Adds an entry to the audit record, unless one with this id is there; several may do so at once.

    Args:
        paths: The model's retrainings.
        id: What identifies the decision.
        what: `promoted`, `gate refused`, `data refused`, `superseded` or `rolled back`.
        why: The reason, with figures.
        details: All else.
    """
    entry = {"id": id, "when": now(), "who": who(), "what": what, "why": why, **details}
    while not any(known["id"] == id for known in entries(paths)):
        number = max((int(name.removesuffix(".json")) for name in list_files(paths.audit)), default=0) + 1
        put_json(paths.entry(number), entry, if_absent=True)  # if somebody was faster, under the next number


def entries(paths: RetrainPaths) -> list[dict[str, Any]]:
    """The audit record, oldest first."""
    return read_all_json(paths.audit / name for name in sorted(list_files(paths.audit)))


def who() -> str:
    """Who decides: the user, the machine and the process."""
    return f"{user_name()}@{platform.node()} (process {os.getpid()})"


def now() -> str:
    """The time, ISO 8601 (UTC)."""
    return datetime.now(UTC).isoformat(timespec="seconds")
