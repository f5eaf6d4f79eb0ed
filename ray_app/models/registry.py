"""The model registry: packages become versions, once each, and `champion` is an alias that moves last.

Whoever serves `models:/name@champion` gets a whole, verified version at any moment: a version is made only of files
that were uploaded and read back, all its tags are there from its first moment, and a promotion changes what is served
in its last call. So a crash anywhere leaves the old champion serving, and doing the same again completes it.

Files of any size to MLflow's artifacts, and back to see whether they arrived: with time in proportion, and again after
an outage.

Versions of a registered model: what is known of one, its package, its parameters, and more tags.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from torch import Tensor

from ray_app.checkpoint.format import params_digest
from ray_app.errors import ConfigError, RegistryError
from ray_app.models import loader
from ray_app.models.package import Package
from ray_app.runlog.redaction import redact
from ray_app.track.mlflow_client import connect

logger = logging.getLogger(__name__)

_MIN_TIMEOUT_S, _MIN_BYTES_PER_S = 60.0, 5e6
_PAUSES_S = (1.0, 5.0)
"""Before the second and the third try."""
_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
T = TypeVar("T")


def request_timeout_s(num_bytes: int) -> float:
    """How long one request with so many bytes may take: a server answers when it has passed them on to where they are
    kept.
    """
    return _MIN_TIMEOUT_S + num_bytes / _MIN_BYTES_PER_S


def upload(client: Any, run_id: str, place: str, folder: Path) -> str:
    """Logs a folder as artifacts and reads it back; returns its URI.

    Raises:
        RegistryError: What was stored differs.
        Exception: Whatever MLflow raises, three times.
    """
    from mlflow.utils.uri import append_to_uri_path

    wanted = _digests(folder)
    largest = max((file.stat().st_size for file in folder.rglob("*") if file.is_file()), default=0)
    with _request_timeout(largest), tempfile.TemporaryDirectory() as temporary:
        _retry(lambda: client.log_artifacts(run_id, str(folder), place))
        got = _digests(Path(_retry(lambda: client.download_artifacts(run_id, place, temporary))))
    wrong = [name for name, digest in wanted.items() if got.get(name) != digest]
    if wrong:
        raise RegistryError(
            f"MLflow stored other files than were uploaded to {place} of its run {run_id}: {', '.join(wrong)}."
        )
    return str(append_to_uri_path(client.get_run(run_id).info.artifact_uri, place))


def _retry(call: Callable[[], T]) -> T:
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
def _request_timeout(num_bytes: int) -> Iterator[None]:
    """Lets MLflow's requests take as long as such a file may need; elsewhere they end soon, since training does not
    wait for a server.
    """
    before = os.environ.get(_TIMEOUT)
    os.environ[_TIMEOUT] = str(int(max(request_timeout_s(num_bytes), float(before or 0))))
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


CHAMPION, CHALLENGER = "champion", "challenger"
RUN_UUID, PARAMS_DIGEST = "ray_app.run_uuid", "ray_app.params_digest"
_REGISTERED = "ray_app.registered_at"
_PROMOTED_BECAUSE, _PROMOTED_AT, _PROMOTED_BY, _REPLACES = (
    "ray_app.promoted_because",
    "ray_app.promoted_at",
    "ray_app.promoted_by",
    "ray_app.replaces",
)
_PROMOTION_TAGS = (_PROMOTED_BECAUSE, _PROMOTED_AT, _PROMOTED_BY, _REPLACES)
_EARLIER_PROMOTION = "ray_app.promoted_before"
"""What a version's tags said before its newest promotion: a rollback to it says that again, if that promotion was
stopped. The next that happens to a version that serves removes it.
"""
FIRST_REASON, _FIRST_VERSION = "first version", "1"
"""Why the first version of all serves, and its number, which MLflow gives to no other, also when it is deleted."""
_ROLLED_BACK_BECAUSE, _ROLLED_BACK_AT, _ROLLED_BACK_BY = (
    "ray_app.rolled_back_because",
    "ray_app.rolled_back_at",
    "ray_app.rolled_back_by",
)
_TAG_CHARS = 5000
_EARLIER_TAG_CHARS = 1000


@dataclass(frozen=True)
class Registered:
    """A version of a registered model.

    Args:
        name: Name of the model.
        version: Its version.
        aliases: The aliases that point to it.
    """

    name: str
    version: str
    aliases: tuple[str, ...]


def find(client: Any, name: str, run_uuid: str, params_digest: str) -> Registered | None:
    """The complete version that a run's parameters became already, or None."""
    found = _find_version(client, name, run_uuid, params_digest)
    return _registered(client, found) if found is not None and _REGISTERED in found.tags else None


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
    """Makes a package the newest version of a model, and the `challenger`; the first version of all becomes `champion`
    too.

    The same parameters of the same run become one version, however often this is called and wherever it was stopped
    before; a version that is complete is returned as it is.

    Args:
        client: MLflow's client.
        name: Name of the model, made when it is not there.
        run_id: The MLflow run that the files are logged to, in a new folder below `models`: a version's files are never
            written again.
        run_uuid: What identifies the run.
        params_digest: What identifies the parameters.
        tags: More tags of the version.
        package: Makes the package in a new folder; not called if there is nothing to upload.
        by: Who does it.
        first_serves: Whether the first version of all becomes the champion at once.

    Raises:
        RegistryError: What MLflow stored is not what was uploaded; no version was made.
        Exception: Whatever MLflow raises, mostly because it cannot be reached.
    """
    version = _find_version(client, name, run_uuid, params_digest)
    if version is None:
        tags = {RUN_UUID: run_uuid, PARAMS_DIGEST: params_digest, **tags}
        with tempfile.TemporaryDirectory() as temporary:
            made = package(Path(temporary) / "package")
            source = upload(client, run_id, f"models/{params_digest[:16]}-{uuid.uuid4().hex[:8]}", made.folder)
            tags |= {"ray_app.format": made.format, "ray_app.outputs": made.outputs}
            tags |= {"ray_app.refused": "; ".join(made.refused)} if made.refused else {}
        _create_model(client, name)
        tags = {tag: str(value)[:_TAG_CHARS] for tag, value in tags.items()}
        version = client.create_model_version(name, source, run_id, tags=tags)
    if _REGISTERED not in version.tags:
        client.set_registered_model_alias(name, CHALLENGER, version.version)
        if first_serves and str(version.version) == _FIRST_VERSION and champion_of(client, name) is None:
            promote(client, name, version.version, FIRST_REASON, by)
        client.set_model_version_tag(name, version.version, _REGISTERED, _now())
    return _registered(client, version)


