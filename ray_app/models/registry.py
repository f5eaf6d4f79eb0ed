"""Versions of registered models in MLflow: registration, promotion, rollback, download and tags.

A process that loads `models:/name@champion` gets a complete, verified version at any moment. A version is created only
of files that were uploaded and read back, with all its tags, and a promotion moves the alias `champion` in its last
call. So a crash at any point leaves the old champion serving, and repeating the call completes it.

All functions also raise whatever MLflow raises, mostly because it cannot be reached. Uploads have a timeout in
proportion to the size of the files, and are repeated after an outage.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from torch import Tensor

from ray_app.checkpoint.format import params_digest
from ray_app.data.dataset import sha256
from ray_app.errors import ConfigError, RegistryError
from ray_app.models import loader
from ray_app.models.package import Package
from ray_app.process import set_variables
from ray_app.retry import Retry
from ray_app.runlog.redaction import redact
from ray_app.torch_private import exported_parameters
from ray_app.track.mlflow_client import connect

logger = logging.getLogger(__name__)

_MIN_TIMEOUT_S, _MIN_BYTES_PER_S = 60.0, 5e6
_RETRY = Retry(1.0, factor=5.0, attempts=3)
_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
T = TypeVar("T")


def request_timeout_s(num_bytes: int) -> float:
    """Returns the seconds for a request: a server answers only after it has written the bytes."""
    return _MIN_TIMEOUT_S + num_bytes / _MIN_BYTES_PER_S


def upload(client: Any, run_id: str, path: str, folder: Path) -> str:
    """Logs a folder as artifacts and returns its URI; raises RegistryError if the stored files differ."""
    from mlflow.utils.uri import append_to_uri_path

    expected = _digests(folder)
    largest = max((file.stat().st_size for file in folder.rglob("*") if file.is_file()), default=0)
    # Outside of this block the timeout is short, since training does not wait for a server.
    timeout_s = max(request_timeout_s(largest), float(os.environ.get(_TIMEOUT, "0")))
    with set_variables(**{_TIMEOUT: str(int(timeout_s))}), tempfile.TemporaryDirectory() as temporary:
        _retry(lambda: client.log_artifacts(run_id, str(folder), path))
        stored = _digests(Path(_retry(lambda: client.download_artifacts(run_id, path, temporary))))
    wrong = [name for name, digest in expected.items() if stored.get(name) != digest]
    if wrong:
        raise RegistryError(
            f"MLflow stored other files than were uploaded to {path} of its run {run_id}: {', '.join(wrong)}."
        )
    return str(append_to_uri_path(client.get_run(run_id).info.artifact_uri, path))


def _retry(call: Callable[[], T]) -> T:
    """Returns the result of a call, which is repeated after an error; it must be idempotent."""
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException

    return _RETRY.call(call, (MlflowException, RequestException), "Sending or reading back the model's files")


def _digests(folder: Path) -> dict[str, str]:
    return {str(f.relative_to(folder)): sha256(f) for f in sorted(folder.rglob("*")) if f.is_file()}


CHAMPION, CHALLENGER = "champion", "challenger"
RUN_UUID, PARAMS_DIGEST = "ray_app.run_uuid", "ray_app.params_digest"
_REGISTERED = "ray_app.registered_at"
_PROMOTED_BECAUSE = "ray_app.promoted_because"
_PROMOTED_AT = "ray_app.promoted_at"
_PROMOTED_BY = "ray_app.promoted_by"
_REPLACES = "ray_app.replaces"
_PROMOTION_TAGS = (_PROMOTED_BECAUSE, _PROMOTED_AT, _PROMOTED_BY, _REPLACES)
_EARLIER_PROMOTION = "ray_app.promoted_before"
"""Tag with the promotion tags that a version had before its newest promotion.

If that promotion was interrupted, a rollback to the version restores them and removes the tag. If it was completed, the
tag is removed when the version stops serving: by the promotion of another version, or by a rollback.
"""
FIRST_REASON, _FIRST_VERSION = "first version", "1"
"""The promotion reason of the very first version, and its number, which MLflow never reuses after a deletion."""
_ROLLED_BACK_BECAUSE = "ray_app.rolled_back_because"
_ROLLED_BACK_AT = "ray_app.rolled_back_at"
_ROLLED_BACK_BY = "ray_app.rolled_back_by"
_ROLLBACK_TAGS = (_ROLLED_BACK_BECAUSE, _ROLLED_BACK_AT, _ROLLED_BACK_BY)
_TAG_CHARS = 5000
_EARLIER_TAG_CHARS = 1000


@dataclass(frozen=True)
class Registered:
    """A version of a registered model."""

    name: str
    version: str
    aliases: tuple[str, ...]


def find(client: Any, name: str, run_uuid: str, params_digest: str) -> Registered | None:
    """Returns the complete version of a run's parameters, None if there is none."""
    version = _find_version(client, name, run_uuid, params_digest)
    return _registered(client, version) if version is not None and _REGISTERED in version.tags else None


