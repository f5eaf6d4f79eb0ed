"""The private names of Ray that the project uses, but for those of `cluster/controller/`, and the tested versions.

Each `PrivateName` tells what happens if a version of Ray does not have it any more; everything else goes on. The
modules of `cluster/controller/` derive from Ray Train's controller and name what they derive from; `cluster/trainer.py`
uses them only with the versions in `TESTED_RAY`. A test holds that no other package has a private name of Ray.

These functions need no private name, but an undocumented attribute or argument:

- `actor_id_of`: an actor's handle tells its id only as `_actor_id`. Only `cluster/controller/` uses it.
- `use_stable_run_id`: Ray Train has no argument for the name under which a run asks for resources. Without it a start
  after a killed driver could wait for 180 s, see there.
- `job_config`: by itself Ray passes only the script's folder and the current one to workers, with the private argument
  `_py_driver_sys_path` of `JobConfig`. Without it the folders are passed in `PYTHONPATH`.
- `on_loopback`: Ray's constant for systems on which it supports one machine only.
- `quiet_cluster_start`: names of loggers. Without it they would print warnings that a user cannot act on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import pkgutil
import secrets
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import AuthenticationError
from ray.job_config import JobConfig

from ray_app.errors import ConfigError
from ray_app.process import current_folder, restore_setting, set_variables, temporary_folder, without_gc
from ray_app.runlog.redaction import register_secrets
from ray_app.storage.files import put_atomic

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

logger = logging.getLogger(__name__)

Node = dict[str, Any]
"""A node as `ray.nodes()` describes it."""
NODE_ID_LABEL = "ray.io/node-id"
"""The label of a node with its id."""
TESTED_RAY = (2, 56), (2, 60)
"""The oldest and the newest minor version of Ray with which recovery in place has been tested, see docs/versions.md."""
_SOCKET_TOO_LONG = "AF_UNIX path length"
"""The text in errors of Ray and Python about a path of a socket that is longer than the system allows."""
_SET_TOKEN = (
    "Set RAY_AUTH_MODE=token, and put the cluster's token into ~/.ray/auth_token, into the file named by"
    " RAY_AUTH_TOKEN_PATH, or into RAY_AUTH_TOKEN."
)
_AUTH_MODE = "RAY_AUTH_MODE"
_AUTH_TOKEN, _TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_MAX_TMPDIR = 36
"""The bytes that the path of a folder may have, so that the paths of 100 nodes' sockets below it have 107 at most."""
_TOKEN_FILE = ".ray/auth_token"
"""Ray's file with the token, in the home folder."""
_RAY_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The environment variable that is set in Ray jobs."""
_IN_ADVANCE = b"ray_app:import_in_advance"
"""The key in Ray's store of the modules that new processes import."""
_IDLE_S = 600
"""Seconds for which Ray keeps a process that was started in advance."""
_PRESTART_S, _PRESTART_TIMEOUT_S = 2.0, 5.0
"""Seconds until as many processes as the machine has cores have started, and for which Ray may take to answer."""
_SINGLE_NODE_PREFIX = "node_"
"""Prefix of a node's type where an autoscaler without a configuration names it after the node."""


@dataclass(frozen=True)
class PrivateName:
    """A private name of Ray, which another version may not have.

    Args:
        path: Module and attribute, as `pkgutil.resolve_name` takes them.
        without: What happens without it, for the warning.
    """

    path: str
    without: str

    def find(self) -> Any:
        """Returns the object; None if this version of Ray does not have it, with one warning per process."""
        try:
            return pkgutil.resolve_name(self.path)
        except (ImportError, AttributeError) as error:
            _warn_once(f"Ray {ray.__version__} has no {self.path} ({error}): {self.without}.")
            return None


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


