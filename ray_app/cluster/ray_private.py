"""Ray's private parts (Ray 2.60) that turn token authentication on where Ray does not do it by itself: for
`ray.cluster_utils.Cluster`.

- `ray._private.authentication.authentication_token_setup`: what `ray.init(address="local")` calls before it starts a
  cluster.
- `ray._raylet.Config`, `AuthenticationTokenLoader`: where a process keeps what it has read.

Nodes by their labels, as Ray itself looks at them (Ray 2.60): `node_labels_match_selector` and
`validate_label_selector` are private.

How many fit.

Ray's private parts (Ray 2.60) that say which job a driver is.

- `ray._private.worker._global_node.webui_url`: where the dashboard is; `ray.init` returns it, but not of a connection
  that is there.
- `RAY_JOB_CONFIG_JSON_ENV_VAR`: how the job server tells a driver under which name it was submitted.

Where workers look for modules: wherever the driver found some, so that what it imports they import.

Ray (2.60) hands on the script's folder and the current one by itself, with the private argument `_py_driver_sys_path`
of `JobConfig`.

What an autoscaler may make of the cluster: the most of every resource, where Ray knows it, and whether one starts nodes
at all.

From `ray._private` and what the autoscaler's own process leaves with the head: nothing public says it. Every head has
such a process; one without a configuration only looks, and calls each node's type after the node.
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


def require_token() -> None:
    """Lets clusters that this process starts from now on refuse whoever has not the token in `~/.ray/auth_token`, made
    if need be.

    Ray writes that file for all users of the machine to read; then only its owner may. `RAY_AUTH_MODE=disabled` in the
    environment is respected, as Ray does.
    """
    if enable_token_auth_by_default():
        ensure_token_if_auth_enabled(create_token_if_missing=True)
        with suppress(OSError):  # it is elsewhere, or somebody else's
            (Path.home() / ".ray" / "auth_token").chmod(0o600)


@contextmanager
def restore_auth_mode() -> Iterator[None]:
    """The time of a connection, after which `RAY_AUTH_MODE` is what it was, also for Ray, which keeps what it has read:
    on a cluster of the other mode every actor died before it ran.
    """
    try:
        with set_variables(**{AUTH_MODE_ENV_VAR: None}):
            yield
    finally:
        RayConfig.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()


Node = dict[str, Any]
"""What `ray.nodes()` says about one."""


def nodes_with_labels(
    nodes: Iterable[Node], selector: dict[str, str] | None, field: str = "scaling.label_selector"
) -> list[Node]:
    """The nodes that live and carry the labels of a selector; without one all that live.

    Args:
        nodes: What `ray.nodes()` says.
        selector: The labels.
        field: What is configured so, for messages.

    Raises:
        ConfigError: The selector is none.
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
    """The labels of the nodes that live, each once, without those that name single nodes."""
    found = {
        f"{name}: {value}"
        for node in nodes
        if node["Alive"]
        for name, value in node["Labels"].items()
        if name != "ray.io/node-id"
    }
    return ", ".join(sorted(found)) or "none"


def count_fitting(free: float, each: float) -> float:
    """How many that need so much each fit into what is free, whole or infinite.

    5 of 0.2 fit into 1.0, which a division of floats rounds to 4.
    """
    return (free + 1e-6) // each if math.isfinite(free) else free


def count_fitting_on_gpus(free: float, each: float) -> float:
    """Returns how many workers that need `each` of a GPU fit into `free` GPUs, whole or infinite.

    Ray places a part of a GPU on one GPU, so two GPUs have room for two workers of 0.6, not for three.
    """
    if each >= 1 or not math.isfinite(free):
        return count_fitting(free, each)
    whole = math.floor(free + 1e-6)
    return whole * count_fitting(1, each) + count_fitting(max(0.0, free - whole), each)


def has_evaluator(config: Config) -> bool:
    """Whether an actor of its own evaluates."""
    return config.data.eval_path is not None and config.evaluate.where == "actor"


def evaluator_gpus(config: Config) -> float:
    """GPUs that are not for training workers: the evaluator's."""
    return config.evaluate.num_gpus if has_evaluator(config) else 0.0


def ray_job() -> dict[str, Any] | None:
    """The job that this driver is on a cluster; None on no cluster.

    Returns: `job_id`; `submission_id`: its name, None if it was not submitted; `dashboard`: address of the cluster's
        dashboard, None if it has none; `page`: the job's page there.
    """
    if not ray.is_initialized():
        return None
    job_id = ray.get_runtime_context().get_job_id()
    told = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}"))
    node = worker._global_node  # None of a connection through `ray://`
    address = os.environ.get(RAY_OVERRIDE_DASHBOARD_URL) or (node.webui_url if node is not None else None)
    dashboard = (address if "://" in address else f"http://{address}").rstrip("/") if address else None
    page = f"{dashboard}/#/jobs/{job_id}" if dashboard else None
    return {
        "job_id": job_id,
        "submission_id": told.get("metadata", {}).get("job_submission_id"),
        "dashboard": dashboard,
        "page": page,
    }


_IN_A_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def search_path() -> list[str]:
    """The folders where this process finds modules, and another one of the same Python would not by itself, in their
    order.
    """
    installed, package = _installed(), str(Path(__file__).resolve().parents[2])
    libraries = {path for path in installed if Path(path).name in ("site-packages", "dist-packages")}
    added = [
        path for path in sys.path if libraries.isdisjoint(map(str, Path(path).parents))
    ]  # Ray and others add folders inside their own
    found = [package, str(Path.cwd()), *os.environ.get("PYTHONPATH", "").split(os.pathsep), *added]
    return [path for path in dict.fromkeys(found) if path and path not in installed and Path(path).exists()]


@functools.cache
def _installed() -> frozenset[str]:
    """Where every process of this Python looks; that stays behind the standard library, where `PYTHONPATH` would put it
    before.
    """
    environment = {name: os.environ.get(name, "") for name in os.environ if name != "PYTHONPATH"}
    told = [sys.executable, "-c", "import sys; print(*sys.path, sep='\\n')"]
    return frozenset(
        subprocess.run(told, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    )


def job_config() -> JobConfig | None:
    """What a driver tells a cluster that it joins; nothing in a Ray job, whose workers have its runtime environment."""
    return (
        None if _IN_A_RAY_JOB in os.environ else JobConfig(_py_driver_sys_path=search_path()[::-1])
    )  # workers put each before the last


logger = logging.getLogger(__name__)

_OF_ONE_NODE = "node_"


def max_resources() -> dict[str, float] | None:
    """The most of every resource that the connected cluster may grow to, by Ray's names; None without an autoscaler.

    Infinite where an autoscaler starts nodes and does not tell how many, as that of `ray up` and KubeRay.
    """
    found = state.get_max_resources_from_cluster_config()
    if found:
        return {name: float(most) for name, most in found.items()}
    return (
        {"CPU": math.inf, "GPU": math.inf} if any(not kind.startswith(_OF_ONE_NODE) for kind in _node_types()) else None
    )


def _node_types() -> set[str]:
    """What the autoscaler's process calls the types of the nodes that are there."""
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    try:
        if not is_autoscaler_v2(fetch_from_server=True):  # KubeRay names types of nodes without an autoscaler, too
            told = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or "{}")
            return set(((told.get("autoscaler_report") or {}).get("node_type_mapping") or {}).values())
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        return {node.ray_node_type_name for node in [*status.active_nodes, *status.idle_nodes]} - {""}
    except Exception as error:  # there is none, or it has not looked yet; a run that does not fit is refused then
        logger.debug("No autoscaler tells of the cluster: %s", error)
        return set()
