"""The checks of this machine before a run is submitted; the driver makes the others before it trains."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ray_app.cluster.ray_private import files_to_upload
from ray_app.config.config import Config
from ray_app.errors import ConfigError, join_names
from ray_app.runlog.redaction import is_secret_name
from ray_app.submit.options import SubmitSection, check_no_secrets, split
from ray_app.submit.server import JobServer
from ray_app.watch.terminal import Finding, run_check


@dataclass(frozen=True)
class Preflight:
    """The result of the checks before submission.

    Args:
        findings: One finding per line of output.
        server: The cluster's job server; None if it cannot be reached.
    """

    findings: list[Finding]
    server: JobServer | None
    runtime_env: dict[str, Any]


def preflight(config: Config, section: SubmitSection) -> Preflight:
    """Checks a run that has a name before it is submitted, and returns the findings."""
    server: list[JobServer] = []

    def check_config() -> str:
        check_no_secrets(config)
        return "loads here."

    def connect() -> str:
        server.append(JobServer(section.address))
        return f"{server[0].address} accepts jobs."

    package = list_job_files(config, section)
    runtime_env: dict[str, Any] = {
        "working_dir": str(package.folder),
        "excludes": package.excludes,
    } | section.runtime_env()
    findings = [
        run_check("configuration", check_config),
        run_check("package", partial(check_size, package)),
        *_check_environment(section, runtime_env),
        *check_secret_files(package),
        *check_uploaded_data(package, config),
        *check_absolute_storage(config),
        run_check("cluster", connect),
    ]
    return Preflight(findings, server[0] if server else None, runtime_env)


def _check_environment(section: SubmitSection, runtime_env: dict[str, Any]) -> list[Finding]:
    """Adds the environment variables to the runtime environment, and returns a finding if there are any."""
    names = split(section.env)

    def set_variables() -> str | Finding:
        runtime_env["env_vars"] = section.environment(dict(os.environ))
        if secret := [name for name in names if is_secret_name(name)]:
            text = f"all users of the cluster can read {', '.join(secret)}; variables of the cluster's nodes remain"
            return Finding("warning", "environment", f"{text} there.")
        return f"{', '.join(names)} will be set as here."

    finding = run_check("environment", set_variables)
    return [finding] if names else []


def check_absolute_storage(config: Config) -> list[Finding]:
    """Refuses a relative `run.storage_path`, which in a job would be in Ray's copy of the working directory."""
    path = config.run.storage_path
    if "://" in path or Path(path).is_absolute():
        return []
    text = (
        f"run.storage_path is {path!r}, a relative path: in a job, it is a copy of the working directory, which Ray"
        " removes and other nodes do not see. Set an absolute folder that all nodes share, --run.storage_path"
        " /shared/runs, or a prefix in a bucket."
    )
    return [Finding("refused", "storage", text)]


_MB = 1 << 20
_TABLE_ROWS = 5
_BIG_DATA_MB = 100
_MAX_PACKAGE_MB = 512
"""Largest upload that Ray takes, in mebibytes."""


def _any_case(suffix: str) -> str:
    """Returns a pattern for a suffix in upper or lower case."""
    return "".join(f"[{letter}{letter.upper()}]" if letter.isalpha() else letter for letter in suffix)


_PLAIN_KINDS = ("cfg", "conf", "csv", "ini", "json", "properties", "toml", "txt", "xml", "yaml", "yml")
_NEVER = [
    *(".git", "venv", ".venv", "mlruns", "mlartifacts", "mlflow.db*", "__pycache__", ".*_cache", ".hypothesis"),
    *(".ipynb_checkpoints", "*.egg-info", "node_modules", ".tox", ".nox"),
    *("*.parquet", "*.arrow", "*.npz", "*.npy", "*.h5", "*.hdf5", "*.tfrecord"),
    *("*.pt", "*.pth", "*.ckpt", "*.safetensors"),
]
"""Patterns that are never uploaded: repositories, environments, records, caches, data and models."""
_KEY_SUFFIXES = ("gpg", "jks", "kdbx", "key", "keystore", "p12", "p8", "pem", "pfx", "pkcs12", "ppk")
_SECRET_FILES = [
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", *(f"*.{_any_case(suffix)}" for suffix in _KEY_SUFFIXES)),
    *(".ssh", ".gnupg", ".pki", ".password-store", ".aws", ".azure", ".oci", ".aliyun", ".config", ".docker"),
    *(".dockercfg", ".ray", "auth_token", ".kube", "kubeconfig*", "*.kubeconfig", ".huggingface", ".kaggle"),
    *("**/huggingface/token", "**/huggingface/stored_tokens", "kaggle.json", ".mlflow", ".netrc", "_netrc", ".pypirc"),
    *(".git-credentials", ".npmrc", ".yarnrc*", ".condarc", "pip.conf", ".pip", ".gem", ".cargo", ".m2", ".snowsql"),
    *(".terraformrc", ".terraform.d", ".databrickscfg", ".databricks", ".snowflake", ".dbt", ".boto", ".s3cfg"),
    *(".passwd-s3fs", "rclone.conf", ".pgpass", ".my.cnf", ".mylogin.cnf", ".htpasswd", ".vault-token", ".modal.toml"),
    *(".vault_pass*", ".comet.config", ".env", ".env.*", "*.env", ".envrc", ".direnv", "*.tfvars", "*.tfvars.json"),
    *("*.tfstate", "*.tfstate.*", ".*_history", "service[-_]account*.json", "client_secret*.json", ".credentials"),
    *(f"*{name}.{kind}" for name in ("credentials", "secret", "secrets") for kind in _PLAIN_KINDS),
]
"""Patterns of files with keys, passwords and tokens; they are not uploaded from the folder of the data either."""
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")


