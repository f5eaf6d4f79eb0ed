"""Every path of the retrainings of a model, as properties of one class."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from ray_app.config.config import Config
from ray_app.record.files import Location, location

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
        return cls(location(config.run.storage_path) / "retraining" / folder_name(str(config.tracking.registered_model)))

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
    """A model's name as a folder and the beginning of run names; another one where it has characters that these may not have."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", model)[:_NAME_CHARS].strip("._-")
    if plain == model:
        return model
    return f"{plain or 'model'}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"
