"""Whether a run can be stored where the configuration says, asked before anything starts."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.record.files import location


def check_storage(config: Config) -> None:
    """Refuses a folder that cannot be made or written to: in the nearest one that is there a folder is made and removed again.

    Raises:
        ConfigError: It cannot. Of S3 nothing is asked here.
    """
    folder = location(config.run.storage_path)
    if not isinstance(folder, Path):
        return
    try:
        near = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if near.is_dir():
            Path(tempfile.mkdtemp(prefix=".ray_app-", dir=near)).rmdir()
            return
        why = f"{near} is a file"
    except OSError as error:
        why = f"{error.strerror or error} ({error.filename or folder})"
    raise ConfigError(
        f"run.storage_path is {config.run.storage_path!r}, where no run can be stored: {why}. Give a folder that you may write to, which"
        " all nodes see under the same path, or s3://bucket/prefix."
    )