def champion_of(client: Any, name: str) -> str | None:
    """The version that serves, or None if the model or the alias is not there."""
    model = _find_model(client, name)
    return None if model is None or CHAMPION not in model.aliases else str(model.aliases[CHAMPION])


def promote(client: Any, name: str, version: str, reason: str, by: str) -> bool:
    """Makes a version the champion, with the reason on record first; the one call that changes what is served comes
    last.

    What is promoted is no longer rolled back, nor is what serves until then, whose rollback was stopped before the
    alias moved.

    Args:
        client: MLflow's client.
        name: Name of the model.
        version: Which version.
        reason: Why, for those who ask later.
        by: Who decides it.

    Returns:
        Whether it was not the champion already; then nothing is changed.

    Raises:
        RegistryError: There is no reason, or no such version.
        Exception: Whatever MLflow raises; the old champion serves on.
    """
    if not reason.strip():
        raise RegistryError(
            f"Promoting version {version} of {name!r} needs a reason: why is it better than what serves now?"
        )
    before = champion_of(client, name)
    if before == str(version):
        return False
    made = _need_version(client, name, version)
    _delete_tags(client, made, _ROLLED_BACK_BECAUSE, _ROLLED_BACK_AT, _ROLLED_BACK_BY)
    if before is not None:
        _delete_tags(
            client,
            _need_version(client, name, before),
            _ROLLED_BACK_BECAUSE,
            _ROLLED_BACK_AT,
            _ROLLED_BACK_BY,
            _EARLIER_PROMOTION,
        )
    if _EARLIER_PROMOTION not in made.tags:
        was = {tag: made.tags[tag][:_EARLIER_TAG_CHARS] for tag in _PROMOTION_TAGS if tag in made.tags}
        client.set_model_version_tag(name, version, _EARLIER_PROMOTION, json.dumps(was, ensure_ascii=False))
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
    """A return to the champion before.

    Args:
        version: The version that was left.
        to: The version that serves again.
        reason: Why.
        at: When, ISO 8601 (UTC).
        by: Who decided it.
    """

    version: str
    to: str
    reason: str
    at: str
    by: str


