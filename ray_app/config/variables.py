"""The environment variables of other tools on which a run depends: what it does with each (`VARIABLES`), and MLflow's.

A configuration has precedence over a variable, and a line says so. A variable on which the bits of a result depend is
a part of the environment that checkpoints record. docs/environment.md has the same table.
"""

from __future__ import annotations

import importlib.util
import locale
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import psutil

from ray_app.config.sections import TrackingSection
from ray_app.errors import ConfigError

Treatment = Literal["used", "recorded", "replaced", "refused", "without effect"]


class Variable(NamedTuple):
    """What a run does with some environment variables, by names or patterns as in `fnmatch`."""

    names: tuple[str, ...]
    treatment: Treatment
    reason: str


VARIABLES = (
    Variable(
        ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID"),
        "used",
        "The MLflow run is there, unless the configuration sets `tracking.uri` or `tracking.experiment`. A folder, in"
        " which MLflow itself writes no more, is refused. An MLflow run that another run has taken becomes the parent.",
    ),
    Variable(("MLFLOW_REGISTRY_URI",), "used", "The address of the model registry where it is not that of the runs."),
    Variable(("MLFLOW_TRACKING_*", "MLFLOW_HTTP_*", "MLFLOW_S3_*"), "used", "MLflow reads user, token and limits."),
    Variable(("RAY_ADDRESS",), "used", "The cluster to join, unless the configuration sets `run.ray_address`."),
    Variable(
        ("RAY_TRAIN_V2_ENABLED",),
        "replaced",
        "0 chooses the first version of Ray Train, in which no worker can be replaced; 1 is used, with a warning.",
    ),
    Variable(
        ("RAY_ENABLE_UV_RUN_RUNTIME_ENV",),
        "replaced",
        "Under `uv run` Ray uploads the whole working folder and starts each worker by uv. The workers get the search"
        " path of the driver instead. 1 in the environment keeps Ray's way.",
    ),
    Variable(
        ("RAY_RUNTIME_ENV_HOOK",), "refused", "Ray calls it at the start; one that cannot be imported is refused."
    ),
    Variable(("RAY_AUTH_*",), "used", "The token of the cluster, see SECURITY.md."),
    Variable(("TMPDIR", "RAY_TMPDIR"), "refused", "A folder in which Ray cannot write is refused."),
    Variable(("RAY_*",), "used", "Ray reads them, such as where it writes logs and when memory is full."),
    Variable(
        ("GLOO_SOCKET_IFNAME",),
        "refused",
        "The network interface of process groups; by default that of the node's address. One that this machine does not"
        " have is refused, where all workers are on it.",
    ),
    Variable(
        ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_MIN_*", "NCCL_MAX_*"),
        "recorded",
        "They choose the order in which NCCL adds, which counts with `train.reduction: overlapped`.",
    ),
    Variable(("NCCL_*", "TORCH_NCCL_*"), "used", "NCCL and PyTorch read them; they change no result."),
    Variable(
        ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "PET_*", "TF_CONFIG", "SLURM_*", "PBS_*",
         "LSB_*", "OMPI_*", "PMI_*", "SM_*"),
        "used",
        "Only `ray-app launch` reads them: they name the machines.",
    ),
    Variable(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
        "replaced",
        "The threads of a worker are `scaling.threads_per_worker`, since the result depends on them.",
    ),
    Variable(
        ("OMP_THREAD_LIMIT", "OMP_DYNAMIC", "MKL_DYNAMIC", "OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE"),
        "recorded",
        "They change how many threads compute, or with which kernels.",
    ),
    Variable(
        ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "ONEDNN_*", "DNNL_*"),
        "recorded",
        "They choose the instructions or the precision of the CPU's kernels.",
    ),
    Variable(("ATEN_CPU_CAPABILITY",), "used", "PyTorch's instruction set is recorded as `cpu_capability`."),
    Variable(
        ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "TORCH_CUDNN_*",
         "CUDNN_*", "TORCH_BLAS_*", "TORCH_LINALG_*", "DISABLE_ADDMM_CUDA_LT", "PYTORCH_TUNABLEOP_*"),
        "recorded",
        "They choose the kernels of a GPU or their precision. Without CUBLAS_WORKSPACE_CONFIG a run sets :4096:8; one"
        " that is not deterministic is refused at the first product of matrices.",
    ),
    Variable(
        ("TORCHINDUCTOR_*CACHE*", "TORCHINDUCTOR_DETERMINISTIC"), "used", "Caches; a run itself sets the second."
    ),
    Variable(
        ("TORCHDYNAMO_*", "TORCHINDUCTOR_*", "TORCH_COMPILE_*", "PYTORCH_JIT"),
        "recorded",
        "They change what is compiled, or how.",
    ),
    Variable(("CUDA_VISIBLE_DEVICES",), "used", "Ray gives the workers these devices; their names are recorded."),
    Variable(
        ("TORCH_*", "PYTORCH_*", "CUDA_*", "KMP_*", "GOMP_*", "OMP_*", "MKL_*"),
        "used",
        "They change logs, memory, speed or where threads run, and no result. Where threads are bound to cores"
        " (OMP_PROC_BIND, KMP_AFFINITY), the workers of one machine share the same cores.",
    ),
    Variable(
        ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        "replaced",
        "Servers of other machines are reached through the proxy, those of this machine never: `no_proxy` is completed"
        " by localhost. Ray uses no proxy.",
    ),
    Variable(
        ("PYTHONWARNINGS",),
        "replaced",
        "`error` turns each deprecation inside of a library into a failure; it is replaced by `default`.",
    ),
    Variable(
        ("LANG", "LC_ALL", "PYTHONUTF8", "PYTHONCOERCECLOCALE"),
        "replaced",
        "Texts are UTF-8: a command in another encoding starts itself again with PYTHONUTF8=1, a program is refused.",
    ),
    Variable(("PYTHONHASHSEED",), "used", "Only code of your own that walks through a set of texts depends on it."),
    Variable(("PYTHONOPTIMIZE",), "used", "Python leaves out `assert`, in your code, too."),
    Variable(("KERAS_BACKEND",), "replaced", "A Keras model trains with PyTorch; see docs/start/keras.md."),
    Variable(("TOKENIZERS_PARALLELISM",), "used", "Speed and warnings of tokenizers, no result."),
    Variable(("WANDB_*",), "without effect", "Nothing is sent to Weights & Biases, unless code of your own does it."),
)  # fmt: skip
"""The first one with a fitting name or pattern counts."""

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_UV_HOOK = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_NO_PROXY = ("no_proxy", "NO_PROXY")
_URI, _EXPERIMENT, _EXPERIMENT_ID = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"
DEFAULT_EXPERIMENT = "ray_app"


