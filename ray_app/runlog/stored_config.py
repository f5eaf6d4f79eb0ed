"""The configuration of a run that exists, for whoever reads its directory.

`config.yaml` has all arguments of the classes; those that were not given are named in `code.json`. What is compared,
and what digests are made of, is what was given: a run whose record was completed by a default is the run that was asked
for.
"""

from __future__ import annotations

from typing import Any

import yaml

from ray_app.config.config import Config, from_dict, from_yaml
from ray_app.errors import ConfigError, DataError, StorageError
from ray_app.plan.manifest import Manifest
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import register_secrets
from ray_app.storage.files import list_folders, read_json
from ray_app.version import __version__


def read_config(paths: RunPaths, with_defaults: bool = False) -> Config:
    """The configuration of a run; its secrets are hidden from then on.

    Args:
        paths: The run.
        with_defaults: With the arguments of its classes that were not given, as they were at its first start.

    Raises:
        ConfigError: There is none, or not one of this version.
        OSError: The storage does not answer.
    """
    try:
        config = parse_config(paths, paths.config.read_text())
        return config if with_defaults else drop_defaults(paths, config)
    except FileNotFoundError:
        near = ", ".join(sorted(list_folders(paths.root))[:10])
        raise ConfigError(
            f"{paths.root} is no run: it has no config.yaml. Give the directory of a run,"
            f" <run.storage_path>/<run.name>, on a disk or on"
            f" s3://. {f'Folders in it: {near}.' if near else 'There are no folders in it either.'}"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{paths.config} is damaged ({error}); restore it from a backup.") from error
    except NotADirectoryError:
        raise ConfigError(
            f"{paths.root} is a file; give the directory of a run, <run.storage_path>/<run.name>."
        ) from None


def read_manifest(paths: RunPaths) -> Manifest:
    """The manifest of the data that a run was begun with.

    Raises:
        DataError: It is damaged; with the file.
        OSError: There is none, or the storage does not answer.
    """
    try:
        return Manifest.from_json(paths.manifest.read_text())
    except (DataError, UnicodeDecodeError) as error:
        raise DataError(f"{paths.manifest}: {error}") from error


def parse_config(paths: RunPaths, text: str) -> Config:
    """The configuration that stands in `config.yaml`; its secrets are hidden from then on.

    Args:
        paths: The run.
        text: What the file holds.

    Raises:
        ConfigError: It is not one of this version; with the file and the fields.
    """
    try:
        config = from_yaml(text)
        register_secrets(config.to_dict())
        return config
    except ConfigError as error:
        problems = "\n".join(f"  - {line}" for line in str(error).splitlines())
        raise ConfigError(
            f"{paths.config} is no configuration of this version ({__version__}):\n{problems}\nUse the version that"
            f" made the run; its event"
            " `started` names it. Or, in a copy of the run, rename the field, or remove it if its default is meant."
        ) from error
    except (yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{paths.config} is no configuration of this version ({__version__}): {error}. Give the directory of a run"
            f" that this version"
            " has made, or use the version that made it."
        ) from error


def drop_defaults(paths: RunPaths, config: Config) -> Config:
    """A stored configuration without the arguments of its classes that were not given.

    Raises:
        OSError: The storage does not answer.
    """
    try:
        names = (read_json(paths.code) or {}).get("defaults", [])
    except (ValueError, AttributeError):  # damaged
        names = []
    values = config.to_dict()
    for name in names:
        _remove(values, str(name).split("."))
    return from_dict(values)


def _remove(values: Any, parts: list[str]) -> None:
    """Removes what a dotted name means from nested dictionaries and lists, if it is there."""
    *way, last = parts
    for part in way:
        if isinstance(values, list) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        else:
            values = values.get(part) if isinstance(values, dict) else None
    if isinstance(values, dict):
        values.pop(last, None)


def stored_config(paths: RunPaths) -> Config | None:
    """The configuration of the run as it is, if it exists.

    Raises:
        ConfigError: It is not one of this version.
        StorageError: The storage does not answer.
    """
    try:
        return drop_defaults(paths, parse_config(paths, paths.config.read_text()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(
            f"run.storage_path cannot be read: {error}. Check that the folder or bucket exists, and on S3 the endpoint"
            f" (AWS_ENDPOINT_URL,"
            " or ?endpoint_override=... in the path), the region and the credentials."
        ) from error
