"""The files of a model's retrainings: paths, digests of the inputs, stages of a round, and the audit record.

`Delivery` and `Inputs` identify the delivered data and the other inputs of a training by digests of their contents. The
digest of all inputs is the key of a round, so a training with equal inputs is done once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ray_app.config.config import Config, digest_json, result_fields
from ray_app.data.dataset import DESCRIPTION, hash_files, leave_out_unfinished, read_description, sha256
from ray_app.driver.model_export import user_name
from ray_app.errors import DataError
from ray_app.preflight.changes import iter_import_paths, source_files
from ray_app.preflight.inputs import load_initial_parameters
from ray_app.retrain.options import RetrainSection
from ray_app.runlog.paths import Entry
from ray_app.storage.data_files import files_below, find_file, is_folder, relative_path
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
    """The layout of `<run.storage_path>/retraining/<model>`; the lease of `root` is that of the scheduler."""

    root: Location

    @classmethod
    def of(cls, config: Config) -> RetrainPaths:
        """Returns the paths of a configuration's registered model."""
        folder = make_folder_name(str(config.tracking.registered_model))
        return cls(to_location(config.run.storage_path) / "retraining" / folder)

    audit = Entry("audit")
    """Folder with one numbered file per decision."""
    rounds = Entry("rounds")
    """Folder with one folder per key."""
    contents = Entry("contents")
    """Folder with the digests of the data's files, so that unchanged files are not read again."""
    deciding = Entry("deciding")
    """Folder of a lease to move the alias `champion`, so that a rollback does not wait for a training."""

    def entry(self, number: int) -> Location:
        """File of one decision."""
        return self.audit / f"{number:06d}.json"

    def round(self, key: str) -> Location:
        """Folder with one file per stage of a round, each written once."""
        return self.rounds / key

    def parameters(self, digest: str) -> Location:
        """File of the parameters of a champion, the initial parameters of a run."""
        return self.root / "champions" / f"{digest}.safetensors"

    def run_name(self, training_key: str) -> str:
        """Returns the name of the run for a training key."""
        return f"{self.root.name}-{training_key[:_KEY_CHARS]}"