READ_AUTH_MODE = PrivateName(
    "ray._raylet:Config.initialize", f"a process that has joined one cluster may not join another one with {_AUTH_MODE}"
)
TOKEN_LOADER = PrivateName(
    "ray._raylet:AuthenticationTokenLoader", "a process that has joined one cluster may not join one of another token"
)
CHECK_SELECTOR = PrivateName("ray._private.label_utils:validate_label_selector", "label selectors are not checked")
MATCH_SELECTOR = PrivateName("ray._raylet:node_labels_match_selector", "label selectors cannot be used")
POPEN = PrivateName(
    "ray._private.services:ConsolePopen", "signals of a terminal or a scheduler also reach the processes of a cluster"
)
DRIVER_NODE = PrivateName("ray._private.worker:_global_node", "the page of the job is not recorded")
MAX_RESOURCES = PrivateName(
    "ray._private.state:state.get_max_resources_from_cluster_config", "an autoscaler's limits are not known"
)
LIST_FOLDER = PrivateName(
    "ray._private.runtime_env.packaging:_dir_travel", "the files uploaded with a job are not listed in advance"
)
PARSE_EXCLUDES = PrivateName("ray._private.runtime_env.packaging:_get_excludes", LIST_FOLDER.without)
DEFAULT_EXCLUDES = PrivateName("ray._private.ray_constants:get_runtime_env_default_excludes", LIST_FOLDER.without)
CAN_HAVE_NODES = PrivateName(
    "ray._private.ray_constants:ENABLE_RAY_CLUSTER",
    "the ports of a cluster that is started here can be reached from other machines",
)
PRESTART = PrivateName(
    "ray.core.generated.node_manager_pb2_grpc:NodeManagerServiceStub", "the next run of a session starts like the first"
)
GRPC_CHANNEL = PrivateName("ray._private.grpc_utils:init_grpc_channel", PRESTART.without)
HEAD_NODE = PrivateName("ray._private.node:Node", "a cluster that is started here starts and ends a second later")
SETUP_HOOK = PrivateName("ray._private.ray_constants:WORKER_PROCESS_SETUP_HOOK_ENV_VAR", PRESTART.without)
UV_HOOK = PrivateName("ray._private.ray_constants:RAY_ENABLE_UV_RUN_RUNTIME_ENV", "`uv run` uploads the working folder")