def register(
    client: Any,
    name: str,
    run_id: str,
    run_uuid: str,
    params_digest: str,
    tags: dict[str, str],
    package: Callable[[Path], Package],
    by: str,
    first_serves: bool = True,
) -> Registered:
    """Makes a package the newest version of a model, and the `challenger`.

    The very first version also becomes `champion`, unless `first_serves` is false. The same parameters of the same run
    become one version, however often this is called and wherever an earlier call was interrupted; a complete version is
    returned unchanged.

    Args:
        name: Name of the model, which is created if it does not exist.
        run_id: The MLflow run that the files are logged to, in a new folder below `models`: a version's files are never
            written again.
        package: Makes the package in a new folder; called only if an upload is needed.

    Raises:
        RegistryError: MLflow stored other files than were uploaded; no version was created.
    """
    version = _find_version(client, name, run_uuid, params_digest)
    if version is None:
        tags = {RUN_UUID: run_uuid, PARAMS_DIGEST: params_digest, **tags}
        with tempfile.TemporaryDirectory() as temporary:
            packaged = package(Path(temporary) / "package")
            source = upload(client, run_id, f"models/{params_digest[:16]}-{uuid.uuid4().hex[:8]}", packaged.folder)
            tags |= {"ray_app.format": packaged.format, "ray_app.outputs": packaged.outputs}
            tags |= {"ray_app.refused": "; ".join(packaged.refused)} if packaged.refused else {}
        _unless("RESOURCE_ALREADY_EXISTS", lambda: client.create_registered_model(name))
        tags = {tag: str(value)[:_TAG_CHARS] for tag, value in tags.items()}
        version = client.create_model_version(name, source, run_id, tags=tags)
    if _REGISTERED not in version.tags:
        client.set_registered_model_alias(name, CHALLENGER, version.version)
        if first_serves and str(version.version) == _FIRST_VERSION and champion_of(client, name) is None:
            promote(client, name, version.version, FIRST_REASON, by)
        client.set_model_version_tag(name, version.version, _REGISTERED, _now())
    return _registered(client, version)


def champion_of(client: Any, name: str) -> str | None:
    """Returns the number of the champion, None if the model or the alias does not exist."""
    model = _find_model(client, name)
    return None if model is None or CHAMPION not in model.aliases else str(model.aliases[CHAMPION])


def promote(client: Any, name: str, version: str, reason: str, by: str) -> bool:
    """Makes a version the champion; records the reason first, and moves the alias in the last call.

    The rollback tags of the promoted version are removed, and also those of the champion until now, which has some only
    if its rollback was interrupted before the alias moved. Returns False if the version was the champion already.

    Raises:
        RegistryError: The reason is empty, or there is no such version; nothing is changed.
    """
    if not reason.strip():
        raise RegistryError(
            f"Promoting version {version} of {name!r} needs a reason: why is it better than the champion?"
        )
    before = champion_of(client, name)
    if before == str(version):
        return False
    promoted = _need_version(client, name, version)
    _delete_tags(client, promoted, *_ROLLBACK_TAGS)
    if before is not None:
        _delete_tags(client, _need_version(client, name, before), *_ROLLBACK_TAGS, _EARLIER_PROMOTION)
    if _EARLIER_PROMOTION not in promoted.tags:
        earlier = {tag: promoted.tags[tag][:_EARLIER_TAG_CHARS] for tag in _PROMOTION_TAGS if tag in promoted.tags}
        client.set_model_version_tag(name, version, _EARLIER_PROMOTION, json.dumps(earlier, ensure_ascii=False))
    for tag, value in zip(_PROMOTION_TAGS, (reason[:_TAG_CHARS], _now(), by, before or "none"), strict=True):
        client.set_model_version_tag(name, version, tag, value)
    client.set_registered_model_alias(name, CHAMPION, version)
    return True


def _delete_tags(client: Any, version: Any, *tags: str) -> None:
    for tag in tags:
        if tag in version.tags:
            client.delete_model_version_tag(version.name, version.version, tag)


