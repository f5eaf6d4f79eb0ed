"""The model registry: packages become versions, once each, and `champion` is an alias that moves last.

Whoever serves `models:/name@champion` gets a whole, verified version at any moment: a version is made only of files that were uploaded and
read back, all its tags are there from its first moment, and a promotion changes what is served in its last call. So a crash anywhere
leaves the old champion serving, and doing the same again completes it.
"""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ray_app.errors import RegistryError
from ray_app.models.package import Package
from ray_app.models.upload import upload

CHAMPION, CHALLENGER = "champion", "challenger"
RUN_UUID, PARAMS_DIGEST = "ray_app.run_uuid", "ray_app.params_digest"
_REGISTERED = "ray_app.registered_at"
_BECAUSE, _AT, _BY, _REPLACES = "ray_app.promoted_because", "ray_app.promoted_at", "ray_app.promoted_by", "ray_app.replaces"
_WHY = (_BECAUSE, _AT, _BY, _REPLACES)
_WAS = "ray_app.promoted_before"
"""What a version's tags said before its newest promotion: a rollback to it says that again, if that promotion was stopped. The next that
happens to a version that serves removes it.
"""
FIRST, _FIRST = "first version", "1"
"""Why the first version of all serves, and its number, which MLflow gives to no other, also when it is deleted."""
_BACK_BECAUSE, _BACK_AT, _BACK_BY = "ray_app.rolled_back_because", "ray_app.rolled_back_at", "ray_app.rolled_back_by"
_TAG_CHARS = 5000
_KEPT_CHARS = 1000


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
    found = _find(client, name, run_uuid, params_digest)
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
    """Makes a package the newest version of a model, and the `challenger`; the first version of all becomes `champion` too.

    The same parameters of the same run become one version, however often this is called and wherever it was stopped before; a version that
    is complete is returned as it is.

    Args:
        client: MLflow's client.
        name: Name of the model, made when it is not there.
        run_id: The MLflow run that the files are logged to, in a new folder below `models`: a version's files are never written again.
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
    version = _find(client, name, run_uuid, params_digest)
    if version is None:
        tags = {RUN_UUID: run_uuid, PARAMS_DIGEST: params_digest, **tags}
        with tempfile.TemporaryDirectory() as temporary:
            made = package(Path(temporary) / "package")
            source = upload(client, run_id, f"models/{params_digest[:16]}-{uuid.uuid4().hex[:8]}", made.folder)
            tags |= {"ray_app.format": made.format, "ray_app.outputs": made.outputs}
            tags |= {"ray_app.refused": "; ".join(made.refused)} if made.refused else {}
        _make_model(client, name)
        tags = {tag: str(value)[:_TAG_CHARS] for tag, value in tags.items()}
        version = client.create_model_version(name, source, run_id, tags=tags)
    if _REGISTERED not in version.tags:
        client.set_registered_model_alias(name, CHALLENGER, version.version)
        if first_serves and str(version.version) == _FIRST and champion_of(client, name) is None:
            promote(client, name, version.version, FIRST, by)
        client.set_model_version_tag(name, version.version, _REGISTERED, _now())
    return _registered(client, version)


def champion_of(client: Any, name: str) -> str | None:
    """The version that serves, or None if the model or the alias is not there."""
    model = _model(client, name)
    return None if model is None or CHAMPION not in model.aliases else str(model.aliases[CHAMPION])


def promote(client: Any, name: str, version: str, reason: str, by: str) -> bool:
    """Makes a version the champion, with the reason on record first; the one call that changes what is served comes last.

    What is promoted is no longer rolled back, nor is what serves until then, whose rollback was stopped before the alias moved.

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
        raise RegistryError(f"Promoting version {version} of {name!r} needs a reason: why is it better than what serves now?")
    before = champion_of(client, name)
    if before == str(version):
        return False
    made = _need_version(client, name, version)
    _delete_tags(client, made, _BACK_BECAUSE, _BACK_AT, _BACK_BY)
    if before is not None:
        _delete_tags(client, _need_version(client, name, before), _BACK_BECAUSE, _BACK_AT, _BACK_BY, _WAS)
    if _WAS not in made.tags:
        was = {tag: made.tags[tag][:_KEPT_CHARS] for tag in _WHY if tag in made.tags}
        client.set_model_version_tag(name, version, _WAS, json.dumps(was, ensure_ascii=False))
    for tag, value in zip(_WHY, (reason[:_TAG_CHARS], _now(), by, before or "none"), strict=True):
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
    """Makes the version that the champion replaced serve again; the reason goes on record first, at the version that is left.

    The tags of the version that serves again are those with which it served, so a second rollback goes back further, never to one that was
    left. The same reason once more is the same rollback, of which the answer was lost.

    Raises:
        RegistryError: There is no reason, no champion, nothing that it replaced, or that was rolled back itself; nothing is changed.
        Exception: Whatever MLflow raises; the champion serves on.
    """
    if not reason.strip():
        raise RegistryError(f"A rollback of {name!r} needs a reason: what is wrong with what serves now?")
    now = champion_of(client, name)
    if now is None:
        raise RegistryError(f"{name!r} has no champion that could be rolled back.")
    leaves = client.get_model_version(name, now)
    done = rollbacks(client, name)[-1:]
    if done and (done[0].to, done[0].reason) == (now, reason[:_TAG_CHARS]) and done[0].at >= leaves.tags.get(_AT, ""):
        return done[0]
    before = leaves.tags.get(_REPLACES, "none")
    if before == "none":
        raise RegistryError(
            f"Version {now} of {name!r} replaced no other champion, so there is none to go back to. Promote another version with"
            " ray-app register --promote."
        )
    back_to = _need_version(client, name, before)
    left = back_to.tags
    if _BACK_AT in left:
        raise RegistryError(
            f"Version {now} of {name!r} replaced version {before}, which was rolled back itself: {left.get(_BACK_BECAUSE, '')}. Promote"
            " another version with ray-app register --promote."
        )
    _delete_tags(client, leaves, _WAS)
    if _WAS in left:  # somebody began to promote it, and was stopped
        for tag, value in json.loads(left[_WAS]).items():
            client.set_model_version_tag(name, before, tag, value)
        _delete_tags(client, back_to, _WAS)
    made = Rollback(now, before, reason[:_TAG_CHARS], _now(), by)
    for tag, value in ((_BACK_BECAUSE, made.reason), (_BACK_AT, made.at), (_BACK_BY, by)):
        client.set_model_version_tag(name, now, tag, value)
    client.set_registered_model_alias(name, CHAMPION, before)
    return made


