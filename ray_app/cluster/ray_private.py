"""The uses of Ray's private parts (Ray 2.60) that belong neither to the controller nor to job submission.

Each has one function or group here, with the reason why nothing public does the same:

- Token authentication (`require_token`, `restore_auth_mode`): `ray._private.authentication.authentication_token_setup`
  is what `ray.init(address="local")` calls before it starts a cluster, and `ray.cluster_utils.Cluster` does not.
  `ray._raylet.Config` and `AuthenticationTokenLoader` are where a process keeps what it has read.
- Labels of nodes (`nodes_with_labels`): `node_labels_match_selector` and `validate_label_selector` match as Ray does.
- The job of a driver (`ray_job`): `ray._private.worker._global_node.webui_url` is the address of the dashboard, which
  `ray.init` returns, but not for an existing connection. `RAY_JOB_CONFIG_JSON_ENV_VAR` is how the job server tells a
  driver the id under which it was submitted.
- The search path of workers (`job_config`): workers find the modules that the driver finds. By itself Ray passes only
  the script's folder and the current one, with the private argument `_py_driver_sys_path` of `JobConfig`.
- The limits of an autoscaler (`max_resources`), from `ray._private` and from the status that the autoscaler's process
  leaves with the head. Every head has such a process; one without a configuration only observes, and names each node's
  type after the node.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import worker
from ray._private.authentication.authentication_token_setup import (
    AUTH_MODE_ENV_VAR,
    enable_token_auth_by_default,
    ensure_token_if_auth_enabled,
)
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS, RAY_OVERRIDE_DASHBOARD_URL
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._private.state import state
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray._raylet import Config as RayConfig  # type: ignore[attr-defined]
from ray.experimental.internal_kv import _internal_kv_get
from ray.job_config import JobConfig

from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.process import set_variables

logger = logging.getLogger(__name__)

Node = dict[str, Any]
"""A node as `ray.nodes()` describes it."""
_RAY_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The environment variable that is set in Ray jobs."""
_SINGLE_NODE_PREFIX = "node_"
"""Prefix of a node's type where an autoscaler without a configuration names it after the node."""


def require_token() -> None:
    """Makes clusters that this process starts from now on require the token in `~/.ray/auth_token`.

    The file is made if it does not exist. Ray lets all users of the machine read it; afterwards only its owner may. As
    in Ray, `RAY_AUTH_MODE=disabled` in the environment turns this off.
    """
    if enable_token_auth_by_default():
        ensure_token_if_auth_enabled(create_token_if_missing=True)
        # The token may be in another place, or the file may belong to another user.
        with suppress(OSError):
            (Path.home() / ".ray" / "auth_token").chmod(0o600)


@contextmanager
def restore_auth_mode() -> Iterator[None]:
    """Restores `RAY_AUTH_MODE` after a connection, also in Ray, which keeps the value that it has read.

    With the old value every actor on a cluster of the other mode died before it ran.
    """
    try:
        with set_variables(**{AUTH_MODE_ENV_VAR: None}):
            yield
    finally:
        RayConfig.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()


def nodes_with_labels(
    nodes: Iterable[Node], selector: dict[str, str] | None, field: str = "scaling.label_selector"
) -> list[Node]:
    """Returns the live nodes with the labels of a selector; without a selector all live nodes.

    Args:
        nodes: As `ray.nodes()` returns them.
        selector: The label selector.
        field: Name of the configured field, for messages.

    Raises:
        ConfigError: The selector is invalid.
    """
    alive = [node for node in nodes if node["Alive"]]
    if not selector:
        return alive
    from ray._private.label_utils import validate_label_selector
    from ray._raylet import node_labels_match_selector  # type: ignore[attr-defined]

    problem = validate_label_selector(selector)
    if problem is not None:
        raise ConfigError(
            f"{field} is {selector}: {problem} Write it as Ray does, such as {{zone: a}} or {{zone: 'in(a,b)'}}."
        )
    return [node for node in alive if node_labels_match_selector(node["Labels"], selector)]


def known_labels(nodes: Iterable[Node]) -> str:
    """Returns the labels of the live nodes as a text, each once, without the labels that identify single nodes."""
    labels = {
        f"{name}: {value}"
        for node in nodes
        if node["Alive"]
        for name, value in node["Labels"].items()
        if name != "ray.io/node-id"
    }
    return ", ".join(sorted(labels)) or "none"


def count_fitting(free: float, per_worker: float) -> float:
    """Returns how many workers that need `per_worker` of a resource fit into `free` of it, whole or infinite.

    5 workers of 0.2 fit into 1.0, which a division of floats rounds to 4.
    """
    return (free + 1e-6) // per_worker if math.isfinite(free) else free


