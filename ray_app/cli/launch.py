"""The command `ray-app launch`: called on every machine, it makes a Ray cluster of them and trains on it.

The machines are those of the variables of a scheduler: `TF_CONFIG`, the variables of torchrun and Kubeflow, or those of
MPI, SLURM, PBS, LSF and SageMaker. The first machine starts Ray's head node and trains, the others join its cluster.
Each keeps a connection to the first one, which sends lines: `ready` once Ray's head node answers, and then values of
`Group.broadcast`. Both ends first prove that they have Ray's token, and another machine starts Ray only after that.
`ray_app.keras` joins the machines of a program in the same way.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import ray

from ray_app.channel import Listener, UnprovenServerError, connect
from ray_app.cli import train
from ray_app.cli.main import exit_code
from ray_app.cluster.ray_private import Node, private_files, read_token, require_shared_token, require_token
from ray_app.config.variables import python_variables
from ray_app.driver.parsing import parse_with_sections
from ray_app.errors import ConfigError, RayAppError
from ray_app.process import interrupt_at_signals, set_variables

logger = logging.getLogger(__name__)

_DESCRIPTION = "Makes a Ray cluster of all machines of a job and trains a configuration on it. Run it on each."
_MASTER = "MASTER_ADDR"
_FORM_S = 600.0
"""Seconds for which a machine waits until all have joined."""
_STOP_S = 25.0
"""Seconds that another machine than the first waits for the next line after SIGTERM.