def make_folder_name(model: str) -> str:
    """Returns the model's name, or a similar name with a hash for one that run names may not have."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", model)[:_NAME_CHARS].strip("._-")
    if plain == model:
        return model
    return f"{plain or 'model'}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Delivery:
    """The SHA-256 of the content of each data file, by its path relative to the data set.

    The description `_dataset.json` is a file, too, but only its classes count.

    Args:
        train: Files of `data.path`.
        evaluation: Files of `data.eval_path`.
        gate: Files of `retrain.gate_path`. No training depends on them, so deliveries that only differ in them are
            equal.
    """

    train: dict[str, str]
    evaluation: dict[str, str]
    gate: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def digest(self) -> str:
        """SHA-256 over the contents of the files for training and evaluation, also of their labels."""
        return digest_json([sorted(self.train.items()), sorted(self.evaluation.items())])

    def find_duplicates(self) -> list[str]:
        """Returns a message for each file that has the content of another file, in the same or another data set."""
        name_by_digest: dict[str, str] = {}
        messages = []
        for kind, files in (("training", self.train), ("evaluation", self.evaluation), ("gate", self.gate)):
            for path, digest in files.items():
                name = f"{kind} file {path}"
                if path.endswith(".parquet") and digest in name_by_digest:
                    messages.append(f"{name} has the content of {name_by_digest[digest]}")
                name_by_digest.setdefault(digest, name)
        return messages


@dataclass(frozen=True)
class Inputs:
    """The inputs of a round, as digests.

    Args:
        config: Digest of the fields that decide the result, and of the choice of initial parameters.
        code: Digest of the source files of the task, the optimizer, the schedule and classes in their arguments, and of
            ray_app.
        judging: Digest of the settings that decide whether data or a model is accepted, and of the gate's data set.
        champion: Digest of those properties of the champion on which the training depends; empty if there are none.
    """

    data: str
    config: str
    code: str
    judging: str
    champion: str = ""

    @property
    def training_key(self) -> str:
        """Digest of all inputs of the training: equal keys give equal parameters."""
        return digest_json([self.data, self.config, self.code, self.champion])

    @property
    def key(self) -> str:
        """Digest of all inputs: equal keys give equal parameters, which are accepted by the same rules."""
        return digest_json(asdict(self))


def read_delivery(config: Config, memory: Location | None = None, gate_path: str | None = None) -> Delivery:
    """Returns the digests of all data files; with the folder `memory` unchanged ones are not read again."""

    def digest_files(path: str, name: str) -> dict[str, str]:
        return _digest_files(path, memory / f"{name}.json" if memory is not None else None)

    if isinstance(config.data.path, str):
        train = digest_files(config.data.path, "train")
    else:
        parts = [digest_files(path, f"train-{index}") for index, path in enumerate(config.data.sources)]
        # These are the paths of the manifest.
        train = {f"{index}/{path}": digest for index, part in enumerate(parts) for path, digest in part.items()}
    gate = digest_files(gate_path, "gate") if gate_path is not None else {}
    return Delivery(train, digest_files(str(config.data.eval_path), "evaluation"), gate)


def make_inputs(config: Config, section: RetrainSection, delivery: Delivery, champion: str) -> Inputs:
    """Returns the inputs of a round; the initial parameters of `train.init_from` count by their content.

    Raises:
        ConfigError: The initial parameters do not exist, or a class cannot be imported.
    """
    config = load_initial_parameters(config, None).config
    fields = result_fields(config, "")
    fields["retrain.start"] = section.start
    judging = section.acceptance_settings() | {"metric": config.evaluate.metric, "mode": config.evaluate.mode}
    judging |= {"gate": delivery.gate}
    return Inputs(delivery.digest, digest_json(fields), digest_code(config), digest_json(judging), champion)


def _digest_files(path: str, memory: Location | None) -> dict[str, str]:
    target = to_location(path)
    is_file = find_file(target) is not None
    files = [target] if is_file else files_below(target, ".parquet") if is_folder(target) else []
    if not files:
        raise DataError(f"data path {path!r} holds no *.parquet file (looked at {target}); deliver the data first.")
    root = target.parent if is_file else target
    description = read_description(root)
    complete = leave_out_unfinished(root, files, description or {})
    digests = hash_files(str(root), [relative_path(file, root) for file in complete], memory)
    # Only the classes of the description count: it also has the time and the source of the ingest.
    if description is not None:
        digests[DESCRIPTION] = digest_json(description.get("classes"))
    return digests


def digest_code(config: Config) -> str:
    """Returns the digest of the code of this package and of the classes in a configuration."""
    package = Path(__file__).resolve().parents[1]
    files = {str(file.relative_to(package)): file for file in package.rglob("*.py")}
    for class_path in sorted(iter_import_paths(config)):
        files |= source_files(class_path)
    return digest_json({name: sha256(file) for name, file in sorted(files.items())})


STAGES = ("decided", "validated", "trained", "registered", "judged", "concluded", "recorded")
"""The stages of a round in their order; refused data goes from `validated` to `concluded`."""


@dataclass(frozen=True)
class Round:
    """The record of one round; each stage is written once, after its effects, so that it can continue."""

    paths: RetrainPaths
    key: str

    def read(self, stage: str) -> dict[str, Any] | None:
        """Returns the result of a stage; None if it is not done."""
        return read_json(self.paths.round(self.key) / f"{stage}.json")

    def put(self, stage: str, value: dict[str, Any]) -> dict[str, Any]:
        """Writes the result of a stage with the time, unless the stage is recorded already; returns the record."""
        put_json(self.paths.round(self.key) / f"{stage}.json", {**value, "at": current_time()}, if_absent=True)
        return self.read(stage) or {}

    def clear(self) -> None:
        """Removes all stages; raises OSError if some stay, which a new round would take for its own."""
        folder = self.paths.round(self.key)
        remove_tree(folder)
        left = [stage for stage in STAGES if self.read(stage) is not None]
        if left:
            raise OSError(
                f"{folder} cannot be emptied: {', '.join(left)} still exist. Remove the folder, then start again."
            )

    @property
    def inputs(self) -> Inputs:
        """The inputs of the round."""
        return Inputs(**(self.read("decided") or {})["inputs"])

    @property
    def is_done(self) -> bool:
        """Whether the last stage of the round is recorded."""
        return self.read("recorded") is not None


def open_rounds(paths: RetrainPaths) -> list[Round]:
    """Returns the rounds that were stopped before their end, ordered by key."""
    rounds = [Round(paths, key) for key in sorted(list_folders(paths.rounds))]
    return [round for round in rounds if not round.is_done and round.read("decided") is not None]


def add_audit_entry(paths: RetrainPaths, id: str, kind: str, reason: str, details: dict[str, Any]) -> None:
    """Adds an entry to the audit record, unless one with this id exists; several processes may do so at once.

    Args:
        kind: `promoted`, `gate refused`, `data refused`, `superseded` or `rolled back`.
    """
    who = f"{user_name()}@{platform.node()} (process {os.getpid()})"
    new_entry = {"id": id, "when": current_time(), "who": who, "what": kind, "why": reason, **details}
    while not any(entry["id"] == id for entry in read_audit_entries(paths)):
        number = max((int(name.removesuffix(".json")) for name in list_files(paths.audit)), default=0) + 1
        # If another process has taken this number, the loop tries the next one.
        put_json(paths.entry(number), new_entry, if_absent=True)


def read_audit_entries(paths: RetrainPaths) -> list[dict[str, Any]]:
    """Returns the entries of the audit record, oldest first."""
    return read_all_json(paths.audit / name for name in sorted(list_files(paths.audit)))


def current_time() -> str:
    """Returns the time, ISO 8601 (UTC)."""
    return datetime.now(UTC).isoformat(timespec="seconds")