def rollbacks(client: Any, name: str) -> list[Rollback]:
    """The rollbacks that MLflow has on record, oldest first; one that was stopped before the alias moved is none."""
    serves = champion_of(client, name)
    found = [
        Rollback(str(v.version), v.tags.get(_REPLACES, "none"), v.tags.get(_BACK_BECAUSE, ""), v.tags[_BACK_AT], v.tags.get(_BACK_BY, ""))
        for v in client.search_model_versions(_filter("name", name))
        if _BACK_AT in v.tags and str(v.version) != serves
    ]
    return sorted(found, key=lambda one: one.at)


def _make_model(client: Any, name: str) -> None:
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


def _model(client: Any, name: str) -> Any | None:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _find(client: Any, name: str, run_uuid: str, params_digest: str) -> Any | None:
    """The oldest version with these parameters of this run, complete or not."""
    same_run = _filter("name", name) + " and " + _filter(f"tags.`{RUN_UUID}`", run_uuid)
    found = [v for v in client.search_model_versions(same_run) if v.tags.get(PARAMS_DIGEST) == params_digest]
    return min(found, key=lambda v: int(v.version), default=None)


def _registered(client: Any, version: Any) -> Registered:
    model = _model(client, version.name)
    aliases = model.aliases if model is not None else {}
    return Registered(version.name, str(version.version), tuple(sorted(a for a, v in aliases.items() if str(v) == str(version.version))))


def _filter(key: str, value: str) -> str:
    if "'" in value:
        raise RegistryError(f"{value!r} holds a quote; name the model without.")
    return f"{key} = '{value}'"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
