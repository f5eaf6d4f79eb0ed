"""Back to the champion before, with the reason in the audit record."""

from __future__ import annotations

from typing import Any

from ray_app.config.config import Config, default_tracking_uri
from ray_app.models.registry import Rollback, rollback, rollbacks
from ray_app.record.lease import Lease, acquire, forget_older
from ray_app.record.paths import RunPaths
from ray_app.retrain.paths import RetrainPaths
from ray_app.retrain.rounds import audit, entries
from ray_app.runs.outcome.registering import user
from ray_app.track.client import connect


def roll_back(config: Config, reason: str) -> Rollback:
    """Lets the version serve again that the champion replaced.

    Raises:
        RunHeldError: Somebody else moves the alias at this moment, and does not get done.
        RegistryError: There is no reason, no champion, or nothing that it replaced.
        Exception: Whatever MLflow raises; the champion serves on.
    """
    paths, name = RetrainPaths.of(config), str(config.tracking.registered_model)
    with deciding(paths):
        client = connect(default_tracking_uri(config))
        record_rollbacks(paths, client, name)
        made = rollback(client, name, reason, user())
        record_rollbacks(paths, client, name)
    return made


def deciding(paths: RetrainPaths) -> Lease:
    """The right to move a model's alias, for the seconds that this takes; waits for somebody else who does."""
    lease = acquire(RunPaths(paths.deciding), closing=True)
    forget_older(RunPaths(paths.deciding), lease.fence)
    return lease


def record_rollbacks(paths: RetrainPaths, client: Any, name: str) -> None:
    """Adds the rollbacks that MLflow knows to the audit record, also one that was stopped before it could; those that are there stay."""
    found = {f"rollback {one.version} {one.at}": one for one in rollbacks(client, name)}
    known = {entry["id"] for entry in entries(paths)} if found else set()
    for id, one in found.items():
        if id not in known:
            details = {"version": one.version, "champion": one.to, "rolled_back_at": one.at, "by": one.by}
            audit(paths, id, "rolled back", one.reason, details)
