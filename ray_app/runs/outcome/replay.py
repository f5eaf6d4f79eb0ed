"""Sends what MLflow lacks of a run that has ended."""

from __future__ import annotations

from dataclasses import dataclass

from ray_app.errors import TrackingError
from ray_app.record.ends import put_summary
from ray_app.record.files import location, read_json
from ray_app.record.lease import acquire
from ray_app.record.paths import RunPaths
from ray_app.record.redact import redact
from ray_app.runs.outcome.closing import late_tracker, mlflow_status, newest_start, settle, stored_job
from ray_app.runs.outcome.summary import summarize
from ray_app.track.runs import check_available


@dataclass(frozen=True)
class Replayed:
    """What was sent.

    Args:
        run_id: Id of the MLflow run.
        uri: Where it is, without credentials.
        status: How the run ended, as MLflow calls it.
        points: Points that MLflow lacked, evaluations among them.
        evaluations: Evaluations that it lacked.
    """

    run_id: str
    uri: str
    status: str
    points: int
    evaluations: int


def replay(root: str, uri: str | None = None, experiment: str | None = None) -> Replayed:
    """Sends what MLflow lacks of a run that no driver writes; nothing twice, and in the order of the record.

    Args:
        root: The run's directory, as a path or an S3 URI.
        uri: MLflow tracking URI; not given: the run's own.
        experiment: Name of the experiment, for a run that MLflow does not know; not given: the run's own.

    Raises:
        ConfigError: There is no such run, a driver writes it, or MLflow is no database or server.
        TrackingError: MLflow did not take everything; what it took is not sent again.
    """
    paths = RunPaths(location(root))
    newest_start(paths)
    with acquire(paths, closing=True):
        job = stored_job(paths)
        config = job.config.replace(tracking__enabled=True)
        config = config if uri is None else config.replace(tracking__uri=uri)
        config = config if experiment is None else config.replace(tracking__experiment=experiment)
        check_available(config)
        status = settle(job, newest_start(paths))
        tracker = late_tracker(job, config if uri or experiment else job.config)
        try:
            tracker.send_all(mlflow_status(status))
        except Exception as error:
            raise TrackingError(
                f"MLflow at {redact(tracker.uri)} did not take everything: {type(error).__name__}: {redact(str(error))}\n"
                f"It took {tracker.sent_points} points now, which are not sent again. Try again when it can be reached."
            ) from error
        if (read_json(paths.summary) or {}).get("mlflow_run_id") != tracker.run_id:
            put_summary(paths, summarize(job, status))
        return Replayed(str(tracker.run_id), redact(tracker.uri), mlflow_status(status), tracker.sent_points, tracker.sent_evaluations)