SLURM kills a job 30 s after it.
"""
_POLL_S = 0.5
_RANK_BYTES = 4
_MAX_OUTPUT_BYTES = 1 << 20
"""Maximum length of the output of `ray start` that is searched for warnings."""
_TASK_TYPES = ("chief", "master", "worker", "ps", "evaluator")
"""The types of tasks of `TF_CONFIG`, in the order in which their machines are numbered."""


@dataclass(frozen=True)
class Machines:
    """The machines of a cluster, from the view of the process on one of them.

    Args:
        first: Name or address of the first machine.
        port: Port of Ray's head node there; the processes connect at the next one.
        rank: Number of this process, from 0.
        size: Number of processes.
        names: Their names for messages; by default their numbers.
        nodes: Number of Ray nodes, 0 if all processes are on one machine; None: one for each process.
        starts_node: Whether this process starts Ray on its machine.
    """

    first: str
    port: int
    rank: int
    size: int
    names: tuple[str, ...] = ()
    nodes: int | None = None
    starts_node: bool = True


class TFConfigClusterResolver:
    """The tasks of `TF_CONFIG`, or of another text in its form; without it one of no type.

    Attributes:
        task_type: The type of the task of this process.
        task_id: Its number among the tasks of this type.
        tasks: The addresses of the tasks of all processes, such as `a:12345`, by their types.
        machines: The machines of all tasks.
    """

    def __init__(self, text: str | None = None) -> None:
        text = os.environ.get("TF_CONFIG", "") if text is None else text
        self.task_type, self.task_id = None, None
        self.tasks: dict[str, list[str]] = {}
        self.machines = Machines("localhost", 0, 0, 1)
        if text.strip() in ("", "{}"):
            return
        try:
            spec = json.loads(text)
            for kind in sorted(spec["cluster"], key=_TASK_TYPES.index):
                self.tasks[kind] = [str(address) for address in spec["cluster"][kind]]
            self.task_type, self.task_id = spec["task"]["type"], int(spec["task"]["index"])
            tasks = [(kind, i, address) for kind in self.tasks for i, address in enumerate(self.tasks[kind])]
            rank = [task[:2] for task in tasks].index((self.task_type, self.task_id))
            hosts, ports = zip(*(address.rsplit(":", 1) for *_, address in tasks), strict=True)
            names = tuple(f"{kind} {i} ({address})" for kind, i, address in tasks)
            nodes = len(set(hosts)) if len(set(hosts)) > 1 else 0
            starts_node = nodes > 0 and hosts.index(hosts[rank]) == rank
            self.machines = Machines(hosts[0], int(ports[0]), rank, len(hosts), names, nodes, starts_node)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"TF_CONFIG is {text!r}, which names no machines: {type(error).__name__}: {error}. A valid value is"
                ' {"cluster": {"worker": ["a:12345", "b:12345"]}, "task": {"type": "worker", "index": 0}}.'
            ) from error

    def cluster_spec(self) -> Any:
        """Returns an object with the method `as_dict` of `tf.train.ClusterSpec`."""
        return SimpleNamespace(as_dict=lambda: dict(self.tasks))


_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
"""The variables of torchrun that count processes; the run does not get them."""


def read_machines(variables: Mapping[str, str]) -> Machines:
    """Returns the machines that the environment variables of a scheduler describe.

    Raises:
        ConfigError: The variables describe no machines, or several processes on one.
    """
    if "TF_CONFIG" in variables:
        return TFConfigClusterResolver(variables["TF_CONFIG"]).machines
    if {"MASTER_ADDR", "RANK", "WORLD_SIZE"} <= variables.keys():
        return _from_torch(variables)
    if {"PET_MASTER_ADDR", "PET_NODE_RANK", "PET_NNODES"} <= variables.keys():
        rank, size = _number(variables, "PET_NODE_RANK"), _number(variables, "PET_NNODES")
        return Machines(variables["PET_MASTER_ADDR"], _number(variables, "PET_MASTER_PORT", "29400"), rank, size)
    for names in _MPI:
        # srun sets the variables of PMI, too.
        if names[0] in variables and not (names[0].startswith("PMI") and "SLURM_JOB_ID" in variables):
            return _from_mpi(variables, names)
    if "SLURM_JOB_ID" in variables:
        return _from_slurm(variables)
    if hosts := _scheduler_hosts(variables):
        name = variables.get("SM_CURRENT_HOST") or socket.gethostname()
        ranks = [rank for rank, host in enumerate(hosts) if host.partition(".")[0] == name.partition(".")[0]]
        if not ranks:
            raise ConfigError(f"The job has the machines {', '.join(hosts)}, but this machine is {name}.")
        return Machines(hosts[0], _job_port(variables), ranks[0], len(hosts))
    raise ConfigError(
        "No environment variable lists the machines: TF_CONFIG; MASTER_ADDR, RANK and WORLD_SIZE (torchrun,"
        " PyTorchJob); PET_MASTER_ADDR, PET_NODE_RANK and PET_NNODES (TrainJob); or the variables of mpirun, srun, PBS,"
        " LSF or SageMaker. On one machine, or in a running Ray cluster, use ray-app train."
    )


_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)
"""The variables of Open MPI, and of MPICH and Intel MPI: rank, number of processes, and those on this machine."""


def _from_mpi(variables: Mapping[str, str], names: tuple[str, str, str]) -> Machines:
    rank, size, local = names
    if variables.get(local, "1") != "1":
        raise ConfigError(
            f"This machine has several processes ({local}). Start one ray-app launch per machine (mpirun --map-by"
            " ppr:1:node or -ppn 1); it uses all CPUs and GPUs there."
        )
    if not (hosts := [variables[_MASTER]] if _MASTER in variables else _scheduler_hosts(variables)):
        raise ConfigError(
            f"mpirun numbers the processes ({rank}), but no variable names the first machine. Set {_MASTER} to its"
            f" name: mpirun -x {_MASTER}=HOST (Open MPI) or -genv {_MASTER} HOST (MPICH, Intel MPI)."
        )
    return Machines(hosts[0], _job_port(variables), _number(variables, rank), _number(variables, size))


def _scheduler_hosts(variables: Mapping[str, str]) -> list[str]:
    """Returns the machines of a job of SageMaker, SLURM, PBS or LSF, each once; an empty list without one."""
    if "SM_HOSTS" in variables:
        return [str(host) for host in json.loads(variables["SM_HOSTS"])]
    if "SLURM_JOB_NODELIST" in variables:
        return expand_hosts(variables["SLURM_JOB_NODELIST"])
    if (file := variables.get("PBS_NODEFILE")) is not None:
        try:
            return list(dict.fromkeys(Path(file).read_text().split()))
        except OSError as error:
            raise ConfigError(f"PBS_NODEFILE is {file!r}, which cannot be read: {error.strerror}.") from error
    # Each name is followed by a number of slots.
    pairs = variables.get("LSB_MCPU_HOSTS", "").split()[::2]
    return list(dict.fromkeys(pairs or variables.get("LSB_HOSTS", "").split()))


def _job_port(variables: Mapping[str, str]) -> int:
    """Returns a port for a job: `MASTER_PORT`, or one that follows from its number, such as `123[4].server` of PBS.

    Jobs that share a machine have other ports, below those that the system gives to connections.
    """
    numbers = (variables.get(name) for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"))
    job = re.match(r"\d+", next(filter(None, numbers), ""))
    port = 20_000 + 2 * (int(job[0]) % 6000) if job is not None else 29_500
    return _number(variables, "MASTER_PORT", str(port))


def _from_torch(variables: Mapping[str, str]) -> Machines:
    if variables.get("LOCAL_WORLD_SIZE", "1") != "1" or variables.get("LOCAL_RANK", "0") != "0":
        raise ConfigError(
            "This machine has several processes (LOCAL_WORLD_SIZE, LOCAL_RANK). Start one ray-app launch per machine"
            " (torchrun --nproc-per-node=1); it uses all GPUs there."
        )
    rank, size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    port = _number(variables, "MASTER_PORT", "29500")
    # The store of torchrun listens at MASTER_PORT.
    return Machines(variables["MASTER_ADDR"], port + ("TORCHELASTIC_RUN_ID" in variables), rank, size)


def _from_slurm(variables: Mapping[str, str]) -> Machines:
    hosts = expand_hosts(variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", ""))
    if "SLURM_STEP_NODELIST" not in variables and len(hosts) > 1:
        raise ConfigError(
            f"The job has {len(hosts)} nodes, but its batch script runs on one of them. Start ray-app launch with srun:"
            " srun --ntasks-per-node=1 ray-app launch ..."
        )
    rank, size = _number(variables, "SLURM_PROCID", "0"), len(hosts)
    tasks = _number(variables, "SLURM_STEP_NUM_TASKS", str(size))
    if tasks != size:
        raise ConfigError(
            f"srun starts {tasks} tasks on {size} nodes. Start one ray-app launch per node (srun --ntasks-per-node=1);"
            " it uses all CPUs and GPUs of the job there."
        )
    return Machines(hosts[0], _job_port(variables), rank, size)


def _number(variables: Mapping[str, str], name: str, default: str = "") -> int:
    value = variables.get(name, default)
    if not value.isdecimal():
        raise ConfigError(f"{name} is {value!r}; it must be a number. Correct or unset the variable.")
    return int(value)


def expand_hosts(nodes: str) -> list[str]:
    """Returns the names of a node list of SLURM, such as `gpu[01-03,07],login`, in its order.

    Raises:
        ConfigError: The list is empty or cannot be read.
    """
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes):
        # The odd parts are in brackets.
        parts = re.split(r"\[([^\]]*)\]", item)
        hosts += map("".join, product(*(_expand_range(p) if i % 2 else [p] for i, p in enumerate(parts))))
    if not hosts:
        raise ConfigError(f"SLURM_JOB_NODELIST is {nodes!r}, which names no nodes.")
    return hosts


def _expand_range(text: str) -> list[str]:
    names: list[str] = []
    for item in text.split(","):
        low, _, high = item.partition("-")
        if not low.isdecimal() or not (high or low).isdecimal():
            raise ConfigError(f"SLURM_JOB_NODELIST has [{text}]; brackets hold numbers and ranges, such as 01-03,07.")
        names += [f"{number:0{len(low)}}" for number in range(int(low), int(high or low) + 1)]
    return names


class Followers:
    """The connections of the other machines to the first one, which have proven that they have its token.

    Args:
        address: The address and port at which the first machine listens.
        token: Ray's token.

    Raises:
        RayAppError: Another process has the port.
    """

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self._listener = Listener(self._add, token)
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._ranks: dict[socket.socket, int] = {}
        self._sent = b""
        try:
            self._listener.listen(address[0], port=address[1])
        except OSError as error:
            raise _taken_error(address, error) from error

    def _add(self, connection: socket.socket) -> None:
        connection.settimeout(10)
        with self._lock:
            self._connections.append(connection)
            with suppress(OSError):
                connection.sendall(self._sent)

    def ranks(self) -> set[int]:
        """Returns the ranks of the processes that have connected."""
        with self._lock:
            for connection in set(self._connections) - self._ranks.keys():
                with suppress(OSError):
                    if select.select([connection], [], [], 0)[0]:
                        self._ranks[connection] = int.from_bytes(connection.recv(_RANK_BYTES))
            return set(self._ranks.values())

    def send(self, message: str) -> None:
        """Sends a line to all machines, also to those that connect later."""
        with self._lock:
            line = f"{message}\n".encode()
            self._sent += line
            for connection in self._connections:
                with suppress(OSError):
                    connection.sendall(line)

    def close(self) -> None:
        """Closes the connections."""
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                connection.close()


def _taken_error(address: tuple[str, int], error: OSError) -> RayAppError:
    """Returns the error for a port of the first machine at which this process cannot listen."""
    pids = [c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == address[1] and c.pid]
    owner = f"process {pids[0]}" if pids else "a process of another user"
    reason = f"{owner} uses it" if error.errno == errno.EADDRINUSE else str(error)
    return RayAppError(
        f"The first machine cannot listen at port {address[1]} of {address[0]}: {reason}. End the process that uses the"
        " port, or set another port on all machines: MASTER_PORT, or the first port in TF_CONFIG."
    )


@contextmanager
def ray_node(options: list[str]) -> Iterator[Callable[[], None]]:
    """Runs Ray's processes of this machine inside the block.

    Args:
        options: Further options of `ray start`.

    Yields:
        A function that raises `RayAppError` if these processes have ended.
    """
    # A scheduler may give a job some of the CPUs of a node, and Ray counts all.
    bound = len(os.sched_getaffinity(0))
    count = os.environ.get("SLURM_CPUS_ON_NODE") or (bound if bound < (os.cpu_count() or 1) else None)
    cpus = [f"--num-cpus={count}"] if count else []
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--disable-usage-stats",
        *options,
        *cpus,
    ]
    with tempfile.TemporaryFile() as output:
        # In a session of its own, so that Ctrl-C and the signals of a scheduler reach this process alone.
        environment = os.environ | private_files() | python_variables(os.environ)
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        logged_lines: set[str] = set()

        def check() -> None:
            # `seek` would move the place where Ray's processes write.
            text = os.pread(output.fileno(), _MAX_OUTPUT_BYTES, 0).decode(errors="replace")
            for line in text.splitlines():
                if re.search(r"(?i)\bwarning\b", line) and line not in logged_lines:
                    logger.warning("ray start: %s", line)
                    logged_lines.add(line)
            if process.poll() is not None:
                raise RayAppError(f"ray start {' '.join(options)} ended: {text[-2000:].strip()}")

        try:
            yield check
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Group:
    """The connection of a process to those of the other machines.

    Args:
        nodes: On the first machine: the nodes as `ray.nodes()` returns them.
        send: Sends a line from the first machine to the others.
        receive: Waits on another machine for a line of the first one; returns "" if that is gone.
    """

    machines: Machines
    nodes: Sequence[Node] = ()
    send: Callable[[str], None] | None = None
    receive: Callable[[], str] | None = None

    def broadcast(self, value: Any) -> Any:
        """Returns the value of the first machine on all of them; raises RayAppError if that has ended."""
        if self.send is not None:
            self.send(json.dumps(value, default=float))
            return value
        assert self.receive is not None
        with interrupt_at_signals():
            if line := self.receive():
                return json.loads(line)
        raise RayAppError(f"The program on the first machine, {self.machines.first}, has ended; see its output there.")


@contextmanager
def join(machines: Machines, label: str = "") -> Iterator[Group]:
    """Makes a Ray cluster of machines for the time of the block, and waits until all have joined.

    On the first machine, `RAY_ADDRESS` names the cluster in the block.

    Args:
        label: A label of the node of this machine, `NAME=VALUE`.

    Raises:
        ConfigError: This machine has no token, or another one than the first machine.
        RayAppError: A machine has not joined in time.
    """
    if machines.nodes == 0:
        require_token()
    token = read_token() or "" if machines.nodes == 0 else require_shared_token(machines.size)
    with (follow if machines.rank else lead)(machines, token, [f"--labels={label}"] if label else []) as group:
        yield group


@contextmanager
def lead(machines: Machines, token: str, label: list[str]) -> Iterator[Group]:
    """Starts Ray's head node, and waits until all machines have joined."""
    address = socket.gethostbyname(machines.first)
    # Some machines resolve their own name to an address that others cannot reach.
    if address.startswith("127.") and machines.nodes != 0:
        address = ray.util.get_node_ip_address()
    ray_address = f"{address}:{machines.port}"
    head = ["--head", f"--node-ip-address={address}", f"--port={machines.port}", "--include-dashboard=false"]
    names = machines.names or [f"machine {rank}" for rank in range(machines.size)]
    count = machines.size if machines.nodes is None else machines.nodes
    nodes: list[Node] = []

    def missing() -> str:
        absent = sorted({*range(1, machines.size)} - followers.ranks())
        nodes[:] = [node for node in ray.nodes() if node["Alive"]] if count else []
        return ", ".join(names[rank] for rank in absent) or ("Ray's nodes" if len(nodes) < count else "")

    with (
        closing(Followers((address, machines.port + 1), token)) as followers,
        ray_node(head + label) if machines.starts_node else nullcontext(lambda: None) as check,
        set_variables(RAY_ADDRESS=ray_address if count else None),
    ):
        try:
            if count:
                wait(lambda: "" if is_connected(ray_address) else "Ray's head node", check)
            followers.send("ready")
            wait(missing, check)
        except KeyboardInterrupt:
            followers.send("75")
            raise
        finally:
            ray.shutdown()
        yield Group(machines, nodes, followers.send)