@dataclass(frozen=True)
class Rollback:
    """A return to the previous champion.

    Args:
        to: The version that serves again.
        at: The time, ISO 8601 (UTC).
    """

    version: str
    to: str
    reason: str
    at: str
    by: str


def rollback(client: Any, name: str, reason: str, by: str) -> Rollback:
    """Makes the version that the champion replaced serve again, and records the reason.

    The reason is recorded first, at the version that is rolled back. The version that serves again keeps the tags of
    its promotion, so a second rollback goes further back, never to a version that was rolled back. A repeated call with
    the same reason, for example after a lost response, returns the recorded rollback and changes nothing.

    Raises:
        RegistryError: The reason is empty, there is no champion, it replaced no version, or that version was rolled
            back itself; nothing is changed.
    """
    if not reason.strip():
        raise RegistryError(f"A rollback of {name!r} needs a reason: what is wrong with the champion?")
    now = champion_of(client, name)
    if now is None:
        raise RegistryError(f"{name!r} has no champion that could be rolled back.")
    current = client.get_model_version(name, now)
    for last in rollbacks(client, name)[-1:]:
        is_same = (last.to, last.reason) == (now, reason[:_TAG_CHARS])
        if is_same and last.at >= current.tags.get(_PROMOTED_AT, ""):
            return last
    before = current.tags.get(_REPLACES, "none")
    if before == "none":
        raise RegistryError(
            f"Version {now} of {name!r} replaced no other champion, so no rollback is possible. Promote another version"
            " with ray-app register --promote."
        )
    back_to = _need_version(client, name, before)
    tags = back_to.tags
    if _ROLLED_BACK_AT in tags:
        raise RegistryError(
            f"Version {now} of {name!r} replaced version {before}, which was rolled back itself:"
            f" {tags.get(_ROLLED_BACK_BECAUSE, '')}. Promote another version with ray-app register --promote."
        )
    _delete_tags(client, current, _EARLIER_PROMOTION)
    # A promotion of the version began and was interrupted, so its earlier tags are restored.
    if _EARLIER_PROMOTION in tags:
        for tag, value in json.loads(tags[_EARLIER_PROMOTION]).items():
            client.set_model_version_tag(name, before, tag, value)
        _delete_tags(client, back_to, _EARLIER_PROMOTION)
    new_rollback = Rollback(now, before, reason[:_TAG_CHARS], _now(), by)
    for tag, value in zip(_ROLLBACK_TAGS, (new_rollback.reason, new_rollback.at, by), strict=True):
        client.set_model_version_tag(name, now, tag, value)
    client.set_registered_model_alias(name, CHAMPION, before)
    return new_rollback


def rollbacks(client: Any, name: str) -> list[Rollback]:
    """Returns the recorded rollbacks, oldest first, without one that was interrupted before the alias moved."""
    serving = champion_of(client, name)
    recorded = []
    for v in client.search_model_versions(_filter("name", name)):
        if _ROLLED_BACK_AT in v.tags and str(v.version) != serving:
            reason, at, by = (v.tags.get(tag, "") for tag in _ROLLBACK_TAGS)
            recorded.append(Rollback(str(v.version), v.tags.get(_REPLACES, "none"), reason, at, by))
    return sorted(recorded, key=lambda one: one.at)


def _unless(code: str, call: Callable[[], T]) -> T | None:
    """Returns the result of a call; None if MLflow answers with this error code."""
    from mlflow.exceptions import MlflowException

    try:
        return call()
    except MlflowException as error:
        if error.error_code != code:
            raise
        return None


def _need_version(client: Any, name: str, version: str) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version(name, version)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise RegistryError(f"{name!r} has no version {version!r}: {error.message}") from error


def _find_model(client: Any, name: str) -> Any | None:
    return _unless("RESOURCE_DOES_NOT_EXIST", lambda: client.get_registered_model(name))


def _find_version(client: Any, name: str, run_uuid: str, params_digest: str) -> Any | None:
    """Returns the oldest version with these parameters of this run, complete or not."""
    same_run = _filter("name", name) + " and " + _filter(f"tags.`{RUN_UUID}`", run_uuid)
    versions = [v for v in client.search_model_versions(same_run) if v.tags.get(PARAMS_DIGEST) == params_digest]
    return min(versions, key=lambda v: int(v.version), default=None)


def _registered(client: Any, version: Any) -> Registered:
    model = _find_model(client, version.name)
    aliases, number = model.aliases if model is not None else {}, str(version.version)
    return Registered(version.name, number, tuple(sorted(alias for alias, v in aliases.items() if str(v) == number)))