# Ray reads the variable when it is imported. Workers get the search path of the driver, without uv.
if "RAY_ENABLE_UV_RUN_RUNTIME_ENV" not in os.environ and UV_HOOK.find():
    vars(sys.modules[UV_HOOK.path.partition(":")[0]])["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = False


def imports_in_advance() -> dict[str, str]:
    """Returns the variable with which processes of a new cluster import what `prestart_workers` names, if it does."""
    name = SETUP_HOOK.find()
    return {} if name is None else {name: f"{__name__}.import_in_advance"}


def import_in_advance() -> None:
    """Imports modules in a process of Ray that has no work yet, where nothing else needs the CPU."""
    from ray.experimental.internal_kv import _internal_kv_get

    modules = (_internal_kv_get(_IN_ADVANCE) or b"").decode().split(",")

    def import_them() -> None:
        # On Linux each thread has a priority of its own, so that the work of the process has the usual one.
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        with without_gc():
            for module in filter(None, modules):
                # An error occurs again where the module is needed; here it would end the process.
                with suppress(Exception):
                    imported = pkgutil.resolve_name(module)
                    if callable(imported):
                        imported()

    thread = threading.Thread(target=import_them)
    thread.start()
    thread.join()


def prestart_workers(count: int, modules: Sequence[str]) -> None:
    """Starts processes on this node, which import modules and then wait for actors of this driver.

    Ray by itself starts a process when an actor needs it, and no actor runs in the process of an earlier actor or task.

    Args:
        count: The number of processes.
        modules: What they import: modules, or functions (`module:name`) that import.
    """
    from ray.core.generated.common_pb2 import Language
    from ray.core.generated.node_manager_pb2 import PrestartWorkersRequest
    from ray.experimental.internal_kv import _internal_kv_put

    stub, channel = PRESTART.find(), GRPC_CHANNEL.find()
    if stub is None or channel is None:
        return
    context = ray.get_runtime_context()
    [node] = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
    _internal_kv_put(_IN_ADVANCE, ",".join(modules).encode())
    with channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as connection:
        # Ray ignores what exceeds the number of cores, as long as the processes of the request before start.
        at_once = os.cpu_count() or 1
        for first in range(0, count, at_once):
            request = PrestartWorkersRequest(
                language=Language.PYTHON,
                job_id=bytes.fromhex(context.get_job_id()),
                num_workers=min(at_once, count - first),
                keep_alive_duration_secs=_IDLE_S,
            )
            stub(connection).PrestartWorkers(request, timeout=_PRESTART_TIMEOUT_S)
            time.sleep(_PRESTART_S)


def is_tested() -> bool:
    """Returns whether recovery in place has been tested with the installed version of Ray."""
    oldest, newest = TESTED_RAY
    return oldest <= tuple(map(int, ray.__version__.split(".")[:2])) <= newest


def require_token() -> None:
    """Makes clusters that this process starts from now on require the token in `~/.ray/auth_token`.

    The file is made if it does not exist, so that only its owner may read it; Ray by itself lets all users of the
    machine read it. As in Ray, `RAY_AUTH_MODE=disabled` in the environment turns this off.
    """
    if not _turn_tokens_on() or read_token() is not None:
        return
    token = secrets.token_hex(32)
    try:
        file = Path.home() / _TOKEN_FILE
        file.parent.mkdir(mode=0o700, exist_ok=True)
        # Another command may make the file at the same time; then its token counts.
        put_atomic(file, token.encode(), if_absent=True, mode=0o600)
    except (OSError, RuntimeError):
        # The home folder does not exist or cannot be written to, so only this cluster has the token.
        os.environ[_AUTH_TOKEN] = token
    if token_loader := TOKEN_LOADER.find():
        token_loader.instance().reset_cache()
    read_token()


def require_shared_token(machines: int) -> str:
    """Returns the token that all machines of a new cluster must have; empty if the environment turns tokens off.

    Raises:
        ConfigError: This machine has no token.
    """
    if not _turn_tokens_on():
        logger.warning(
            "RAY_AUTH_MODE is %s: every process that reaches a port of this cluster can run code as this user. Unset"
            " it, and give all machines the same token.",
            os.environ[_AUTH_MODE],
        )
        return ""
    if (token := read_token()) is None:
        raise ConfigError(
            f"The cluster of {machines} machines needs the same token on all of them, since every process that reaches"
            " its ports can run code, but this machine has none. If the machines share the home folder, run once: ray"
            f" get-auth-token --generate && chmod 600 ~/{_TOKEN_FILE}. In containers, mount a secret, and set"
            f" {_TOKEN_PATH} to its file. RAY_AUTH_MODE=disabled allows a cluster without a token, for a private"
            " network."
        )
    return token


def _turn_tokens_on() -> bool:
    """Turns Ray's tokens on unless the environment sets another mode; returns whether they are on."""
    is_on = os.environ.setdefault(_AUTH_MODE, "token").lower() == "token"
    if read_auth_mode := READ_AUTH_MODE.find():
        read_auth_mode("")
    return is_on


def read_token() -> str | None:
    """Returns Ray's token, from where Ray reads it, and hides it in all texts; None if there is none.

    A file in `~/.ray` that others may read is closed to them. For another file there is a warning, as for a key of ssh.

    Raises:
        ConfigError: The file that `RAY_AUTH_TOKEN_PATH` names cannot be read.
    """
    token, path = os.environ.get(_AUTH_TOKEN, ""), os.environ.get(_TOKEN_PATH)
    try:
        if not token:
            file = Path(path) if path else Path.home() / _TOKEN_FILE
            _close_to_others(file, warns=bool(path))
            token = file.read_text().strip()
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        if path:
            raise ConfigError(f"{_TOKEN_PATH} is {path!r}, which cannot be read: {error}.") from error
    register_secrets({"token": token})
    return token or None


def _close_to_others(file: Path, warns: bool) -> None:
    """Makes a file readable by its owner alone, or only warns if it is not."""
    mode = stat.S_IMODE(file.stat().st_mode)
    if not mode & 0o077:
        return
    if not warns:
        with suppress(OSError):
            file.chmod(0o600)
            return
    logger.warning(
        "Other users may read Ray's token in %s (mode %o): chmod 600 it, or mount the secret with this mode.",
        file,
        mode,
    )


@contextmanager
def on_loopback() -> Iterator[None]:
    """Has Ray listen on 127.0.0.1 only in a cluster that this process starts inside the block.

    Ray does so by itself on macOS and Windows. Elsewhere its ports are open on all addresses of the machine, and it has
    no other option for that: it replaces 127.0.0.1 as the address of a node. A value of the variable in the environment
    stays.
    """
    if _ONE_MACHINE in os.environ or CAN_HAVE_NODES.find() is None:
        yield
        return
    module, _, name = CAN_HAVE_NODES.path.partition(":")
    values = vars(sys.modules[module])
    # The processes of the cluster read the variable, and this process has read it.
    with (
        set_variables(**{_ONE_MACHINE: "0"}),
        restore_setting(name, functools.partial(values.get, name), functools.partial(values.__setitem__, name)),
    ):
        values[name] = False
        yield


def private_files() -> dict[str, str]:
    """Returns the variable that has the processes of a new cluster keep their files where no other user gets.

    All users of a machine can write to the folders that Ray makes below `/tmp/ray`, and so replace code in them. There
    is no variable if it is set already, or if Ray's sockets would get paths that are too long: a long TMPDIR, such as
    that of a SLURM job, belongs to one user anyway.
    """
    folder = str(temporary_folder())
    return {} if "RAY_TMPDIR" in os.environ or len(os.fsencode(folder)) > _MAX_TMPDIR else {"RAY_TMPDIR": folder}


@contextmanager
def connection_errors() -> Iterator[None]:
    """Turns errors of connecting to Ray that a user can fix into errors that say how.

    Raises:
        ConfigError: The cluster does not answer or requires a token, its address cannot be read, or the folder of
            Ray's sockets has too long a path.
    """
    try:
        yield
    except AuthenticationError as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f"The Ray cluster requires a token, but this process sent none, or another: {reason} {_SET_TOKEN}"
        ) from error
    except ValueError as error:
        reason = next(iter(str(error).splitlines()), "").rstrip(".")
        raise ConfigError(
            f"Ray refuses a setting: {reason}. Check the address (run.ray_address) and the variables RAY_*."
        ) from error
    except ConnectionError as error:
        # A cluster that requires a token does not answer to a process that sends none.
        raise ConfigError(
            f"Ray does not answer: {error}. Check the address (run.ray_address, RAY_ADDRESS) and that the cluster runs."
            f" `ray start` may also have asked for a token. {_SET_TOKEN}"
        ) from error
    except OSError as error:
        if _SOCKET_TOO_LONG not in str(error):
            raise
        raise ConfigError(
            f"Ray cannot open its sockets, whose paths may have 107 bytes: {error}. The path in TMPDIR or RAY_TMPDIR is"
            " too long; set RAY_TMPDIR to a short folder, such as /tmp/ray-1."
        ) from error