@contextmanager
def follow(machines: Machines, token: str, label: list[str]) -> Iterator[Group]:
    """Joins the cluster of the first machine."""
    deadline_s = time.monotonic() + _FORM_S
    while True:
        try:
            connection = connect((machines.first, machines.port + 1), token, 10)
            break
        except UnprovenServerError as error:
            raise ConfigError(
                f"The program at port {machines.port + 1} of the first machine, {machines.first}, does not have the"
                " token of this machine, so this machine does not join. Set the same token on all machines (a shared"
                " ~/.ray/auth_token or RAY_AUTH_TOKEN_PATH), and the same RAY_AUTH_MODE. If they are the same, another"
                " program uses this port: set another port on all machines."
            ) from error
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise RayAppError(
                    f"The first machine, {machines.first}, does not answer at port {machines.port + 1}: {error}"
                ) from error
            time.sleep(_POLL_S)
    connection.sendall(machines.rank.to_bytes(_RANK_BYTES))
    connection.settimeout(_FORM_S)
    # Without a buffer, so that `select` shows each line.
    with connection, connection.makefile("rb", buffering=0) as lines:
        if lines.readline() != b"ready\n":
            raise RayAppError(f"The first machine, {machines.first}, ended before Ray's head node answered.")
        address = f"--address={socket.gethostbyname(machines.first)}:{machines.port}"
        with ray_node([address, *label]) if machines.starts_node else nullcontext(lambda: None) as check:

            def receive() -> str:
                _wait_for_line(connection, check)
                return str(lines.readline(), "utf-8").strip()

            yield Group(machines, receive=receive)