def _filter(key: str, value: str) -> str:
    if "'" in value:
        raise RegistryError(f"{value!r} holds a quote; use a name without quotes.")
    return f"{key} = '{value}'"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


_URI = re.compile(r"models:/([^/@]+)(?:@([\w-]+)|/(\d+))")


@dataclass(frozen=True)
class Version:
    """A version of a registered model as MLflow stores it."""

    name: str
    version: str
    run_id: str
    source: str
    tags: dict[str, str]

    @property
    def params_digest(self) -> str:
        """The digest of its parameters; empty if it was not registered by this application."""
        return self.tags.get(PARAMS_DIGEST, "")

    @property
    def age_days(self) -> float | None:
        """The days since its promotion; None if it was not promoted."""
        at = self.tags.get("ray_app.promoted_at")
        return None if at is None else (time.time() - datetime.fromisoformat(at).timestamp()) / 86400


def version_of(client: Any, name: str, version: str) -> Version:
    """Fetches a version from MLflow."""
    stored = client.get_model_version(name, version)
    return Version(name, str(version), stored.run_id, stored.source, dict(stored.tags))


def versions_with_tag(client: Any, name: str, tag: str, value: str) -> list[str]:
    """Returns the numbers of the versions of a model with a tag of a value; none if there is no such model."""
    return [str(v.version) for v in client.search_model_versions(f"name = '{name}'") if v.tags.get(tag) == value]


def resolve_version(uri: str, model: str) -> Version:
    """Returns the version of a model URI; raises ConfigError if it is malformed, or there is no version."""
    from mlflow.exceptions import MlflowException

    match = _URI.fullmatch(model)
    if match is None:
        raise ConfigError(
            f"The model is {model!r}; it must be models:/NAME@ALIAS or models:/NAME/VERSION, such as"
            " models:/m@champion, or the folder of an export."
        )
    name, alias, version = match.groups()
    client = connect(uri)
    try:
        return version_of(client, name, version or str(client.get_model_version_by_alias(name, alias).version))
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise ConfigError(
            f"MLflow has no {model}: {error.message} `mlflow ui` lists the models; ray-app register adds one."
        ) from error


def download_version(uri: str, version: Version, folder: Path) -> Path:
    """Downloads a version that ray_app packaged, without its code; returns the folder with `package.json`."""
    from mlflow.artifacts import download_artifacts

    if not version.params_digest:
        raise RegistryError(
            f"Version {version.version} of {version.name!r} was not packaged by ray_app. Use a version that ray-app"
            " register, or a run with tracking.registered_model, has created."
        )
    return Path(download_artifacts(artifact_uri=f"{version.source}/data/model", dst_path=str(folder), tracking_uri=uri))


def load_parameters(folder: Path) -> dict[str, Tensor]:
    """Loads parameters and persistent buffers of a package; raises RegistryError for others than packaged."""
    described = loader.describe(folder)
    if (folder / loader.WEIGHTS).exists():
        parameters = safetensors.torch.load_file(folder / loader.WEIGHTS)
    else:
        with loader.rewrite_checked(folder / loader.EXPORTED) as checked:
            state = exported_parameters(checked)
        parameters = {name: values.detach().clone().contiguous() for name, values in state.items()}
    if params_digest(parameters) != described["params_digest"]:
        raise RegistryError(
            f"{folder} holds the parameters {params_digest(parameters)}, but its description says"
            f" {described['params_digest']}."
        )
    return parameters


def tag_version(client: Any, version: Version, tags: dict[str, str]) -> None:
    """Adds tags to a version, and overwrites existing ones."""
    for name, value in tags.items():
        client.set_model_version_tag(version.name, version.version, name, redact(value)[:_TAG_CHARS])


def tag_model(client: Any, name: str, tags: dict[str, str]) -> None:
    """Adds tags to a registered model; does nothing if the model does not exist yet."""
    for key, value in tags.items():
        text = redact(value)[:_TAG_CHARS]
        _unless("RESOURCE_DOES_NOT_EXIST", partial(client.set_registered_model_tag, name, key, text))


def log_metrics(client: Any, version: Version, metrics: dict[str, float], time_s: float) -> None:
    """Adds metrics to the MLflow run of a version, once for a time in seconds since 1970 (UTC)."""
    from mlflow.entities import Metric

    client.log_batch(version.run_id, [Metric(name, value, int(time_s * 1000), 0) for name, value in metrics.items()])