@contextmanager
def restore_auth_mode() -> Iterator[None]:
    """Restores `RAY_AUTH_MODE` after a connection, also in Ray, which keeps the value that it has read.

    With the old value every actor on a cluster of the other mode died before it ran.
    """
    try:
        with set_variables(**{_AUTH_MODE: None, _AUTH_TOKEN: None}):
            yield
    finally:
        if read_auth_mode := READ_AUTH_MODE.find():
            read_auth_mode("")
        if token_loader := TOKEN_LOADER.find():
            token_loader.instance().reset_cache()


def nodes_with_labels(nodes: Iterable[Node], selector: dict[str, str] | None) -> list[Node]:
    """Returns the live nodes with the labels of a selector; without a selector all live nodes.

    Raises:
        ConfigError: The selector is invalid, or this version of Ray has no function that matches labels.
    """
    alive = [node for node in nodes if node["Alive"]]
    if not selector:
        return alive
    check, matches = CHECK_SELECTOR.find(), MATCH_SELECTOR.find()
    if matches is None:
        raise ConfigError(
            f"scaling.label_selector is {selector}, but Ray {ray.__version__} has no {MATCH_SELECTOR.path}, which"
            " matches labels. Leave the field out, or use a version of Ray from docs/versions.md."
        )
    problem = check(selector) if check is not None else None
    if problem is not None:
        raise ConfigError(
            f"scaling.label_selector is {selector}: {problem} Write it as Ray does, such as {{zone: a}} or"
            " {zone: 'in(a,b)'}."
        )
    return [node for node in alive if matches(node["Labels"], selector)]


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


def actor_id_of(actor: Any) -> str:
    """Returns the id of an actor, by which the rendezvous knows the worker."""
    return actor._actor_id.hex()


def use_stable_run_id(trainer: TorchTrainer, run_root: str) -> None:
    """Has every start of a run ask for resources under one name.

    Ray keeps what a killed driver asked for under its name for 180 s; the next start takes it over.
    """
    with suppress(AttributeError):
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
    job = json.loads(os.environ.get(_RAY_JOB_VARIABLE, "{}"))
    # There is no global node with a connection through `ray://`.
    node = DRIVER_NODE.find()
    address = os.environ.get("RAY_OVERRIDE_DASHBOARD_URL") or getattr(node, "webui_url", None)
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
    folder, package = str(current_folder()), str(Path(__file__).resolve().parents[2])
    installed = _installed_paths()
    libraries = {path for path in installed if Path(path).name in ("site-packages", "dist-packages")}
    # Ray and other libraries add folders inside their own, which are left out.
    added = [path for path in sys.path if libraries.isdisjoint(map(str, Path(path).parents))]
    paths = [package, folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep), *added]
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


