"""The files of a job that would be uploaded: the working directory as Ray walks it, without what no job needs.

The walk uses `ray._private.runtime_env.packaging` (Ray 2.60), which is private, because no public function returns what
Ray packs, and an own implementation could differ.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from ray._private.ray_constants import RAY_RUNTIME_ENV_IGNORE_GITIGNORE, get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.submit.options import SubmitSection, split
from ray_app.watch.terminal import Finding

_MB = 1 << 20
_TABLE_ROWS = 5
_BIG_DATA_MB = 100
_NEVER = [
    *(".git", "venv", ".venv", "mlruns", "mlartifacts", "mlflow.db*", "__pycache__", ".*_cache", ".hypothesis"),
    *(".ipynb_checkpoints", "*.egg-info", "node_modules", ".tox", ".nox", ".env", ".env.*", "*.pem", ".netrc"),
    *("*.parquet", "*.arrow", "*.npz", "*.npy", "*.h5", "*.hdf5", "*.tfrecord", "*.pt", "*.pth", "*.ckpt"),
    "*.safetensors",
]
"""Patterns that are never uploaded: repositories, environments, records, caches, secrets, data and models."""
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")


@dataclass(frozen=True)
class JobFiles:
    """The files that Ray would upload.

    Args:
        folder: The working directory.
        excludes: Patterns of files that are not uploaded, for the runtime environment.
        files: Size of each file in bytes, by its path relative to the folder.
    """

    folder: Path
    excludes: list[str]
    files: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """Returns the size of all files in bytes; Ray does not compress them."""
        return sum(self.files.values())

    def by_folder(self) -> list[tuple[str, int]]:
        """Returns the size in bytes of each file and folder of the top level, the largest first."""
        sizes: dict[str, int] = {}
        for name, size in self.files.items():
            top = name.split("/")[0] + ("/" if "/" in name else "")
            sizes[top] = sizes.get(top, 0) + size
        return sorted(sizes.items(), key=lambda item: (-item[1], item[0]))

    def table(self, rows: int = _TABLE_ROWS) -> str:
        """Returns the largest files and folders of the top level, one per line."""
        sizes = self.by_folder()
        lines = [f"{size / _MB:10.2f} MB  {name}" for name, size in sizes[:rows]]
        if len(sizes) > rows:
            rest = sum(size for _, size in sizes[rows:])
            lines.append(f"{rest / _MB:10.2f} MB  in {len(sizes) - rows} more")
        return "\n".join(lines)

    def sizes_below(self, path: str) -> list[int]:
        """Returns the size of a file that would be uploaded, or of each one in a folder; none of them for others."""
        name = os.path.normpath(path)
        return [size for file, size in self.files.items() if file == name or file.startswith(name + "/")]


def list_job_files(config: Config, section: SubmitSection) -> JobFiles:
    """Returns the files that would be uploaded for a run."""
    folder = Path(section.working_dir).resolve()
    excludes = _excludes(folder, config, section)
    files: dict[str, int] = {}

    def count(path: Path) -> None:
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = path.stat().st_size

    quiet = logging.getLogger(f"{__name__}.ignored")
    quiet.setLevel(logging.WARNING)
    all_excludes = [*get_runtime_env_default_excludes(), *excludes]
    follows_git = os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    _dir_travel(folder, [_get_excludes(folder, all_excludes)], count, include_gitignore=follows_git, logger=quiet)
    return JobFiles(folder, excludes, files)


def _excludes(folder: Path, config: Config, section: SubmitSection) -> list[str]:
    """Returns patterns as in `.gitignore`; of two patterns that match a file, the later one counts."""
    patterns = list(_NEVER)
    for mark_file in sorted(path for mark in _ENVIRONMENT_MARKS for path in folder.glob(f"*/{mark}")):
        patterns.append(f"/{mark_file.parent.name}")
    data = [path for path in (config.data.path, config.data.eval_path) if path]
    patterns += [f"!{_inside(folder, path)}/**" for path in data if not os.path.isabs(path) and _inside(folder, path)]
    read_in_place = [path for path in data if os.path.isabs(path)]
    patterns += [inside for path in (*read_in_place, config.run.storage_path) if (inside := _inside(folder, path))]
    return [*patterns, *split(section.exclude)]


def _inside(folder: Path, path: str) -> str | None:
    """Returns a pattern for a path inside the folder, or None for any other path."""
    if "://" in path:
        return None
    target = Path(os.path.normpath(folder / path))
    return f"/{target.relative_to(folder).as_posix()}" if folder in target.parents else None


def check_size(package: JobFiles, section: SubmitSection) -> str | Finding:
    """Returns the size of the upload and its largest parts, as text; raises `ConfigError` if it is too large."""
    size = package.num_bytes / _MB
    if size > section.max_package_mb:
        raise ConfigError(
            f"{size:.1f} MB in {len(package.files)} files would be uploaded, more than the {section.max_package_mb:g}"
            " MB allowed (submit.max_package_mb; Ray takes at most 512). Leave out what the job does not need: name it"
            f" in .rayignore or in submit.exclude. The biggest:\n{package.table()}"
        )
    return f"{size:.2f} MB in {len(package.files)} files:\n{package.table()}"


def check_uploaded_data(package: JobFiles, config: Config) -> list[Finding]:
    """Returns findings about data with a relative path, which is uploaded with the job."""
    findings = []
    data = config.data
    fields = (("training data", "data.path", data.path), ("evaluation data", "data.eval_path", data.eval_path))
    for topic, field, path in fields:
        if not path or os.path.isabs(path) or "://" in path:
            continue
        advice = "Give a path that all nodes see."
        size = sum(package.sizes_below(path)) / _MB
        if not package.sizes_below(path):
            why = f"relative, but nothing of it would be uploaded from {package.folder} (is it ignored, or not there?)"
            findings.append(Finding("refused", topic, f"{field} is {path!r}, {why}. {advice}"))
        elif size > _BIG_DATA_MB:
            text = f"{field} is {path!r}, so {size:.0f} MB of data are uploaded. {advice}"
            findings.append(Finding("warning", topic, text))
    return findings
