"""Connections of a worker that are cut: its kernel throws away whatever comes on them.

That takes a socket filter (`SO_ATTACH_FILTER`, classic BPF), which a process may attach to its own sockets without any
rights. What comes is not acknowledged, either, so after a fifth of a second nothing new is sent: as when a cable is
drawn, no end of a connection is told anything. The kernel counts what it throws away, which is the proof.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
import torch.distributed as dist

from ray_app.drill.delays import HELD_S
from ray_app.drill.faults import Evidence, Several
from ray_app.drill.scenario import Scenario, ScenarioContext, ScenarioResult, is_gone
from ray_app.driver.run import Faults
from ray_app.train.job import Hooks, Job

_ATTACH, _DETACH, _MEMORY = 26, 27, 55
"""`SO_ATTACH_FILTER`, `SO_DETACH_FILTER`, `SO_MEMINFO` of Linux, which Python does not name."""
_DROPS = 8
"""Place of the packets thrown away in what `SO_MEMINFO` says, see `SK_MEMINFO_DROPS`."""
_RETURN = 0x06
_LOOK_S, _STANDSTILL_S = 0.02, 8.0

Address = tuple[str, int]


@dataclass(frozen=True)
class Wire:
    """One end of a TCP connection of this process.

    Args:
        socket: A descriptor of its own for it.
        here: Its address.
        there: That of the other end.
    """

    socket: socket.socket
    here: Address
    there: Address

    def cut(self) -> None:
        """Throws away whatever comes from now on."""
        program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))  # of every packet keep 0 bytes
        self.socket.setsockopt(socket.SOL_SOCKET, _ATTACH, struct.pack("HL", 1, ctypes.addressof(program)))

    def mend(self) -> None:
        """Lets everything through again, also what is sent again."""
        self.socket.setsockopt(socket.SOL_SOCKET, _DETACH, 0)

    @property
    def thrown_away(self) -> int:
        """Packets that the kernel has thrown away."""
        return int(struct.unpack("9I", self.socket.getsockopt(socket.SOL_SOCKET, _MEMORY, 36))[_DROPS])


def wires() -> list[Wire]:
    """The open TCP connections of this process."""
    found, known = list[Wire](), set[str]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            identity = os.readlink(f"/proc/self/fd/{name}")
            if not identity.startswith("socket:") or identity in known:  # several descriptors may be of one socket
                continue
            known.add(identity)
            one = socket.socket(fileno=os.dup(int(name)))
            try:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    found.append(Wire(one, _address(one.getsockname()), _address(one.getpeername())))
            finally:
                if not found or found[-1].socket is not one:
                    one.close()
    return found


def _address(name: tuple[Any, ...]) -> Address:
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


@dataclass
class Severed:
    """The connections of a rank to others are cut after a step; a hook for `Hooks.after_step` and `Hooks.at`.

    Args:
        proofs: Where it is recorded.
        step: Finished steps at which it happens.
        rank: Of which rank.
        others: To which ranks.
        rendezvous: Whether to the rendezvous, too; its address is the proof `listening`.
        mends: Whether they come back, once others have formed a generation without it.
    """

    proofs: Evidence
    step: int
    rank: int
    others: list[int]
    rendezvous: bool
    mends: bool
    _is_cut: bool = False
    _wires: list[Wire] = field(default_factory=list)

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if step != self.step or self.proofs.has("cut"):
            return
        if rank in self.others:
            own = wires()
            self.proofs.put(f"wires-{rank}", rank=rank, step=step, ends=[[wire.here, wire.there] for wire in own])
            for wire in own:
                wire.socket.close()
        if rank == self.rank:
            self._cut()

    def forming(self, phase: str, rank: int, step: int) -> None:
        """See `Hooks.at`."""
        if (
            self.mends
            and phase == "forming"
            and not self._is_cut
            and self.proofs.has("cut")
            and not self.proofs.has("went_on")
        ):
            size = dist.get_world_size() if dist.is_initialized() else 1
            self.proofs.put("went_on", rank=rank, workers=size)

    def _cut(self) -> None:
        listening = ["listening"] if self.rendezvous else []
        if not self.proofs.wait([f"wires-{rank}" for rank in self.others] + listening, HELD_S):
            return
        said = [self.proofs.get(f"wires-{rank}") or {} for rank in self.others]
        ends = {(tuple(there), tuple(here)) for one in said for here, there in one["ends"]}
        to = [tuple((self.proofs.get(name) or {})["address"]) for name in listening]
        for wire in wires():
            if (wire.here, wire.there) in ends or wire.there in to:
                self._wires.append(wire)
            else:
                wire.socket.close()
        self._is_cut = True
        for wire in self._wires:
            wire.cut()
        names = [f"{wire.here[0]}:{wire.here[1]} - {wire.there[0]}:{wire.there[1]}" for wire in self._wires]
        told = sum(wire.there in to for wire in self._wires)
        self.proofs.put("cut", rank=self.rank, step=self.step, connections=names, of_the_rendezvous=told)
        threading.Thread(target=self._watch, name="cut", daemon=True).start()

    def _watch(self) -> None:
        """Says when something was thrown away, and mends what is to come back."""
        deadline_s = time.monotonic() + HELD_S
        done = (
            (lambda: self.proofs.has("went_on"))
            if self.mends
            else (lambda: any(wire.thrown_away for wire in self._wires))
        )
        while not done() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        thrown_away = [wire.thrown_away for wire in self._wires]
        if self.mends:
            for wire in self._wires:
                wire.mend()
        self.proofs.put("mended" if self.mends else "silent", rank=self.rank, thrown_away=thrown_away)
        for wire in self._wires:
            wire.socket.close()


def _without_wires(ground: ScenarioContext) -> str | None:
    if ground.workers < 2:
        return "one worker has no connection to another"
    if ground.config.train.strategy == "parameter_server":
        return "workers of parameter servers have no connections to each other"
    if ground.config.scaling.gpus_per_worker:
        return "what NCCL sends within a machine goes through no connection that could be cut"
    return None


def _cut(
    ground: ScenarioContext, others: int, mends: bool, confirm: Callable[[ScenarioResult, int], list[str]], **more: Any
) -> Scenario:
    step, (rank, *rest) = ground.step(), ground.random.sample(range(ground.workers), ground.workers)
    cut = Severed(ground.proofs, step, rank, rest[:others], rendezvous=mends, mends=mends)

    def observe(job: Job) -> None:
        if mends and not ground.proofs.has("listening"):
            ground.proofs.put("listening", address=ray.get(ray.get_actor(job.rendezvous).lifeline.remote())[0])

    def lacks(run: ScenarioResult) -> list[str]:
        said, counted = run.proofs["cut"], sum(run.proofs["mended" if mends else "silent"]["thrown_away"])
        few = (
            [] if len(said["connections"]) > said["of_the_rendezvous"] else ["no connection to another worker was cut"]
        )
        few += [] if said["of_the_rendezvous"] or not mends else ["no connection to the rendezvous was cut"]
        return few + ([] if counted else ["nothing was thrown away"]) + confirm(run, step)

    hooks = Hooks(after_step=Several((cut, ground.pace(step + 1))), at=cut.forming)
    return Scenario([step], confirm=lacks, faults=Faults(train=hooks), observe=observe, **more)


def partition(ground: ScenarioContext) -> Scenario | str:
    """A worker is cut off from all others and the rendezvous, until these have gone on without it."""

    def confirm(run: ScenarioResult, step: int) -> list[str]:
        without = run.proofs["went_on"]["workers"]
        fewer = [] if without < ground.workers else [f"the others went on as {without} workers"]
        gone, back = is_gone(run.proofs["cut"]), run.sizes[-1] > without
        return fewer + ([] if gone is not False or back else ["the worker still lives and is not one of them again"])

    fewer = {"scaling__min_workers": 1}
    return _without_wires(ground) or _cut(
        ground, ground.workers, True, confirm, expected=["cut", "went_on", "mended"], changes=fewer
    )


def half_open(ground: ScenarioContext) -> Scenario | str:
    """The connections between two workers neither say anything more nor end."""

    def confirm(run: ScenarioResult, step: int) -> list[str]:
        stood = [e for e in run.events("stacks") if e.details["step"] == step]
        again = [e for e in run.events("formed") if e.details["step"] == step]
        return ([] if stood else ["the run has no record of a standstill"]) + (
            [] if again else [f"no generation formed at step {step}"]
        )

    changes = {"failure__step_timeout_s": _STANDSTILL_S}
    return _without_wires(ground) or _cut(ground, 1, False, confirm, expected=["cut", "silent"], changes=changes)
