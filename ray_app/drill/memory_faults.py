"""Hardware that computes wrongly: one bit of a worker's gradients, activations or parameters is another.

A worker that the kernel ends because the memory of its control group (cgroup, of either version) is used up.
"""

from __future__ import annotations

import os
import subprocess
import time
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

from ray_app.config.checks import LOAD_BALANCED_STRATEGIES
from ray_app.drill.faults import Evidence, Several
from ray_app.drill.process_scenarios import died
from ray_app.drill.scenario import Scenario, ScenarioContext, ScenarioResult
from ray_app.driver.run import Faults
from ray_app.train.job import Hooks

What = Literal["gradient", "activation", "parameter"]
_BIT = 1 << 22
"""The highest of the 23 bits behind the point of a float32."""


@dataclass
class Flip:
    """One bit is flipped after a step, or in the next one; a hook for `Hooks.built` and `Hooks.after_step`.

    Args:
        proofs: Where it is recorded.
        name: Name of the proof.
        what: In what.
        rank: Of which rank.
        step: After how many finished steps.
    """

    proofs: Evidence
    name: str
    what: What
    rank: int
    step: int
    _model: nn.Module | None = None
    _is_armed: bool = False

    def built(self, model: nn.Module) -> None:
        """See `Hooks.built`."""
        self._model = model
        layer = next(part for part in model.modules() if not list(part.children()) and list(part.parameters()))
        if self.what == "activation":
            layer.register_forward_hook(lambda module, args, found: self._flipped(found))
        if self.what == "gradient":
            next(p for p in model.parameters() if p.requires_grad).register_hook(self._flipped)

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if (
            rank != self.rank
            or step != self.step
            or not self.proofs.put(self.name, rank=rank, step=step, what=self.what)
        ):
            return
        self._is_armed = True
        if self.what == "parameter":
            assert self._model is not None
            with torch.no_grad():
                p = next(p for p in self._model.parameters() if p.requires_grad)
                p.copy_(self._flipped(p))

    def _flipped(self, values: Tensor) -> Tensor:
        """The values with another bit in the largest of them, once."""
        if not self._is_armed:
            return values
        self._is_armed = False
        bits = values.detach().float().clone().view(torch.int32).reshape(-1)
        bits[values.detach().abs().argmax()] ^= _BIT
        other: Any = bits.view(torch.float32).view(values.shape).to(values.dtype)
        return values + (other - values).detach() if values.requires_grad and not values.is_leaf else other


def flip(ground: ScenarioContext) -> Scenario | str:
    """A bit of an activation of a worker is another one; all shares are computed twice."""
    train = ground.config.train
    if ground.workers < 2:
        return "there is no other worker to compute again what one has computed"
    if train.strategy not in LOAD_BALANCED_STRATEGIES or train.reduction != "exact":
        return f"shares are computed again with {' or '.join(LOAD_BALANCED_STRATEGIES)} and train.reduction exact only"
    step, rank = ground.step(), ground.rank()
    bit = Flip(ground.proofs, "flipped", "activation", rank, step)
    hooks = Hooks(after_step=Several((bit, ground.pace(step + 1))), built=bit.built)

    def confirm(run: ScenarioResult) -> list[str]:
        told = [e.details["rank"] for e in run.events("sdc_detected")]
        return [] if told == [rank] else [f"rank {rank} computed wrongly once, found guilty were: {told or 'none'}"]

    return Scenario([step], ["flipped"], confirm, Faults(train=hooks), changes={"failure__sdc_check_rate": 1.0})


LIMIT_BYTES = 64 << 20
_PIECE_BYTES, _PIECES = 16 << 20, 64
_ANSWER_S, _REMOVE_S, _LOOK_S = 60.0, 10.0, 0.05
_COUNTS = ("memory.oom_control", "memory.events")
_LIMITS = {
    "memory.limit_in_bytes": LIMIT_BYTES,
    "memory.max": LIMIT_BYTES,
    "memory.memsw.limit_in_bytes": LIMIT_BYTES,
    "memory.swap.max": 0,
}


def make_group() -> Path:
    """Makes a control group below that of this process, or above it, where that is not allowed, with little memory and
    nobody in it.

    Raises:
        OSError: This machine lets this process make none.
    """
    said = "no control groups of memory are mounted"
    for parent in _parents():
        made = parent / f"ray-app-drill-{uuid.uuid4().hex[:12]}"
        try:
            made.mkdir()
        except OSError as error:
            said = str(error)
            continue
        files = [made / name for name in _LIMITS if (made / name).exists()]
        try:
            if not {"memory.limit_in_bytes", "memory.max"} & {file.name for file in files}:
                raise OSError(f"groups in {parent} have no limit of memory")
            for file in files:
                file.write_text(str(_LIMITS[file.name]))
            return made
        except OSError as error:
            said = str(error)
            made.rmdir()
    raise OSError(said)