def count_fitting_on_gpus(free: float, per_worker: float) -> float:
    """Returns how many workers that need `per_worker` GPUs fit into `free` GPUs, whole or infinite.

    Ray places a fraction of a GPU on one GPU, so two workers of 0.6 fit on two GPUs, not three.
    """
    if per_worker >= 1 or not math.isfinite(free):
        return count_fitting(free, per_worker)
    whole = math.floor(free + 1e-6)
    return whole * count_fitting(1, per_worker) + count_fitting(max(0.0, free - whole), per_worker)


def has_evaluator(config: Config) -> bool:
    """Returns whether the run has an evaluator actor."""
    return config.data.eval_path is not None and config.evaluate.where == "actor"


def evaluator_gpus(config: Config) -> float:
    """Returns the GPUs of the evaluator, which are not for training workers."""
    return config.evaluate.num_gpus if has_evaluator(config) else 0.0


def ray_job() -> dict[str, Any] | None:
    """Returns the Ray job of this driver; None without a cluster.

    Returns:
        `job_id`; `submission_id`: None if the job was not submitted; `dashboard`: address of the cluster's dashboard,
        None if it has none; `page`: the job's page there.
    """
    if not ray.is_initialized():
        return None
    job_id = ray.get_runtime_context().get_job_id()
    job = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}"))
    # There is no global node with a connection through `ray://`.
    node = worker._global_node
    address = os.environ.get(RAY_OVERRIDE_DASHBOARD_URL) or (node.webui_url if node is not None else None)
    dashboard = (address if "://" in address else f"http://{address}").rstrip("/") if address else None
    page = f"{dashboard}/#/jobs/{job_id}" if dashboard else None
    return {
        "job_id": job_id,
        "submission_id": job.get("metadata", {}).get("job_submission_id"),
        "dashboard": dashboard,
        "page": page,
    }


def search_path() -> list[str]:
    """Returns, in order, the module folders of this process that another process of the same Python does not have."""
    installed, package = _installed_paths(), str(Path(__file__).resolve().parents[2])
    libraries = {path for path in installed if Path(path).name in ("site-packages", "dist-packages")}
    # Ray and other libraries add folders inside their own, which are left out.
    added = [path for path in sys.path if libraries.isdisjoint(map(str, Path(path).parents))]
    paths = [package, str(Path.cwd()), *os.environ.get("PYTHONPATH", "").split(os.pathsep), *added]
    return [path for path in dict.fromkeys(paths) if path and path not in installed and Path(path).exists()]


@functools.cache
def _installed_paths() -> frozenset[str]:
    """Returns the folders where every process of this Python looks for modules.

    They are not passed on: `PYTHONPATH` would put them before the standard library.
    """
    environment = {name: os.environ.get(name, "") for name in os.environ if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import sys; print(*sys.path, sep='\\n')"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return frozenset(process.stdout.splitlines())


def job_config() -> JobConfig | None:
    """Returns the configuration with which a driver joins a cluster; None in a Ray job.

    In a Ray job the workers have the job's runtime environment.
    """
    if _RAY_JOB_VARIABLE in os.environ:
        return None
    # The order is reversed, because workers insert each folder before the last one.
    return JobConfig(_py_driver_sys_path=search_path()[::-1])


def max_resources() -> dict[str, float] | None:
    """Returns the resources to which the connected cluster may grow, by Ray's names; None without an autoscaler.

    They are infinite if an autoscaler starts nodes and does not tell how many, as those of `ray up` and KubeRay.
    """
    limits = state.get_max_resources_from_cluster_config()
    if limits:
        return {name: float(limit) for name, limit in limits.items()}
    has_autoscaler = any(not node_type.startswith(_SINGLE_NODE_PREFIX) for node_type in _node_types())
    return {"CPU": math.inf, "GPU": math.inf} if has_autoscaler else None


def _node_types() -> set[str]:
    """Returns the types that the autoscaler's process gives to the existing nodes; none if it reports none."""
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    try:
        # In version 1 the types come from the autoscaler's report, because KubeRay names types without an autoscaler,
        # too.
        if not is_autoscaler_v2(fetch_from_server=True):
            report = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or "{}")
            return set(((report.get("autoscaler_report") or {}).get("node_type_mapping") or {}).values())
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        return {node.ray_node_type_name for node in [*status.active_nodes, *status.idle_nodes]} - {""}
    # There is no autoscaler, or it has not reported yet. Then a run that does not fit is refused.
    except Exception as error:
        logger.debug("No autoscaler tells of the cluster: %s", error)
        return set()
