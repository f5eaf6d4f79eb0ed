"""Data that was changed in place between two starts of a run: noticed by size and time of its files, in a bucket by their ETags."""

from __future__ import annotations

from typing import Any

from ray_app.config.config import Config
from ray_app.data.dataset.files import place_of, versions
from ray_app.data.read.reader import RowSource
from ray_app.errors import RunExistsError
from ray_app.record.files import put_json, read_json
from ray_app.record.paths import RunPaths
from ray_app.record.schema import versioned

DataVersions = dict[str, dict[str, Any]]
"""For `data.path` and `data.eval_path`: the `root`, and of each of its `files` what changes with its content."""
_MAX_NAMED = 5


def data_versions(training: RowSource, evaluation: RowSource | None) -> DataVersions:
    """What changes with the content of the files that a run reads, as it is now.

    Raises:
        OSError: One is gone, or the storage does not answer.
    """
    sources = {"data.path": training} | ({"data.eval_path": evaluation} if evaluation is not None else {})
    return {name: _versions(source.reader.root, source.manifest.paths) for name, source in sources.items()}


def _versions(root: str, paths: tuple[str, ...]) -> dict[str, Any]:
    found = versions(place_of(root), paths)
    return {"root": root, "files": {path: list(one) if isinstance(one, tuple) else one for path, one in zip(paths, found, strict=True)}}


def changed_data(paths: RunPaths, config: Config, now: DataVersions) -> list[str]:
    """The files that are not as at a run's last start, in sentences; nothing of a run that did not record them.

    Data in another folder than before is compared by the sizes of its files alone: a copy has times of its own.

    Raises:
        RunExistsError: Some are, and `run.changed_data` is `refuse`.
        OSError: The storage does not answer.
    """
    before = _read(paths)
    found = [said for name in now if name in before and (said := _compare(name, before[name], now[name])) is not None]
    if found and config.run.changed_data == "refuse":
        raise RunExistsError(
            f"The data of the run {paths.name!r} was changed since its last start, so its result would be that of neither:\n- "
            + "\n- ".join(found)
            + "\nNothing was changed. Restore the data, give another run.name for a new run, or set run.changed_data to warn to go on."
        )
    return found


def put_data_versions(paths: RunPaths, now: DataVersions) -> None:
    """Writes `data.json`."""
    put_json(paths.data, versioned(now))


def is_recorded(paths: RunPaths, now: DataVersions) -> bool:
    """Whether `data.json` says the same."""
    return _read(paths) == now


def _read(paths: RunPaths) -> DataVersions:
    try:
        stored = read_json(paths.data) or {}
        return {name: one for name, one in stored.items() if isinstance(one, dict) and isinstance(one.get("files"), dict)}
    except (ValueError, TypeError, AttributeError):  # it is damaged; then nothing is known
        return {}


def _compare(name: str, before: dict[str, Any], now: dict[str, Any]) -> str | None:
    is_copy = before.get("root") != now["root"]
    both = [path for path in now["files"] if path in before["files"]]
    changed = [path for path in both if not _is_same(before["files"][path], now["files"][path], is_copy)]
    if not changed:
        return None
    more = f" and {len(changed) - _MAX_NAMED} more" if len(changed) > _MAX_NAMED else ""
    what = "size" if is_copy else "size, time or ETag"
    return f"{len(changed)} of {len(both)} files of {name} have another {what}: {', '.join(changed[:_MAX_NAMED])}{more}"


def _is_same(before: Any, now: Any, is_copy: bool) -> bool:
    if not is_copy:
        return bool(before == now)
    if isinstance(before, list) and isinstance(now, list):
        return bool(before[:1] == now[:1])
    return True  # an ETag of another place says nothing