@dataclass(frozen=True)
class JobFiles:
    """The files that Ray would upload.

    Args:
        folder: The working directory.
        excludes: Patterns of files that are not uploaded, for the runtime environment.
        files: Size of each file in bytes, by its path relative to the folder.
        is_known: Whether this version of Ray tells which files it would upload; otherwise there are none in `files`.
    """

    folder: Path
    excludes: list[str]
    files: dict[str, int]
    is_known: bool = True

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
        rest = sum(size for _, size in sizes[rows:])
        return "\n".join(
            [*lines, f"{rest / _MB:10.2f} MB  in {len(sizes) - rows} more"] if len(sizes) > rows else lines
        )

    def holds(self, path: str) -> bool:
        """Returns whether a file, or a file in a folder, would be uploaded."""
        name = os.path.normpath(path)
        return any(file == name or file.startswith(name + "/") for file in self.files)


def list_job_files(config: Config, section: SubmitSection) -> JobFiles:
    """Returns the files that would be uploaded for a run."""
    folder = Path(section.working_dir).resolve()
    excludes = _excludes(folder, config)
    paths = files_to_upload(folder, excludes)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths or ()}
    return JobFiles(folder, excludes, sizes, paths is not None)


def _excludes(folder: Path, config: Config) -> list[str]:
    """Returns patterns as in `.gitignore`; of two patterns that match a file, the later one counts."""
    patterns = list(_NEVER)
    for mark_file in sorted(path for mark in _ENVIRONMENT_MARKS for path in folder.glob(f"*/{mark}")):
        patterns.append(f"/{mark_file.parent.name}")
    data = [path for path in (*config.data.sources, config.data.eval_path) if path]
    patterns += [f"!{_inside(folder, path)}/**" for path in data if not os.path.isabs(path) and _inside(folder, path)]
    read_in_place = [path for path in data if os.path.isabs(path)]
    patterns += [inside for path in (*read_in_place, config.run.storage_path) if (inside := _inside(folder, path))]
    return patterns + _SECRET_FILES


def _inside(folder: Path, path: str) -> str | None:
    """Returns a pattern for a path inside the folder, or None for any other path."""
    if "://" in path:
        return None
    target = Path(os.path.normpath(folder / path))
    return f"/{target.relative_to(folder).as_posix()}" if folder in target.parents else None


def check_size(package: JobFiles) -> str | Finding:
    """Returns the size of the upload and its largest parts, as text.

    Raises:
        ConfigError: The upload is larger than Ray takes.
    """
    if not package.is_known:
        return Finding("warning", "package", "the files to upload are unknown with this version of Ray.")
    size = package.num_bytes / _MB
    if size > _MAX_PACKAGE_MB:
        raise ConfigError(
            f"{size:.1f} MB in {len(package.files)} files would be uploaded, more than the {_MAX_PACKAGE_MB} MB that"
            f" Ray accepts. Name unneeded files in .rayignore. The largest:\n{package.table()}"
        )
    return f"{size:.2f} MB in {len(package.files)} files:\n{package.table()}"


_MAX_KEY_BYTES = 16 << 10
_SOURCES = {".py", ".pyi", ".ipynb", ".md", ".rst", ".c", ".cpp", ".cu", ".h"}


def check_secret_files(package: JobFiles) -> list[Finding]:
    """Returns a warning that names the files of the upload that still look like secrets."""
    names = [name for name, size in package.files.items() if _looks_secret(package.folder / name, package.folder, size)]
    text = (
        f"the upload has files with the name of a secret or a private key: {join_names(sorted(names))}. All users of"
        " the cluster can read them. Name unneeded files in .rayignore."
    )
    return [Finding("warning", "secrets", text)] if names else []


def _looks_secret(file: Path, folder: Path, size: int) -> bool:
    """Returns whether a file, which is no source text, is named as a secret, or holds a private key."""
    if file.suffix in _SOURCES:
        return False
    if any(is_secret_name(name) for name in (*file.relative_to(folder).parent.parts, file.stem)):
        return True
    with suppress(OSError):
        return size <= _MAX_KEY_BYTES and b"PRIVATE KEY-----" in file.read_bytes()
    return False


def check_uploaded_data(package: JobFiles, config: Config) -> list[Finding]:
    """Returns findings about data with a relative path, which is uploaded with the job."""
    findings = list[Finding]()
    if not package.is_known:
        return findings
    fields = [
        *(("training data", "data.path", path) for path in config.data.sources),
        ("evaluation data", "data.eval_path", config.data.eval_path),
    ]
    for topic, field, path in fields:
        if not path or os.path.isabs(path) or "://" in path:
            continue
        advice = "Set a path that all nodes see."
        if not package.holds(path):
            why = f"a relative path, but nothing of it would be uploaded from {package.folder} (ignored or missing?)"
            text = f"{field} is {path!r}, {why}. {advice}"
            findings.append(Finding("refused", topic, text))
            continue
        name = os.path.normpath(path)
        size = sum(n for file, n in package.files.items() if file == name or file.startswith(name + "/")) / _MB
        if size > _BIG_DATA_MB:
            findings.append(
                Finding("warning", topic, f"{field} is {path!r}, so {size:.0f} MB of data are uploaded. {advice}")
            )
    return findings
