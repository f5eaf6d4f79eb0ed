"""Two faults of memory: `flip`, silent data corruption, and `memory`, a worker that the kernel kills for its memory.

The latter is put into a control group (cgroup, version 1 or 2) with little memory.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor, nn

from ray_app.config.strategies import list_strategies
from ray_app.drill.faults import Evidence
from ray_app.drill.process_scenarios import confirm_deaths
from ray_app.drill.scenario import Scenario, ScenarioContext, ScenarioResult, unmet
from ray_app.driver.run import Faults
from ray_app.retry import Retry
from ray_app.train.job import Hooks

FlipTarget = Literal["gradient", "activation", "parameter"]
_BIT = 1 << 22
"""The highest bit of the mantissa of a float32."""
MEMORY_LIMIT_BYTES = 64 << 20
_CHUNK_BYTES, _CHUNKS = 16 << 20, 64
_LIMIT_FILES = {
    "memory.limit_in_bytes": MEMORY_LIMIT_BYTES,
    "memory.max": MEMORY_LIMIT_BYTES,
    "memory.memsw.limit_in_bytes": MEMORY_LIMIT_BYTES,
    "memory.swap.max": 0,
}
_COUNTER_FILES = ("memory.oom_control", "memory.events")
_TASK_TIMEOUT_S = 60.0


def flip(context: ScenarioContext) -> Scenario | str:
    """A bit of an activation of a worker is another one; all shares are computed twice."""
    train = context.config.train
    if context.workers < 2:
        return "no other worker can recompute a share"
    if not train.strategy_traits.can_move_shares or train.reduction != "exact":
        allowed = list_strategies(lambda traits: traits.can_move_shares)
        return f"shares can be recomputed only with {allowed} and train.reduction exact"
    step, rank = context.choose_step(), context.choose_rank()
    bit = Flip(context.evidence, "flipped", "activation", rank, step)
    hooks = Hooks(after_step=context.delayed(step, bit), built=bit.built)

    def confirm(run: ScenarioResult) -> list[str]:
        ranks = [e.details["rank"] for e in run.events("sdc_detected")]
        return unmet((ranks == [rank], f"rank {rank} computed wrongly once, corrupt were: {ranks or 'none'}"))

    return Scenario([step], ["flipped"], confirm, Faults(train=hooks), changes={"failure__sdc_check_rate": 1.0})


@dataclass
class Flip:
    """Flips one bit of a rank after a step (parameter) or in the next step (gradient, activation).

    It is a hook for `Hooks.built` and `Hooks.after_step`.
    """

    evidence: Evidence
    name: str
    target: FlipTarget
    rank: int
    step: int
    _model: nn.Module | None = None
    _is_armed: bool = False

    def built(self, model: nn.Module) -> None:
        """See `Hooks.built`."""
        self._model = model
        layer = next(part for part in model.modules() if not list(part.children()) and list(part.parameters()))
        if self.target == "activation":
            layer.register_forward_hook(lambda module, args, output: self._flip_armed(output))
        if self.target == "gradient":
            next(p for p in model.parameters() if p.requires_grad).register_hook(self._flip_armed)

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if (
            rank != self.rank
            or step != self.step
            or not self.evidence.put(self.name, rank=rank, step=step, what=self.target)
        ):
            return
        self._is_armed = True
        if self.target == "parameter":
            assert self._model is not None
            with torch.no_grad():
                p = next(p for p in self._model.parameters() if p.requires_grad)
                p.copy_(self._flip_armed(p))

    def _flip_armed(self, values: Tensor) -> Tensor:
        """Returns the values with one bit flipped in the one of largest magnitude if armed, and disarms the hook."""
        if not self._is_armed:
            return values
        self._is_armed = False
        integers = values.detach().float().clone().view(torch.int32).reshape(-1)
        integers[values.detach().abs().argmax()] ^= _BIT
        flipped: Any = integers.view(torch.float32).view(values.shape).to(values.dtype)
        return values + (flipped - values).detach() if values.requires_grad and not values.is_leaf else flipped


def memory(context: ScenarioContext) -> Scenario | str:
    """A worker uses more memory than the kernel lets it have, and is killed by it."""
    if obstacle := _find_obstacle(context):
        return obstacle
    step, evidence = context.choose_step(), context.evidence

    @contextmanager
    def setup() -> Iterator[dict[str, Any]]:
        try:
            yield {}
        finally:
            if entry := evidence.get("limited"):
                with suppress(ray.exceptions.RayError):
                    _run_on_node(entry["node"], remove_cgroup, entry["group"])

    def confirm(run: ScenarioResult) -> list[str]:
        entry = run.evidence["limited"]
        kills = _run_on_node(entry["node"], count_oom_kills, entry["group"])
        message = f"the kernel counts {kills} processes that it killed for their memory"
        return unmet((kills == 1, message)) + confirm_deaths(["limited"])(run)

    hooks = Hooks(after_step=context.delayed(step, ExceedMemoryLimit(evidence, step, context.choose_rank())))
    return Scenario([step], ["limited"], confirm, Faults(train=hooks), setup=setup)


def _find_obstacle(context: ScenarioContext) -> str | None:
    """Returns why the nodes on which workers may run cannot limit the memory of a process; None if they can."""
    if context.nodes is not None:
        return find_cgroup_obstacle()
    try:
        obstacles = (_run_on_node(node["NodeID"], find_cgroup_obstacle) for node in ray.nodes() if node["Alive"])
        return next(filter(None, obstacles), None)
    except ray.exceptions.RayError as error:
        return f"a node does not report whether control groups can be created there: {type(error).__name__}"


def _run_on_node(node: str, work: Callable[..., Any], *arguments: str) -> Any:
    """Runs a function as a Ray task on a node; returns its result."""
    on_the_node = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(work).options(num_cpus=0, scheduling_strategy=on_the_node)
    return ray.get(task.remote(*arguments), timeout=_TASK_TIMEOUT_S)


@dataclass(frozen=True)
class ExceedMemoryLimit:
    """Moves a rank into a group with little memory after a step, and uses more than that."""

    evidence: Evidence
    step: int
    rank: int

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if step != self.step or rank != self.rank or self.evidence.has("limited"):
            return
        group = make_cgroup()
        if self.evidence.put("limited", rank=rank, step=step, group=str(group), limit_bytes=MEMORY_LIMIT_BYTES):
            add_to_cgroup(group, os.getpid())
            exceed_limit()


def exceed_limit() -> None:
    """Allocates and writes more memory than the limit, so that the kernel kills this process."""
    chunks = [b"\1" * _CHUNK_BYTES for _ in range(_CHUNKS)]
    raise RuntimeError(f"{len(chunks) * _CHUNK_BYTES} bytes are allocated despite a limit of {MEMORY_LIMIT_BYTES}")


def find_cgroup_obstacle() -> str | None:
    """Returns why no group with a memory limit can be made on this machine; None if it can."""
    try:
        group = make_cgroup()
        try:
            with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as process:
                try:
                    add_to_cgroup(group, process.pid)
                finally:
                    process.kill()
        finally:
            remove_cgroup(str(group))
    except OSError as error:
        return f"no control group with a memory limit can be created here: {error}"
    return None


def make_cgroup() -> Path:
    """Makes an empty group with the memory limit in this process's one or one above; raises `OSError` if none may."""
    message = "no control groups of memory are mounted"
    for parent in _candidate_parents():
        group = parent / f"ray-app-drill-{uuid.uuid4().hex[:12]}"
        try:
            group.mkdir()
        except OSError as error:
            message = str(error)
            continue
        files = [group / name for name in _LIMIT_FILES if (group / name).exists()]
        try:
            if not {"memory.limit_in_bytes", "memory.max"} & {file.name for file in files}:
                raise OSError(f"groups in {parent} have no memory limit")
            for file in files:
                file.write_text(str(_LIMIT_FILES[file.name]))
            return group
        except OSError as error:
            message = str(error)
            group.rmdir()
    raise OSError(message)


