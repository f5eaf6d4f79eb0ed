"""The environment variables of other tools on which a run depends, and MLflow's.

A configuration has precedence over a variable, and a line says so. A variable on which the bits of a result depend is
a part of the environment that checkpoints record. docs/environment.md says for each tool what a run does with it.
"""

from __future__ import annotations

import importlib.util
import locale
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from ray_app.config.sections import TrackingSection
from ray_app.errors import ConfigError
from ray_app.process import why_not_writable

_RECORDED = (
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_MIN_*", "NCCL_MAX_*"),
    *("OMP_THREAD_LIMIT", "OMP_DYNAMIC", "MKL_DYNAMIC", "OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE"),
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "ONEDNN_*", "DNNL_*"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "TORCH_CUDNN_*"),
    *("CUDNN_*", "TORCH_BLAS_*", "TORCH_LINALG_*", "DISABLE_ADDMM_CUDA_LT", "PYTORCH_TUNABLEOP_*"),
    *("TORCHDYNAMO_*", "TORCHINDUCTOR_*", "TORCH_COMPILE_*", "PYTORCH_JIT"),
)
"""Patterns (as in `fnmatch`) of variables on which the bits of a result depend."""
_NOT_RECORDED = ("TORCHINDUCTOR_*CACHE*", "TORCHINDUCTOR_DETERMINISTIC")
"""Exceptions: caches, and what the run itself sets."""
NO_PROXY = ("no_proxy", "NO_PROXY")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_RAY_NUMBER = re.compile(r"RAY_\w+_(s|seconds|ms|milliseconds|bytes|mb|limit|threshold)", re.IGNORECASE)
_NUMBER = re.compile(r"\s*-?(\d+\.?\d*|\.\d+)(e-?\d+)?\s*", re.IGNORECASE)
_URI = "MLFLOW_TRACKING_URI"
_EXPERIMENT, _EXPERIMENT_ID = "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"
DEFAULT_EXPERIMENT = "ray_app"


def recorded_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that are set and on which the bits of a result depend."""

    def fits(name: str, patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return {
        name: variables[name] for name in sorted(variables) if fits(name, _RECORDED) and not fits(name, _NOT_RECORDED)
    }


def bypass_proxies(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables with which servers of this machine are reached without a proxy; none without a proxy."""
    hosts = [host for name in NO_PROXY for host in variables.get(name, "").split(",") if host]
    if "*" in hosts or not any(variables.get(name) or variables.get(name.upper()) for name in _PROXIES):
        return {}
    return dict.fromkeys(NO_PROXY, ",".join(dict.fromkeys([*hosts, *_LOCAL_HOSTS])))


SAME_ORDER = {"PYTHONHASHSEED": "0"}
"""The variable with which sets of texts have the same order in all processes."""