def rollback(client: Any, name: str, reason: str, by: str) -> Rollback:
    """Makes the version that the champion replaced serve again; the reason goes on record first, at the version that is
    left.

    The tags of the version that serves again are those with which it served, so a second rollback goes back further,
    never to one that was left. The same reason once more is the same rollback, of which the answer was lost.

    Raises:
        RegistryError: There is no reason, no champion, nothing that it replaced, or that was rolled back itself;
            nothing is changed.
        Exception: Whatever MLflow raises; the champion serves on.
    """
    if not reason.strip():
        raise RegistryError(f"A rollback of {name!r} needs a reason: what is wrong with what serves now?")
    now = champion_of(client, name)
    if now is None:
        raise RegistryError(f"{name!r} has no champion that could be rolled back.")
    leaves = client.get_model_version(name, now)
    done = rollbacks(client, name)[-1:]
    if (
        done
        and (done[0].to, done[0].reason) == (now, reason[:_TAG_CHARS])
        and done[0].at >= leaves.tags.get(_PROMOTED_AT, "")
    ):
        return done[0]
    before = leaves.tags.get(_REPLACES, "none")
    if before == "none":
        raise RegistryError(
            f"Version {now} of {name!r} replaced no other champion, so there is none to go back to. Promote another"
            " version with ray-app register --promote."
        )
    back_to = _need_version(client, name, before)
    left = back_to.tags
    if _ROLLED_BACK_AT in left:
        raise RegistryError(
            f"Version {now} of {name!r} replaced version {before}, which was rolled back itself:"
            f" {left.get(_ROLLED_BACK_BECAUSE, '')}. Promote another version with ray-app register --promote."
        )
    _delete_tags(client, leaves, _EARLIER_PROMOTION)
    if _EARLIER_PROMOTION in left:  # somebody began to promote it, and was stopped
        for tag, value in json.loads(left[_EARLIER_PROMOTION]).items():
            client.set_model_version_tag(name, before, tag, value)
        _delete_tags(client, back_to, _EARLIER_PROMOTION)
    made = Rollback(now, before, reason[:_TAG_CHARS], _now(), by)
    for tag, value in ((_ROLLED_BACK_BECAUSE, made.reason), (_ROLLED_BACK_AT, made.at), (_ROLLED_BACK_BY, by)):
        client.set_model_version_tag(name, now, tag, value)
    client.set_registered_model_alias(name, CHAMPION, before)
    return made


def rollbacks(client: Any, name: str) -> list[Rollback]:
    """The rollbacks that MLflow has on record, oldest first; one that was stopped before the alias moved is none."""
    serves = champion_of(client, name)
    found = [
        Rollback(
            str(v.version),
            v.tags.get(_REPLACES, "none"),
            v.tags.get(_ROLLED_BACK_BECAUSE, ""),
            v.tags[_ROLLED_BACK_AT],
            v.tags.get(_ROLLED_BACK_BY, ""),
        )
        for v in client.search_model_versions(_filter("name", name))
        if _ROLLED_BACK_AT in v.tags and str(v.version) != serves
    ]
    return sorted(found, key=lambda one: one.at)


