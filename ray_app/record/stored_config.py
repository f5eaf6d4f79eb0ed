"""The configuration of a run that exists, for whoever reads its directory."""

from __future__ import annotations

import yaml

from ray_app.config.config import Config, from_yaml
from ray_app.errors import ConfigError
from ray_app.record.files import folders
from ray_app.record.paths import RunPaths
from ray_app.record.redact import guard


def read_config(paths: RunPaths) -> Config:
    """The configuration of a run; its secrets are hidden from then on.

    Raises:
        ConfigError: There is none, or not one of this version.
        OSError: The storage does not answer.
    """
    try:
        config = from_yaml(paths.config.read_text())
        guard(config.to_dict())
        return config
    except FileNotFoundError:
        near = ", ".join(sorted(folders(paths.root))[:10])
        raise ConfigError(
            f"{paths.root} is no run: it has no config.yaml. Give the directory of a run, <run.storage_path>/<run.name>, on a disk or on"
            f" s3://. {f'Folders in it: {near}.' if near else 'There are no folders in it either.'}"
        ) from None
    except NotADirectoryError:
        raise ConfigError(f"{paths.root} is a file; give the directory of a run, <run.storage_path>/<run.name>.") from None
    except (yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{paths.config} is no configuration of this version: {error}. Give the directory of a run that this version has made,"
            " or use the version that made it."
        ) from error