def _parents() -> Iterator[Path]:
    """Where a group may be made: first where this process is, then above it."""
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ")
        (kind, _, options), (root, mounted) = right.split(" ", 2), left.split()[3:5]
        is_first = kind == "cgroup" and "memory" in options.split(",")
        if not (is_first or kind == "cgroup2"):
            continue
        path = next((path for _, names, path in own if ("memory" in names.split(",") if is_first else not names)), "/")
        here = Path(mounted) / os.path.relpath(path, root)
        for parent in (here, *here.parents):
            if parent.is_relative_to(mounted) and (parent / "cgroup.procs").exists():
                yield parent


def put_into(group: Path, pid: int) -> None:
    """Puts a process into a group; what it has allocated stays where it was.

    Raises:
        OSError: It is not allowed.
    """
    (group / "cgroup.procs").write_text(str(pid))


def kills(group: str) -> int:
    """How many processes of a group the kernel has ended because its memory was used up."""
    for name in _COUNTS:
        with suppress(OSError):
            found = dict(line.split() for line in (Path(group) / name).read_text().splitlines())
            return int(found["oom_kill"])
    return 0


def remove(group: str) -> None:
    """Removes a group, which its last process may just be leaving."""
    deadline_s = time.monotonic() + _REMOVE_S
    while Path(group).exists() and time.monotonic() < deadline_s:
        try:
            Path(group).rmdir()
        except OSError:
            time.sleep(_LOOK_S)


def why_not() -> str | None:
    """Why no process of this machine can be given a group of its own, if so."""
    try:
        group = make_group()
        try:
            with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as other:
                try:
                    put_into(group, other.pid)
                finally:
                    other.kill()
        finally:
            remove(str(group))
    except OSError as error:
        return f"no control group with a limit of memory can be made here: {error}"
    return None


@dataclass(frozen=True)
class UseUp:
    """A rank uses more memory than the kernel lets it have, after a step.

    Args:
        proofs: Where it is recorded.
        step: Finished steps at which it happens.
        rank: Which rank.
    """

    proofs: Evidence
    step: int
    rank: int

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if step != self.step or rank != self.rank or self.proofs.has("limited"):
            return
        group = make_group()
        if self.proofs.put("limited", rank=rank, step=step, group=str(group), limit_bytes=LIMIT_BYTES):
            put_into(group, os.getpid())
            use_up()


def use_up() -> None:
    """Allocates and touches more than the limit.

    Raises:
        RuntimeError: The kernel lets it.
    """
    held = [b"\1" * _PIECE_BYTES for _ in range(_PIECES)]
    raise RuntimeError(f"{len(held) * _PIECE_BYTES} bytes are there in spite of a limit of {LIMIT_BYTES}")


def memory(ground: ScenarioContext) -> Scenario | str:
    """A worker uses more memory than the kernel lets it have, and is killed by it."""
    if impossible := _impossible(ground):
        return impossible
    step, proofs = ground.step(), ground.proofs

    @contextmanager
    def around() -> Iterator[dict[str, Any]]:
        try:
            yield {}
        finally:
            if said := proofs.get("limited"):
                with suppress(ray.exceptions.RayError):
                    _on(said["node"], remove, said["group"])

    def confirm(run: ScenarioResult) -> list[str]:
        said = run.proofs["limited"]
        counted = _on(said["node"], kills, said["group"])
        by_kernel = [] if counted == 1 else [f"the kernel counts {counted} processes that it ended for their memory"]
        return by_kernel + died(["limited"])(run)

    hooks = Hooks(after_step=Several((UseUp(proofs, step, ground.rank()), ground.pace(step + 1))))
    return Scenario([step], ["limited"], confirm, Faults(train=hooks), around=around)


def _impossible(ground: ScenarioContext) -> str | None:
    if ground.nodes is not None:
        return why_not()
    try:
        return next(filter(None, (_on(node["NodeID"], why_not) for node in ray.nodes() if node["Alive"])), None)
    except ray.exceptions.RayError as error:
        return f"a node does not say whether control groups can be made there: {type(error).__name__}"


def _on(node: str, work: Callable[..., Any], *arguments: str) -> Any:
    """Does something on a node, and waits for it."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.get(
        ray.remote(work).options(num_cpus=0, scheduling_strategy=there).remote(*arguments), timeout=_ANSWER_S
    )