def _create_model(client: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _need_version(client: Any, name: str, version: str) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version(name, version)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise RegistryError(f"{name!r} has no version {version!r}: {error.message}") from error


def _find_model(client: Any, name: str) -> Any | None:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _find_version(client: Any, name: str, run_uuid: str, params_digest: str) -> Any | None:
    """The oldest version with these parameters of this run, complete or not."""
    same_run = _filter("name", name) + " and " + _filter(f"tags.`{RUN_UUID}`", run_uuid)
    found = [v for v in client.search_model_versions(same_run) if v.tags.get(PARAMS_DIGEST) == params_digest]
    return min(found, key=lambda v: int(v.version), default=None)


def _registered(client: Any, version: Any) -> Registered:
    model = _find_model(client, version.name)
    aliases = model.aliases if model is not None else {}
    return Registered(
        version.name,
        str(version.version),
        tuple(sorted(a for a, v in aliases.items() if str(v) == str(version.version))),
    )


def _filter(key: str, value: str) -> str:
    if "'" in value:
        raise RegistryError(f"{value!r} holds a quote; name the model without.")
    return f"{key} = '{value}'"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


_URI = re.compile(r"models:/([^/@]+)(?:@([\w-]+)|/(\d+))")


@dataclass(frozen=True)
class Version:
    """A version of a registered model.

    Args:
        name: Name of the model.
        version: Its number.
        run_id: The MLflow run that it comes from.
        source: Where its files are.
        tags: What is known of it.
    """

    name: str
    version: str
    run_id: str
    source: str
    tags: dict[str, str]

    @property
    def params_digest(self) -> str:
        """Digest of its parameters; empty if it was not registered by this application."""
        return self.tags.get(PARAMS_DIGEST, "")

    @property
    def age_days(self) -> float | None:
        """Days since it was promoted; None if it was not."""
        at = self.tags.get("ray_app.promoted_at")
        return None if at is None else (time.time() - datetime.fromisoformat(at).timestamp()) / 86400


def version_of(client: Any, name: str, version: str) -> Version:
    """What MLflow knows of a version."""
    found = client.get_model_version(name, version)
    return Version(name, str(version), found.run_id, found.source, dict(found.tags))


def versions_with_tag(client: Any, name: str, tag: str, value: str) -> list[str]:
    """The versions of a model that have a tag of this value; none if there is no such model."""
    return [str(v.version) for v in client.search_model_versions(f"name = '{name}'") if v.tags.get(tag) == value]


def champion(client: Any, name: str) -> Version | None:
    """The version that serves, or None."""
    serves = champion_of(client, name)
    return None if serves is None else version_of(client, name, serves)


def resolve_version(uri: str, model: str) -> Version:
    """The version that a text names.

    Args:
        uri: MLflow tracking URI; nobody is asked if the text names none.
        model: `models:/NAME@ALIAS` or `models:/NAME/VERSION`.

    Raises:
        ConfigError: It names none, or MLflow has no such version.
        Exception: Whatever else MLflow raises, mostly because it cannot be reached.
    """
    from mlflow.exceptions import MlflowException

    match = _URI.fullmatch(model)
    if match is None:
        raise ConfigError(
            f"The model is {model!r}; it must be models:/NAME@ALIAS or models:/NAME/VERSION, as models:/m@champion, or"
            " the folder of an export."
        )
    name, alias, version = match.groups()
    client = connect(uri)
    try:
        return version_of(client, name, version or str(client.get_model_version_by_alias(name, alias).version))
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise ConfigError(
            f"MLflow has no {model}: {error.message} `mlflow ui` shows what there is; ray-app register adds to it."
        ) from error


def download_version(uri: str, version: Version, folder: Path) -> Path:
    """Downloads a version's model, but not the code that it brings along; returns the folder with `package.json`.

    Args:
        uri: Tracking URI.
        version: Which one.
        folder: An empty folder to download into.

    Raises:
        RegistryError: It is none of this application.
        Exception: Whatever MLflow raises, mostly because it cannot be reached.
    """
    from mlflow.artifacts import download_artifacts

    if not version.params_digest:
        raise RegistryError(
            f"Version {version.version} of {version.name!r} was not packaged by ray_app. Give or promote a version that"
            " ray-app register, or a run with tracking.registered_model, has made."
        )
    return Path(download_artifacts(artifact_uri=f"{version.source}/data/model", dst_path=str(folder), tracking_uri=uri))


def load_parameters(folder: Path) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a package, of either format, by their names in the model.

    Args:
        folder: The folder with `package.json`.

    Raises:
        RegistryError: They are not those that were packaged.
    """
    described = loader.describe(folder)
    if (folder / loader.WEIGHTS).exists():
        found = safetensors.torch.load_file(folder / loader.WEIGHTS)
    else:
        state: Mapping[str, Tensor] = loader.load_exported(folder / loader.EXPORTED).state_dict
        found = {name.removeprefix("model."): values.detach().clone().contiguous() for name, values in state.items()}
    if params_digest(found) != described["params_digest"]:
        raise RegistryError(
            f"{folder} holds other parameters than it says: {params_digest(found)}, not {described['params_digest']}."
        )
    return found


def tag_version(client: Any, version: Version, tags: dict[str, str]) -> None:
    """Adds tags to a version; those that are there already are written over."""
    for name, value in tags.items():
        client.set_model_version_tag(version.name, version.version, name, redact(value)[:_TAG_CHARS])


def tag_model(client: Any, name: str, tags: dict[str, str]) -> None:
    """Adds tags to a registered model; if there is none of that name yet, there is nothing to add them to."""
    from mlflow.exceptions import MlflowException

    try:
        for key, value in tags.items():
            client.set_registered_model_tag(name, key, redact(value)[:_TAG_CHARS])
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise


def log_metrics(client: Any, version: Version, figures: dict[str, float], time_s: float) -> None:
    """Adds metrics to the MLflow run of a version; logged again with the same time they are there once.

    Args:
        client: MLflow's client.
        version: Which one.
        figures: Value by name.
        time_s: When they were found, seconds since 1970 (UTC).
    """
    from mlflow.entities import Metric

    client.log_batch(version.run_id, [Metric(name, value, int(time_s * 1000), 0) for name, value in figures.items()])
