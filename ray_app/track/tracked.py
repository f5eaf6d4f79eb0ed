"""`tracking.json`: which MLflow run a run has, and how far that has been fed."""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass, fields

from ray_app.record.files import put_json, read_json
from ray_app.record.paths import RunPaths
from ray_app.track.points import OWN, Sent


@dataclass
class Tracked(Sent):
    """What `tracking.json` holds besides what was sent.

    Args:
        run_uuid: What the MLflow run is tagged with; stored before the run is created.
        run_id: Id of the MLflow run.
        uri: Where it is, without credentials.
    """

    run_uuid: str = ""
    run_id: str | None = None
    uri: str = ""

    @classmethod
    def load(cls, paths: RunPaths) -> Tracked:
        """As the last driver left it; new, and stored at once, if there was none."""
        stored = read_json(paths.tracking)
        if stored is not None:
            if isinstance(stored.get("evaluations"), list):  # of a run that was started before evaluators had names
                stored["evaluations"] = {OWN: stored["evaluations"]}
            return cls(**{name: value for name, value in stored.items() if name in {item.name for item in fields(cls)}})
        cursor = cls(run_uuid=uuid.uuid4().hex)
        cursor.store(paths)
        return cursor

    def store(self, paths: RunPaths) -> None:
        """Writes `tracking.json`."""
        put_json(paths.tracking, asdict(self))

    def forget(self) -> None:
        """Begins anew: MLflow has nothing."""
        self.sent_step, self.evaluations, self.look = 0, {}, ""