def treatment_of(name: str) -> Treatment | None:
    """Returns what a run does with an environment variable; None if it does not know it."""
    return next((row.treatment for row in VARIABLES if any(fnmatchcase(name, n) for n in row.names)), None)


def recorded_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that are set and on which the bits of a result depend."""
    return {name: variables[name] for name in sorted(variables) if treatment_of(name) == "recorded"}


def replacements(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a run sets for its time, with their values."""
    values = {_UV_HOOK: variables.get(_UV_HOOK, "0")}
    if any(variables.get(name) or variables.get(name.upper()) for name in _PROXIES):
        hosts = [host for name in _NO_PROXY for host in variables.get(name, "").split(",") if host]
        if "*" not in hosts:
            values |= dict.fromkeys(_NO_PROXY, ",".join(dict.fromkeys([*hosts, *LOCAL_HOSTS])))
    return values


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
        raise ConfigError(f"Texts are read as {encoding} here (LANG, LC_ALL), and a run needs UTF-8: set PYTHONUTF8=1.")
    if not on_this_machine:
        return
    interfaces = psutil.net_if_addrs()
    # gloo takes several, separated by commas.
    for name in filter(None, variables.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in interfaces:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME names {name!r}, and this machine has {', '.join(interfaces)}. Unset it: by default"
                " process groups use the interface of the node's address."
            )
    hook = variables.get("RAY_RUNTIME_ENV_HOOK", "")
    if hook and not _has_module(hook.partition(".")[0]):
        raise ConfigError(
            f"RAY_RUNTIME_ENV_HOOK is {hook!r}, which Ray calls at the start and which cannot be imported here. Unset"
            " it, or install its package."
        )
    name = "RAY_TMPDIR" if "RAY_TMPDIR" in variables else "TMPDIR"
    folder = Path(variables.get(name) or "/tmp")
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{name} is {str(folder)!r}, where Ray cannot write: {existing} is no folder, or no folder of yours. Set it"
            " to a folder with a short path that you may write to, or unset it."
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
    mlflow: Any = sys.modules.get("mlflow")
    # Another thread may be importing it.
    has_open_run = getattr(mlflow, "active_run", lambda: None)() is not None
    uri = mlflow.get_tracking_uri() if has_open_run else os.environ.get(_URI)
    return absolute_uri(uri) if uri else None


def tracking_of_job(section: TrackingSection) -> TrackingSection:
    """Returns the section with the server and the experiment of this environment, for a job on other machines."""
    server = os.environ.get(_URI) or ""
    uri = section.uri or (server if server.startswith("http") and not urlsplit(server).password else None)
    return replace(section, uri=uri, experiment=section.experiment or os.environ.get(_EXPERIMENT))


def absolute_uri(uri: str) -> str:
    """Returns an address of MLflow with the whole path of a SQLite file, since the next start may be elsewhere."""
    file = uri.removeprefix("sqlite:///")
    return f"sqlite:///{Path(file).absolute()}" if file != uri and file[:1] not in ("", "/", ":") else uri


def complete_tracking(section: TrackingSection, stored: TrackingSection | None) -> tuple[TrackingSection, list[str]]:
    """Fills in address and experiment of MLflow from the environment, then from the last start of the run.

    So every process that continues the run's record finds its MLflow run, also with another environment.

    Args:
        section: The configured section.
        stored: The section of the last start; None for a new run.

    Returns:
        The section, and a line for each variable that the configuration overrides.
    """
    if not section.enabled:
        return section, []
    lines = [
        f"{field} is {value}, so {name} ({os.environ[name]}) is not used."
        for field, value, name in (
            ("tracking.uri", section.uri, _URI),
            ("tracking.experiment", section.experiment, _EXPERIMENT),
        )
        if value and os.environ.get(name, value) != value
    ]
    uri = tracking_uri(section) or (stored.uri if stored is not None else None)
    # A password stays in the environment.
    uri = section.uri if uri and urlsplit(uri).password else uri
    experiment = section.experiment or os.environ.get(_EXPERIMENT)
    if not experiment and not os.environ.get(_EXPERIMENT_ID):
        experiment = (stored.experiment if stored is not None else None) or DEFAULT_EXPERIMENT
    return replace(section, uri=uri, experiment=experiment), lines
