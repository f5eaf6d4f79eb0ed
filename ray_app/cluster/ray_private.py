"""The uses of Ray's private names (Ray 2.60), but for those of `cluster/controller/`, which derives from Ray Train.

`controller.py`, `worker_group.py`, `scaling_policy.py` and `pending_workers.py` there name what they derive from;
without it `cluster/trainer.py`, which names Ray Train's callbacks, falls back to `failure.recovery: restart`. A test
holds that no other package has a private name of Ray. Each of the functions below has its reason, and what would happen
without it:

- `require_token`, `restore_auth_mode`: `ray._private.authentication.authentication_token_setup` is what
  `ray.init(address="local")` calls before it starts a cluster, and `ray.cluster_utils.Cluster` does not;
  `ray._raylet.Config` and `AuthenticationTokenLoader` are where a process keeps what it has read. Without them a local
  cluster would accept every process of the machine, and the second cluster that a process joins could refuse it.
- `nodes_with_labels`: `node_labels_match_selector` and `validate_label_selector` match as Ray does. Without them an own
  implementation could count nodes on which Ray starts no worker.
- `draining_nodes`, `free_resources`: `ray._private.state`, which the public state API reads, too, but through a
  dashboard, which may not run. Without them a run would not leave a node before it goes away, and would not know the
  capacity of labeled nodes.
- `actor_id_of`: an actor's handle tells its id only as `_actor_id`. Without it a worker would have to be asked.
- `use_stable_run_id`: Ray Train has no argument for the name under which a run asks for resources. Without it a start
  after a killed driver could wait for 180 s, see there.
- `ray_job`: `ray._private.worker._global_node.webui_url` is the address of the dashboard, which `ray.init` returns, but
  not for an existing connection. `RAY_JOB_CONFIG_JSON_ENV_VAR` is how the job server tells a driver the id under which
  it was submitted. Without them a run would not name its job and the job's page.
- `job_config`: workers find the modules that the driver finds. By itself Ray passes only the script's folder and the
  current one, with the private argument `_py_driver_sys_path` of `JobConfig`. Without it workers would not find modules
  in other folders.
- `max_resources`: the limits of an autoscaler, from `ray._private` and from the status that the autoscaler's process
  leaves with the head. Every head has such a process; one without a configuration only observes, and names each node's
  type after the node. Without it a run that has to wait for nodes would be refused.
- `files_to_upload`: `ray._private.runtime_env.packaging` walks the working directory of a job. Without it an own
  implementation could list other files than Ray uploads.
- `quiet_cluster_start`: names of loggers. Without it they would print warnings that a user cannot act on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray._private import worker
from ray._private.authentication.authentication_token_setup import (
    AUTH_MODE_ENV_VAR,
    enable_token_auth_by_default,
    ensure_token_if_auth_enabled,
)
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS, RAY_OVERRIDE_DASHBOARD_URL
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._private.state import available_resources_per_node, state
from ray._raylet import RAY_NODE_ID_KEY, AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray._raylet import Config as RayConfig  # type: ignore[attr-defined]
from ray.experimental.internal_kv import _internal_kv_get
from ray.job_config import JobConfig

from ray_app.errors import ConfigError
from ray_app.process import set_variables

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

logger = logging.getLogger(__name__)

Node = dict[str, Any]
"""A node as `ray.nodes()` describes it."""
NODE_ID_LABEL: str = RAY_NODE_ID_KEY
"""The label of a node with its id."""
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
        if name != NODE_ID_LABEL
    }
    return ", ".join(sorted(labels)) or "none"


def draining_nodes() -> frozenset[str]:
    """Returns the ids of the nodes that have been announced to go away."""
    return frozenset(state.get_draining_nodes() or ())


def free_resources() -> dict[str, dict[str, float]]:
    """Returns the free resources of each node by Ray's names, by the id of the node."""
    return available_resources_per_node()


def actor_id_of(actor: Any) -> str:
    """Returns the id of an actor, by which the rendezvous knows the worker."""
    return actor._actor_id.hex()


def use_stable_run_id(trainer: TorchTrainer, run_root: str) -> None:
    """Has every start of a run ask for resources under one name.

    Ray keeps what a killed driver asked for under its name for 180 s; the next start takes it over.
    """
    vars(trainer.train_run_context)["run_id"] = hashlib.sha256(run_root.encode()).hexdigest()


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


def files_to_upload(folder: Path, excludes: Sequence[str]) -> list[Path]:
    """Returns the files that Ray uploads if a folder is the working directory of a job.

    Args:
        folder: The folder.
        excludes: Patterns of files that are not uploaded, as in `.gitignore`, besides those that Ray leaves out.
    """
    from ray._private.ray_constants import RAY_RUNTIME_ENV_IGNORE_GITIGNORE, get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    paths: list[Path] = []
    quiet = logging.getLogger(f"{__name__}.ignored")
    quiet.setLevel(logging.WARNING)
    all_excludes = [*get_runtime_env_default_excludes(), *excludes]
    follows_git = os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    _dir_travel(
        folder, [_get_excludes(folder, all_excludes)], paths.append, include_gitignore=follows_git, logger=quiet
    )
    return [path for path in paths if path.is_file()]


def quiet_cluster_start() -> None:
    """Has Ray log only errors about the token and the processes of a cluster that this process starts."""
    logging.getLogger("ray._private.utils").setLevel(logging.WARNING)
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)


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
