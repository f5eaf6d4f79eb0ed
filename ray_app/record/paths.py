"""Every path of a run, as properties of one class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunPaths:
    """The layout of one run directory.

    Args:
        root: `<storage_path>/<run_name>`.
    """

    root: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.root.name

    @property
    def config(self) -> Path:
        """The resolved configuration of the run's first start."""
        return self.root / "config.yaml"

    @property
    def manifest(self) -> Path:
        """The row groups that the run trains on."""
        return self.root / "manifest.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of committed checkpoints."""
        return self.root / "checkpoints"

    @property
    def holds(self) -> Path:
        """Folder with one file per follower of the checkpoints."""
        return self.root / "holds"

    @property
    def evaluations(self) -> Path:
        """Folder with one file per evaluated step."""
        return self.root / "evaluations"

    @property
    def metrics(self) -> Path:
        """Folder of rank 0's metrics by step."""
        return self.root / "metrics"

    @property
    def events(self) -> Path:
        """Folder with one file per event."""
        return self.root / "events"

    @property
    def summary(self) -> Path:
        """What came of the run."""
        return self.root / "summary.json"

    @property
    def tracking(self) -> Path:
        """The MLflow run and how far it has been fed."""
        return self.root / "tracking.json"

    @property
    def fences(self) -> Path:
        """Folder with one file per driver start; the highest number may write."""
        return self.root / "fences"

    def fence(self, number: int) -> Path:
        """The file that claims a fence."""
        return self.fences / f"{number:04d}.json"

    def checkpoint(self, step: int, fence: int) -> Path:
        """Folder of one checkpoint."""
        return self.checkpoints / f"step-{step:08d}-{fence:04d}"

    def evaluation(self, step: int) -> Path:
        """The evaluation of the checkpoint at a step."""
        return self.evaluations / f"step-{step:08d}.json"

    def ray_storage(self, fence: int) -> Path:
        """What Ray Train writes for itself during one `fit()`."""
        return self.root / f"ray-{fence}"