def module_times() -> dict[str, int]:
    """Returns when the file of each imported module that is not installed was last changed."""
    folders = tuple(search_path())
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    files = [file for file in files if file.startswith(folders) and "site-packages" not in file]
    return {file: os.stat(file).st_mtime_ns for file in files if os.path.exists(file)}


def job_config() -> JobConfig | None:
    """Returns the configuration with which a driver joins a cluster; None in a Ray job.

    In a Ray job the workers have the job's runtime environment.
    """
    if _RAY_JOB_VARIABLE in os.environ:
        return None
    paths = search_path()
    try:
        # The order is reversed, because workers insert each folder before the last one.
        return JobConfig(_py_driver_sys_path=paths[::-1])
    except TypeError:
        return JobConfig(runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}})


def files_to_upload(folder: Path, excludes: Sequence[str]) -> list[Path] | None:
    """Returns the files that Ray uploads if a folder is the working directory of a job; None if they are not known.

    Args:
        folder: The folder.
        excludes: Patterns of files that are not uploaded, as in `.gitignore`, besides those that Ray leaves out.
    """
    list_folder, parse_excludes = LIST_FOLDER.find(), PARSE_EXCLUDES.find()
    default_excludes = DEFAULT_EXCLUDES.find()
    if list_folder is None or parse_excludes is None or default_excludes is None:
        return None
    paths: list[Path] = []
    quiet = logging.getLogger(f"{__name__}.ignored")
    quiet.setLevel(logging.WARNING)
    follows_git = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    is_excluded = [parse_excludes(folder, [*default_excludes(), *excludes])]
    list_folder(folder, is_excluded, paths.append, include_gitignore=follows_git, logger=quiet)
    return [path for path in paths if path.is_file()]


def quiet_cluster_start() -> None:
    """Has Ray log only errors about the token and the processes of a cluster that this process starts."""
    logging.getLogger("ray._private.utils").setLevel(logging.WARNING)
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)


@contextmanager
def in_own_sessions() -> Iterator[None]:
    """Starts Ray's processes in sessions of their own within the block.

    A terminal, `timeout`, PBS and LSF send their signals to all processes of a session or group. The driver alone
    reacts: it needs Ray to end the run with a checkpoint, and Ray's processes end with it.
    """
    popen = POPEN.find()
    if popen is None:
        yield
        return
    services = sys.modules[popen.__module__]
    vars(services)[popen.__name__] = functools.partial(popen, start_new_session=True)
    try:
        yield
    finally:
        vars(services)[popen.__name__] = popen


@contextmanager
def without_services() -> Iterator[None]:
    """Has a cluster that this process starts inside the block do without autoscaler, dashboard and log monitor.

    No one uses them on one machine. They take two CPU seconds, and Ray waits for one at the start and the end.
    """
    node = HEAD_NODE.find()
    with ExitStack() as stack:
        for name in ("start_monitor", "start_api_server", "start_log_monitor"):
            if method := getattr(node, name, None):
                stack.callback(setattr, node, name, method)
                setattr(node, name, lambda *_, **__: None)
        yield


def max_resources() -> dict[str, float] | None:
    """Returns the resources to which the connected cluster may grow, by Ray's names; None without an autoscaler.

    They are infinite if an autoscaler starts nodes and does not tell how many, as those of `ray up` and KubeRay.
    """
    get_limits = MAX_RESOURCES.find()
    if limits := get_limits() if get_limits is not None else None:
        return {name: float(limit) for name, limit in limits.items()}
    has_autoscaler = any(not node_type.startswith(_SINGLE_NODE_PREFIX) for node_type in _node_types())
    return {"CPU": math.inf, "GPU": math.inf} if has_autoscaler else None


def _node_types() -> set[str]:
    """Returns the types that the autoscaler's process gives to the existing nodes; none if it reports none."""
    try:
        from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
        from ray.autoscaler.v2.sdk import get_cluster_status
        from ray.autoscaler.v2.utils import is_autoscaler_v2
        from ray.experimental.internal_kv import _internal_kv_get

        # In version 1 the types come from the autoscaler's report, because KubeRay names types without an autoscaler,
        # too.
        if not is_autoscaler_v2(fetch_from_server=True):
            report = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or "{}")
            return set(((report.get("autoscaler_report") or {}).get("node_type_mapping") or {}).values())
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        return {node.ray_node_type_name for node in [*status.active_nodes, *status.idle_nodes]} - {""}
    # There is no autoscaler, or it has not reported yet. Then a run that does not fit is refused.
    except Exception as error:
        logger.debug("No autoscaler describes the cluster: %s", error)
        return set()