def python_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns variables of Python for the processes of Ray.

    `PYTHONWARNINGS` is without the filters that make errors of warnings of libraries. Sets of texts have the same order
    in all processes (`PYTHONHASHSEED`): code that numbers classes by a set would give others in each reader.
    """
    filters = variables.get("PYTHONWARNINGS", "").split(",")
    kept = [one for one in filters if not one.strip().startswith("error")]
    warnings = {"PYTHONWARNINGS": ",".join(kept) or "default"} if kept != filters else {}
    return warnings if "PYTHONHASHSEED" in variables else warnings | SAME_ORDER


def check_variables(variables: Mapping[str, str], on_this_machine: bool) -> None:
    """Refuses variables with which a run cannot start.

    Args:
        variables: The environment.
        on_this_machine: Whether Ray is started here, so that all workers have this environment.

    Raises:
        ConfigError: Names the variable, its value and the remedy.
    """
    encoding = locale.getencoding()
    if encoding.lower() not in ("utf-8", "utf8") and not sys.flags.utf8_mode:
        raise ConfigError(f"Text is read as {encoding} here (LANG, LC_ALL), but a run needs UTF-8: set PYTHONUTF8=1.")
    for name, value in variables.items():
        # Ray crashes, or raises an error without the name.
        if _RAY_NUMBER.fullmatch(name) and not _NUMBER.fullmatch(value):
            raise ConfigError(f"{name} is {value!r}; Ray needs a number. Correct or unset {name}.")
    if not on_this_machine:
        return
    interfaces = psutil.net_if_addrs()
    # gloo takes several, separated by commas.
    for name in filter(None, variables.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in interfaces:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME names {name!r}, but this machine has {', '.join(interfaces)}. Unset the variable:"
                " by default, process groups use the interface of the node's address."
            )
    hook = variables.get("RAY_RUNTIME_ENV_HOOK", "")
    if hook and not _has_module(hook.partition(".")[0]):
        raise ConfigError(
            f"RAY_RUNTIME_ENV_HOOK is {hook!r}, which Ray calls at the start, but it cannot be imported here. Unset the"
            " variable, or install the hook's package."
        )
    name = "RAY_TMPDIR" if "RAY_TMPDIR" in variables else "TMPDIR"
    folder = Path(variables.get(name) or "/tmp")
    if (why := why_not_writable(folder.absolute())) is not None:
        raise ConfigError(
            f"{name} is {str(folder)!r}, but Ray cannot write there: {why}. Set {name} to a writable folder with a"
            " short path, or unset it."
        )


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        return name in sys.modules


def tracking_uri(section: TrackingSection) -> str | None:
    """Returns the configured address of MLflow, or that of the environment, or of the program's open MLflow run."""
    if section.uri:
        return section.uri
    if (open_run := find_open_run()) is not None:
        return open_run[0]
    return absolute_uri(os.environ[_URI]) if os.environ.get(_URI) else None


def find_open_run() -> tuple[str, Any] | None:
    """Returns address and information of the MLflow run that this thread has open (`mlflow.start_run`), if any."""
    mlflow: Any = sys.modules.get("mlflow")
    # Another thread may be importing it.
    run = getattr(mlflow, "active_run", lambda: None)()
    return (absolute_uri(mlflow.get_tracking_uri()), run.info) if run is not None else None


def tracking_of_job(section: TrackingSection) -> TrackingSection:
    """Returns the section with the server and the experiment of this environment, for a job on other machines."""
    server = os.environ.get(_URI) or ""
    uri = section.uri or (server if server.startswith("http") and not urlsplit(server).password else None)
    return replace(section, uri=uri, experiment=section.experiment or os.environ.get(_EXPERIMENT))


def absolute_uri(uri: str) -> str:
    """Returns an address of MLflow with the whole path of a SQLite file, since the next start may be elsewhere."""
    file = uri.removeprefix("sqlite:///")
    return f"sqlite:///{Path(file).absolute()}" if file != uri and file[:1] not in ("", "/", ":") else uri


def describe_overridden(fields: Mapping[str, Any], variables: Mapping[str, str]) -> list[str]:
    """Returns a line for each variable that the configuration overrides; `fields` are by dotted names."""
    pairs = (("run.ray_address", "RAY_ADDRESS"), ("tracking.uri", _URI), ("tracking.experiment", _EXPERIMENT))
    return [
        f"{field} is {fields[field]}, which overrides {name} ({variables[name]})."
        for field, name in pairs
        if fields[field] and absolute_uri(variables.get(name) or fields[field]) != absolute_uri(fields[field])
    ]


def complete_tracking(section: TrackingSection, stored: TrackingSection | None) -> TrackingSection:
    """Fills in address and experiment of MLflow from the environment, then from the last start of the run.

    So every process that continues the run's record finds its MLflow run, also with another environment.

    Args:
        section: The configured section.
        stored: The section of the last start; None for a new run.
    """
    if not section.enabled:
        return section
    uri = tracking_uri(section) or (stored.uri if stored is not None else None)
    experiment = section.experiment or os.environ.get(_EXPERIMENT)
    if not experiment and not os.environ.get(_EXPERIMENT_ID) and find_open_run() is None:
        experiment = (stored.experiment if stored is not None else None) or DEFAULT_EXPERIMENT
    return replace(section, uri=uri, experiment=experiment)
