"""`config.yaml` of a run: written at its first start, and again by a start that changes what does not decide the result."""

from __future__ import annotations

import logging
from dataclasses import replace

from ray_app.config.config import Config, flatten
from ray_app.record.files import put_atomic
from ray_app.record.paths import RunPaths
from ray_app.record.progress.journal import put_event
from ray_app.record.redact import guard, redacted
from ray_app.record.stored_config import parsed
from ray_app.train.job import Job

logger = logging.getLogger(__name__)


def reconfigure(job: Job) -> None:
    """Makes the stored configuration that of this start, and records what has changed; what decides the result has not.

    The classes stay as they are stored: with the arguments that were not given, as `code.json` names them.
    """
    before = parsed(job.paths, job.paths.config.read_text())
    now = replace(job.config, task=before.task, optimizer=before.optimizer, optimizers=before.optimizers, schedule=before.schedule)
    one, other = (flatten(redacted(config.to_dict())) for config in (before, now))
    changed = {name: [one.get(name), other.get(name)] for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)}
    if changed:
        put_event(job.paths, "reconfigured", job.fence, fields=changed)
    if now != before:
        put_config(job.paths, now)


def put_config(paths: RunPaths, config: Config) -> None:
    """Writes `config.yaml` whole, since the run is continued from it; with a secret in it, for its owner alone."""
    secret = guard(config.to_dict())
    put_atomic(paths.config, config.to_yaml().encode(), mode=0o600 if secret else 0o666)
    if secret:
        logger.warning(
            "The configuration holds a secret: %s is complete, and on a disk readable by its owner alone; MLflow, logs and events get it"
            " without. Secrets are better kept in environment variables.",
            paths.config,
        )