def _candidate_parents() -> Iterator[Path]:
    """Yields the groups below which a new one may be made: first the group of this process, then those above it."""
    memberships = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, filesystem = line.split(" - ")
        kind, _, options = filesystem.split(" ", 2)
        root, mount_point = mount.split()[3:5]
        is_v1 = kind == "cgroup" and "memory" in options.split(",")
        if not (is_v1 or kind == "cgroup2"):
            continue
        # A line of version 1 names its controllers; that of version 2 names none.
        paths = (
            path
            for _, controllers, path in memberships
            if ("memory" in controllers.split(",") if is_v1 else not controllers)
        )
        group = Path(mount_point) / os.path.relpath(next(paths, "/"), root)
        for parent in (group, *group.parents):
            if parent.is_relative_to(mount_point) and (parent / "cgroup.procs").exists():
                yield parent


def add_to_cgroup(group: Path, pid: int) -> None:
    """Moves a process into a group; the memory that it has allocated before stays charged to its old group."""
    (group / "cgroup.procs").write_text(str(pid))


def count_oom_kills(group: str) -> int:
    """Returns the number of processes that the kernel has killed because the memory of their group was used up."""
    for name in _COUNTER_FILES:
        with suppress(OSError):
            counters = dict(line.split() for line in (Path(group) / name).read_text().splitlines())
            return int(counters["oom_kill"])
    return 0


_REMOVE_RETRY = Retry(0.05, max_pause_s=1.0, deadline_s=10.0)


def remove_cgroup(group: str) -> None:
    """Removes a group; it retries because the last process may still be leaving the group."""
    if Path(group).exists():
        with suppress(OSError):
            _REMOVE_RETRY.call(Path(group).rmdir, OSError, f"Removing the control group {group}")
