"""The stored configuration of an existing run, read from its directory.

`config.yaml` has all arguments of the classes; `code.json` names those that are defaults. Comparisons and digests use
only the arguments that the user gave: a stored configuration with defaults is the same run as one without.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import yaml

from ray_app.config.config import Config, from_dict, from_yaml
from ray_app.errors import ConfigError, DataError, StorageError
from ray_app.plan.manifest import Manifest
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import register_secrets
from ray_app.storage.files import Location, list_folders, read_json
from ray_app.version import __version__


def read_config(paths: RunPaths, with_defaults: bool = False) -> Config:
    """Returns the configuration of a run and registers its secrets for redaction.

    Args:
        with_defaults: Whether to include default arguments of its classes, as they were at the first start.

    Raises:
        ConfigError: The run has no configuration, or not one of this version.
    """
    advice = "the directory of a run, <run.storage_path>/<run.name>"
    try:
        config = parse_config(paths)
        return config if with_defaults else drop_defaults(paths, config)
    except FileNotFoundError:
        near = ", ".join(sorted(list_folders(paths.root))[:10])
        raise ConfigError(
            f"{paths.root} is not a run: config.yaml is missing. Name the directory of a run,"
            " <run.storage_path>/<run.name>, on a disk or in a bucket."
            f" {f'Folders in it: {near}.' if near else 'The folder has no subfolders.'}"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{paths.config} is damaged ({error}); restore it from a backup.") from error
    except NotADirectoryError:
        raise ConfigError(f"{paths.root} is a file; name {advice}.") from None


def read_manifest(paths: RunPaths) -> Manifest:
    """Returns the manifest of the data at the first start of a run; raises `DataError` if the file is damaged."""
    try:
        return Manifest.from_json(paths.manifest.read_text())
    except (DataError, UnicodeDecodeError) as error:
        raise DataError(f"{paths.manifest}: {error}") from error


TRUSTED_RUNS = "RAY_APP_TRUSTED_RUNS"
"""Environment variable with folders, separated by colons: all users that can write to the runs in them are trusted."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def read_code_text(file: Location) -> str:
    """Returns the text of a file of a run that names classes, which are imported and run afterwards.

    Raises:
        ConfigError: On a disk, the file belongs to a user other than this one and root, or others can write to it.
        OSError: The file cannot be read.
    """
    if not isinstance(file, Path):
        return file.read_text()
    with file.open() as opened:
        status, text = os.fstat(opened.fileno()), opened.read()
    is_foreign, is_open = status.st_uid not in (os.geteuid(), 0), bool(status.st_mode & _OTHERS_WRITE)
    trusted = [Path(folder).resolve() for folder in os.environ.get(TRUSTED_RUNS, "").split(":") if folder]
    if not (is_foreign or is_open) or any(file.resolve().is_relative_to(folder) for folder in trusted):
        return text
    if (new_file := new_file_status(file.parent)) is not None:
        # Some file systems give all files one owner (NFS with squashing) or one mode (SMB, exFAT, gcsfuse).
        is_foreign = is_foreign and status.st_uid != new_file.st_uid
        is_open = is_open and not new_file.st_mode & _OTHERS_WRITE
    if not (is_foreign or is_open):
        return text
    problem = f"belongs to another user (uid {status.st_uid})" if is_foreign else "can be written by other users"
    advice = f"{TRUSTED_RUNS}={file.parent} in the environment, or a folder above it, if a group shares its runs"
    if not is_foreign:
        advice = f"chmod go-w {file}, or {advice}"
    raise ConfigError(
        f"{file} {problem} (mode {stat.S_IMODE(status.st_mode):o}), and the classes that it names would be imported and"
        f" run with your rights. Check these classes; if you trust them: {advice}."
    )


def new_file_status(folder: Path) -> os.stat_result | None:
    """Returns the status that a new file, private to this user, has in a folder; None if none can be made."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno())
    except OSError:
        return None


def parse_config(paths: RunPaths) -> Config:
    """Returns the configuration in `config.yaml`, with its secrets registered; see `read_code_text`.

    Raises:
        ConfigError: It is not a configuration of this version, and the fields are named; or others can write to it.
    """
    text = read_code_text(paths.config)
    try:
        config = from_yaml(text)
        register_secrets(config.to_dict())
        return config
    except ConfigError as error:
        problems = "\n".join(f"  - {line}" for line in str(error).splitlines())
        raise ConfigError(
            f"{paths.config} is not a configuration of this version ({__version__}):\n{problems}\nUse the version that"
            " wrote the run, which the event `started` names. Or, in a copy of the run, rename the field, or remove it"
            " if its default is meant."
        ) from error
    except (yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{paths.config} is not a configuration of this version ({__version__}): {error}. Name the directory of a"
            " run of this version, or use the version that wrote it."
        ) from error


def drop_defaults(paths: RunPaths, config: Config) -> Config:
    """Returns a stored configuration without the default arguments of its classes."""
    try:
        names = (read_json(paths.code) or {}).get("defaults", [])
    except (ValueError, AttributeError):
        # A damaged `code.json` names no defaults.
        names = []
    values = config.to_dict()
    for name in names:
        _remove(values, str(name).split("."))
    return from_dict(values)


def _remove(values: Any, parts: list[str]) -> None:
    """Removes the value of a dotted name from nested dictionaries and lists, if there is one."""
    *parents, last = parts
    for part in parents:
        if isinstance(values, list) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        else:
            values = values.get(part) if isinstance(values, dict) else None
    if isinstance(values, dict):
        values.pop(last, None)


def stored_config(paths: RunPaths) -> Config | None:
    """Returns the configuration of a run as the user gave it, or None if the run does not exist.

    Raises:
        ConfigError: It is not a configuration of this version.
        StorageError: The storage does not answer.
    """
    try:
        return drop_defaults(paths, parse_config(paths))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(
            f"run.storage_path cannot be read: {error}. Check that the folder or bucket exists, and on S3 the endpoint"
            " (AWS_ENDPOINT_URL, or ?endpoint_override=... in the path), the region and the credentials."
        ) from error