def _wait_for_line(connection: socket.socket, check: Callable[[], None]) -> None:
    """Waits for the next line, after a first SIGTERM or Ctrl-C for at most 25 s.

    A scheduler sends the signal to all machines, and the first one then ends the run with a checkpoint. It may take
    longer after a warning, such as SIGUSR1.
    """
    stop_s = math.inf
    while True:
        try:
            if select.select([connection], [], [], _POLL_S)[0]:
                return
            check()
        except KeyboardInterrupt as interrupt:
            if stop_s < math.inf:
                raise
            if {*interrupt.args}.isdisjoint((signal.SIGINT, signal.SIGTERM)):
                continue
            stop_s = time.monotonic() + _STOP_S
        if time.monotonic() > stop_s:
            raise KeyboardInterrupt


def wait(missing: Callable[[], str], check: Callable[[], None]) -> None:
    """Waits until nothing is missing; `check` raises if that can no longer come.

    Raises:
        RayAppError: It does not come in time.
    """
    deadline_s = time.monotonic() + _FORM_S
    while name := missing():
        check()
        if time.monotonic() > deadline_s:
            raise RayAppError(
                f"{name} did not join within {_FORM_S:g} s. Start the same program there, or read its output."
            )
        time.sleep(_POLL_S)


def is_connected(address: str) -> bool:
    """Connects to Ray's head node, and returns whether it answers."""
    host, port = address.rsplit(":", 1)
    try:
        # A connection of Ray to a port at which nothing listens takes a while to fail.
        socket.create_connection((host, int(port)), 1).close()
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    except ray.exceptions.AuthenticationError:
        raise
    # Ray raises errors of several types until the head node has registered itself.
    except Exception:
        return False
    return True


