"""Files of any size to MLflow's artifacts, and back to see whether they arrived: with time in proportion, and again after an outage."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ray_app.errors import RegistryError
from ray_app.record.redact import redact

logger = logging.getLogger(__name__)

_LEAST_S, _SLOWEST_BYTES_S = 60.0, 5e6
_PAUSES_S = (1.0, 5.0)
"""Before the second and the third try."""
_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
T = TypeVar("T")


def seconds_for(num_bytes: int) -> float:
    """How long one request with so many bytes may take: a server answers when it has passed them on to where they are kept."""
    return _LEAST_S + num_bytes / _SLOWEST_BYTES_S


def upload(client: Any, run_id: str, place: str, folder: Path) -> str:
    """Logs a folder as artifacts and reads it back; returns its URI.

    Raises:
        RegistryError: What was stored differs.
        Exception: Whatever MLflow raises, three times.
    """
    from mlflow.utils.uri import append_to_uri_path

    wanted = _digests(folder)
    largest = max((file.stat().st_size for file in folder.rglob("*") if file.is_file()), default=0)
    with _patient(largest), tempfile.TemporaryDirectory() as temporary:
        _tried(lambda: client.log_artifacts(run_id, str(folder), place))
        got = _digests(Path(_tried(lambda: client.download_artifacts(run_id, place, temporary))))
    wrong = [name for name, digest in wanted.items() if got.get(name) != digest]
    if wrong:
        raise RegistryError(f"MLflow stored other files than were uploaded to {place} of its run {run_id}: {', '.join(wrong)}.")
    return str(append_to_uri_path(client.get_run(run_id).info.artifact_uri, place))


def _tried(call: Callable[[], T]) -> T:
    """What a call returns that may be done again: with the same files in the same place."""
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException

    for pause_s in _PAUSES_S:
        try:
            return call()
        except (MlflowException, RequestException) as error:
            logger.warning("The model's files did not get to MLflow, will try again: %s", redact(str(error)))
            time.sleep(pause_s)
    return call()


@contextmanager
def _patient(num_bytes: int) -> Iterator[None]:
    """Lets MLflow's requests take as long as such a file may need; elsewhere they end soon, since training does not wait for a server."""
    before = os.environ.get(_TIMEOUT)
    os.environ[_TIMEOUT] = str(int(max(seconds_for(num_bytes), float(before or 0))))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_TIMEOUT, None)
        else:
            os.environ[_TIMEOUT] = before


def _digests(folder: Path) -> dict[str, str]:
    return {str(f.relative_to(folder)): _digest(f) for f in sorted(folder.rglob("*")) if f.is_file()}


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