def _train(group: Group, arguments: list[str], prog: str) -> int:
    """Trains on the first machine; returns the exit code of the run on all."""
    if group.machines.rank:
        return int(group.broadcast(None))
    code = train.EXIT_CODES["failed"]
    try:
        code = train.main(arguments, prog)
    except KeyboardInterrupt:
        code = train.EXIT_CODES["interrupted"]
        raise
    finally:
        # The other machines leave before the head node ends.
        group.broadcast(code)
    return code


def main(arguments: list[str] | None = None, prog: str = "ray-app launch") -> int:
    """Runs `ray-app launch`, with the arguments of `ray-app train`; every machine returns the exit code of the run."""
    command_line = sys.argv[1:] if arguments is None else arguments

    def work() -> int:
        # Every machine refuses a wrong configuration by itself, before anything starts.
        parse_with_sections(command_line, {}, prog, description=_DESCRIPTION)
        machines = read_machines(os.environ)
        # Code of users, written for DDP, divides by WORLD_SIZE; no result may depend on the number of machines.
        for name in _RANK_VARIABLES:
            os.environ.pop(name, None)
        if machines.size == 1:
            return train.main(command_line, prog)
        with join(machines) as group:
            return _train(group, command_line, prog)

    return exit_code(work, "The launch failed")
