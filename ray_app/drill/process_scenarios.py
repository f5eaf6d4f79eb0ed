"""Scenarios in which processes of a run die or stand still.

Scenarios in which a run ends before it is done, and is started again.

A wall clock that is hours wrong, for one process, for all of its code: Python, C, threads.

A process reads the clock by functions that the kernel gives it, the vDSO, whose pages are its own once it writes to
them. There each function that tells the wall clock becomes a jump to one that asks the kernel and adds an offset. Other
clocks stay right.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import ray

from ray_app.checkpoint.store import CheckpointStore
from ray_app.config.config import Config
from ray_app.drill.delays import Freeze, Hold, RefusedCommit, Slow, SlowCommit
from ray_app.drill.faults import (
    DrillStopError,
    Evidence,
    Kill,
    KillAt,
    KillNewcomer,
    KillOnCommit,
    Several,
    Stop,
    driver_command,
)
from ray_app.drill.scenario import Scenario, ScenarioContext, ScenarioResult, is_gone
from ray_app.driver.run import Faults
from ray_app.errors import unwrap_app_error
from ray_app.runlog.evaluations import read_evaluations
from ray_app.runlog.journal import MetricsReader
from ray_app.storage.files import put_atomic
from ray_app.train.job import Hooks, Job

_BACK_S = 60.0


def died(names: list[str]) -> Callable[[ScenarioResult], list[str]]:
    """Confirms that the processes of these proofs have ended, and that the run has recorded a failure."""

    def confirm(run: ScenarioResult) -> list[str]:
        missing = [f"the process of {name} still lives" for name in names if is_gone(run.proofs[name]) is False]
        return missing if run.events("failed") else [*missing, "the run has no record of a failure"]

    return confirm


def _killed(
    ground: ScenarioContext, step: int, ranks: list[int], how: Callable[[Kill], Hooks] | None = None
) -> Scenario:
    names = [f"killed-{i}" for i in range(len(ranks))]
    kill = Kill(ground.proofs, names, step, ranks)
    pace = ground.pace(step + 1)
    hooks = how(kill) if how else Hooks(after_step=kill)
    after = Several((hooks.after_step, pace)) if hooks.after_step else pace
    return Scenario([step], names, died(names), Faults(train=Hooks(after_step=after, at=hooks.at)))


def kill(ground: ScenarioContext) -> Scenario | str:
    """One worker is killed."""
    return _killed(ground, ground.step(), [ground.rank()])


def kill_twice(ground: ScenarioContext) -> Scenario | str:
    """A worker is killed, and after another one has joined, one more in the same epoch."""
    low, high = int(0.2 * ground.total_steps), int(0.8 * ground.total_steps)
    starts = range(0, ground.total_steps, ground.steps_per_epoch)
    first, last = max(
        ((max(low, s) + 1, min(high, s + ground.steps_per_epoch) - 1) for s in starts),
        key=lambda span: span[1] - span[0],
    )
    if last - first < 3:
        return f"an epoch of {ground.steps_per_epoch} steps is too short to kill twice in it"
    one, other = Kill(ground.proofs, ["killed-0"], first, [ground.rank()]), Kill(ground.proofs, ["killed-1"], last, [0])
    paces = ground.pace(first + 1, last - 1), ground.pace(last + 1)
    hooks = Hooks(after_step=Several((one, other, *paces)))
    return Scenario([first, last], ["killed-0", "killed-1"], died(["killed-0", "killed-1"]), Faults(train=hooks))


def kill_two(ground: ScenarioContext) -> Scenario | str:
    """Two workers are killed at once."""
    if ground.workers < 3:
        return f"it needs 3 workers so that one goes on, there are {ground.workers}"
    return _killed(ground, ground.step(), ground.random.sample(range(ground.workers), 2))


def kill_all(ground: ScenarioContext) -> Scenario | str:
    """All workers are killed at once."""
    return _killed(ground, ground.step(), list(range(ground.workers)))


def kill_exchange(ground: ScenarioContext) -> Scenario | str:
    """A worker is killed as it begins to exchange gradients."""
    if ground.workers < 2:
        return "one worker exchanges nothing"
    return _killed(ground, ground.step(), [ground.rank()], lambda kill: Hooks(at=KillAt("exchange", kill)))


def kill_forming(ground: ScenarioContext) -> Scenario | str:
    """A worker is killed, and another one as the rest form without it."""
    if ground.workers < 3:
        return f"it needs 3 workers so that one goes on, there are {ground.workers}"
    step, (first, second) = ground.step(), ground.random.sample(range(ground.workers), 2)
    one, other = Kill(ground.proofs, ["killed-0"], step, [first]), Kill(ground.proofs, ["killed-1"], step, [second])
    hooks = Hooks(after_step=Several((one, ground.pace(step + 1))), at=KillAt("forming", other))
    return Scenario([step], ["killed-0", "killed-1"], died(["killed-0", "killed-1"]), Faults(train=hooks))


def kill_joining(ground: ScenarioContext) -> Scenario | str:
    """So many workers are killed that others come for them, and the first of these is killed as it joins."""
    step, victims = ground.step(), ground.workers - ground.enough.start + 1
    names = [f"killed-{i}" for i in range(victims)]
    kill = Kill(ground.proofs, names, step, ground.random.sample(range(ground.workers), victims))
    newcomer = KillNewcomer(ground.proofs, "newcomer", names[0])
    hooks = Hooks(after_step=Several((kill, ground.pace(step + 1))), at=newcomer)
    return Scenario([step], [*names, "newcomer"], died([*names, "newcomer"]), Faults(train=hooks))


def kill_phases(ground: ScenarioContext) -> Scenario | str:
    """Rank 0 is killed three times: as it asks for data, as it computes, and as it exchanges gradients."""
    phases = ("data", "compute", "exchange" if ground.workers > 1 else "compute")
    steps = [int(part * ground.total_steps) for part in (0.25, 0.45, 0.65)]
    names = [f"killed-{i}" for i in range(len(phases))]
    kills = zip(phases, names, steps, strict=True)
    at = Several(tuple(KillAt(phase, Kill(ground.proofs, [name], step, [0])) for phase, name, step in kills))
    paces = [
        ground.pace(step + 1, until)
        for step, until in zip(steps, [step - 1 for step in steps[1:]] + [None], strict=True)
    ]
    return Scenario(steps, names, died(names), Faults(train=Hooks(after_step=Several(tuple(paces)), at=at)))


def kill_saving(ground: ScenarioContext) -> Scenario | str:
    """The worker that writes a checkpoint is killed before it has committed it."""
    step = ground.checkpoint()
    hooks = Hooks(ground.pace(step + 1), KillOnCommit(ground.proofs, "killed-0", step))

    def confirm(run: ScenarioResult) -> list[str]:
        written = any(e.details["step"] == step for e in run.events("checkpointed"))
        return died(["killed-0"])(run) + ([] if written else [f"the checkpoint of step {step} was never written"])

    return Scenario([step], ["killed-0"], confirm, Faults(train=hooks))


def evaluator(ground: ScenarioContext) -> Scenario | str:
    """The evaluator is killed while it evaluates."""
    if ground.config.data.eval_path is None:
        return "there is no evaluator without data.eval_path"
    if ground.config.evaluate.where == "workers":
        return "there is no evaluator with evaluate.where workers"
    step = ground.checkpoint()

    def confirm(run: ScenarioResult) -> list[str]:
        missing = ["the evaluator's process still lives"] if is_gone(run.proofs["killed-0"]) is False else []
        again = any(e.step >= step for e in read_evaluations(run.paths))
        return missing if again else [*missing, "nothing was evaluated after it"]

    kill = KillOnCommit(ground.proofs, "killed-0", step)
    return Scenario([step], ["killed-0"], confirm, Faults(before_evaluation=kill))


def freeze(ground: ScenarioContext) -> Scenario | str:
    """A worker stands still (SIGSTOP) for longer than failure.heartbeat_timeout_s, then wants to go on."""
    step, seconds = ground.step(), ground.config.failure.heartbeat_timeout_s + 4.0
    hook = Freeze(ground.proofs, "frozen", step, ground.rank(), seconds)
    pace = ground.pace(step + 1, least_s=seconds)

    def confirm(run: ScenarioResult) -> list[str]:
        silent = any("no heartbeat for" in str(e.details["errors"]) for e in run.events("failed"))
        return [] if silent else ["the run has no record of a worker that was silent"]

    return Scenario([step], ["frozen"], confirm, Faults(train=Hooks(after_step=Several((hook, pace)))))


def slow(ground: ScenarioContext) -> Scenario | str:
    """A worker takes three times as long as the others for a third of the steps."""
    step = ground.step()
    last = min(step + ground.total_steps // 3, ground.total_steps - 1)
    hook = Slow(ground.proofs, "slow", step, last, ground.rank(), 3.0)

    def confirm(run: ScenarioResult) -> list[str]:
        blamed = [str(e.details["errors"]) for e in run.events("failed")]
        wasted = [] if run.proofs["slow"]["seconds"] > 0 else ["no time was wasted"]
        return [*wasted, *(f"a slow worker was taken for a lost one: {said}" for said in blamed)]

    return Scenario([step], ["slow"], confirm, Faults(train=Hooks(after_step=hook)))


def storage_away(ground: ScenarioContext) -> Scenario | str:
    """The storage refuses a checkpoint for five seconds."""
    return _refused(ground, 5.0, errno.EIO, "write_retried")


def full_disk(ground: ScenarioContext) -> Scenario | str:
    """The disk is full until a checkpoint is given up."""
    return _refused(ground, None, errno.ENOSPC, "write_failed")


def _refused(ground: ScenarioContext, seconds: float | None, number: int, kind: str) -> Scenario:
    step = ground.checkpoint()
    hooks = Hooks(before_commit=RefusedCommit(ground.proofs, "refused", step, seconds, number))

    def confirm(run: ScenarioResult) -> list[str]:
        at = run.proofs["refused"]["step"]
        told = [e for e in run.events(kind) if e.details["step"] == at]
        written = {e.details["step"] for e in run.events("checkpointed")}
        missing = [] if told else [f"there is no event {kind} of step {at}"]
        if (at in written) != (seconds is not None):
            missing.append(f"the checkpoint of step {at} was {'' if at in written else 'not '}written")
        return missing if max(written) > at else [*missing, f"no checkpoint after that of step {at}"]

    return Scenario([step], ["refused"], confirm, Faults(train=hooks))


def slow_storage(ground: ScenarioContext) -> Scenario | str:
    """A checkpoint takes five seconds to be written."""
    step, seconds = ground.checkpoint(), 5.0
    hooks = Hooks(before_commit=SlowCommit(ground.proofs, "slow", step, seconds))

    def confirm(run: ScenarioResult) -> list[str]:
        took = [
            e.details["duration_s"]
            for e in run.events("checkpointed")
            if e.details["step"] == run.proofs["slow"]["step"]
        ]
        return [] if took and took[0] >= seconds else [f"no checkpoint took {seconds:g} s"]

    return Scenario([step], ["slow"], confirm, Faults(train=hooks))


def rendezvous(ground: ScenarioContext) -> Scenario | str:
    """The rendezvous, which decides who steps with whom, is killed; a worker is killed right after it is back."""
    step = ground.step()
    hold = Hold(ground.proofs, "held", "rendezvous_killed", step, 0)
    kill = Kill(ground.proofs, ["killed-0"], step + 1, [ground.rank()])

    def observe(job: Job) -> None:
        if ground.proofs.has("held") and not ground.proofs.has("rendezvous_killed"):
            actor = ray.get_actor(job.rendezvous)
            before, _ = ray.get(actor.lifeline.remote())
            ray.kill(actor, no_restart=False)
            after, deadline_s = before, time.monotonic() + _BACK_S
            while (
                after == before and time.monotonic() < deadline_s
            ):  # Ray does not wait until it is dead: it may still answer
                after, _ = ray.get(actor.lifeline.remote())
            ground.proofs.put("rendezvous_killed", step=step, before=before, after=after)

    def confirm(run: ScenarioResult) -> list[str]:
        killed = run.proofs["rendezvous_killed"]
        same = ["the rendezvous listens where it did before"] if killed["before"] == killed["after"] else []
        return same + died(["killed-0"])(run)

    hooks = Hooks(after_step=Several((hold, kill, ground.pace(step + 2))))
    names, held = ["held", "rendezvous_killed", "killed-0"], {"held": "rendezvous_killed"}
    return Scenario([step], names, confirm, Faults(train=hooks), observe, held)


_DRIVER_S = 180.0


def damage(ground: ScenarioContext) -> Scenario | str:
    """The run is stopped, one bit of its newest checkpoint flips, and it is started again."""
    return _damaged(ground, flip_a_bit)


def torn_write(ground: ScenarioContext) -> Scenario | str:
    """The run is stopped, half of the largest file of its newest checkpoint is gone, and it is started again."""
    return _damaged(ground, cut_in_half)


def _damaged(ground: ScenarioContext, harm: Callable[[bytearray], bytearray]) -> Scenario:
    step = ground.random.randrange(2 * ground.checkpoint_every + 1, 5 * ground.checkpoint_every)

    def before(config: Config) -> None:
        try:
            ground.train(config, Faults(train=Hooks(after_step=Stop(ground.proofs, "stopped", step))))
        except Exception as error:
            if not isinstance(unwrap_app_error(error), DrillStopError):
                raise
        newest = CheckpointStore(ground.paths).commits()[-1]
        folder = ground.paths.checkpoint(newest.step, newest.fence)
        name = max(newest.files, key=lambda name: newest.files[name]["bytes"])
        put_atomic(folder / name, bytes(harm(bytearray((folder / name).read_bytes()))))
        ground.proofs.put("damaged", step=newest.step, checkpoint=folder.name, file=name)

    def confirm(run: ScenarioResult) -> list[str]:
        damaged = run.proofs["damaged"]["checkpoint"]
        passed = any(e.details["checkpoint"] == damaged for e in run.events("fallback"))
        return [] if passed else [f"the run has no record that {damaged} was passed over"]

    return Scenario([step], ["stopped", "damaged"], confirm, before=before)


def flip_a_bit(data: bytearray) -> bytearray:
    """With another bit in the middle."""
    data[len(data) // 2] ^= 1
    return data


def cut_in_half(data: bytearray) -> bytearray:
    """The first half."""
    return data[: len(data) // 2]


def driver(ground: ScenarioContext) -> Scenario | str:
    """The driver is killed, and the same run is started again."""
    step = ground.step()
    return _driver(
        ground, step, Faults(train=Hooks(after_step=Hold(ground.proofs, "held", "driver_killed", step, 0))), ["held"]
    )


def evaluator_and_driver(ground: ScenarioContext) -> Scenario | str:
    """The evaluator is killed while it evaluates, then the driver, and the same run is started again."""
    if ground.config.data.eval_path is None or ground.config.evaluate.where == "workers":
        return "there is no evaluator without data.eval_path, nor with evaluate.where workers"
    step = ground.checkpoint()
    hold = Hold(ground.proofs, "held", "driver_killed", step + 1, 0)
    faults = Faults(train=Hooks(after_step=hold), before_evaluation=KillOnCommit(ground.proofs, "killed-0", step))
    made = _driver(ground, step + 1, faults, ["held", "killed-0"])

    def confirm(run: ScenarioResult) -> list[str]:
        again = any(e.step >= step for e in read_evaluations(run.paths))
        return made.confirm(run) + ([] if again else ["nothing was evaluated after it"])

    return replace(made, confirm=confirm)


def _driver(ground: ScenarioContext, step: int, faults: Faults, first: list[str]) -> Scenario:
    """A driver of its own that is killed once some things have happened in its run."""

    def before(config: Config) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with (Path(folder) / "output").open("wb") as output:
                command = driver_command(Path(folder) / "run", config, faults)
                process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
            try:
                deadline_s = time.monotonic() + _DRIVER_S
                while (
                    not all(map(ground.proofs.has, first)) and process.poll() is None and time.monotonic() < deadline_s
                ):
                    time.sleep(0.1)
                if process.poll() is None and all(map(ground.proofs.has, first)):
                    process.kill()
                    process.wait()
                    ground.proofs.put("driver_killed", step=step, pid=process.pid, exit_code=process.returncode)
                else:
                    ground.proofs.put("trouble", error=(Path(folder) / "output").read_text()[-2000:])
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                process.wait()

    def confirm(run: ScenarioResult) -> list[str]:
        starts = len(run.events("started"))
        return [] if starts == 2 else [f"the run has the record of {starts} starts"]

    return Scenario([step], [*first, "driver_killed"], confirm, held={"held": "driver_killed"}, before=before)


_OFFSET = b"\x48\xb9%s\x48\x8b\x09"  # mov rcx, <address of the offset>; mov rcx, [rcx]
_CODE = {
    # rdi: which clock, rsi: where to put it. The real ones are 0 and, less exact, 5
    "__vdso_clock_gettime": b"\xb8\xe4\0\0\0\x0f\x05\x85\xff\x74\x06\x83\xff\x05\x74\x01\xc3"
    + _OFFSET
    + b"\x48\x01\x0e\xc3",
    "__vdso_gettimeofday": b"\xb8\x60\0\0\0\x0f\x05\x48\x85\xff\x74\x10" + _OFFSET + b"\x48\x01\x0f\xc3",
    "__vdso_time": b"\xb8\xc9\0\0\0\x0f\x05" + _OFFSET + b"\x48\x01\xc8\x48\x85\xff\x74\x03\x48\x89\x07\xc3",
}
"""For each function: the system call of its name, and the offset added to the seconds that it gives (x86-64)."""
_JUMP = b"\x48\xb8%s\xff\xe0"  # mov rax, <address>; jmp rax
_FAILED = ctypes.c_void_p(-1).value
_HOUR_S, _TOLERANCE_S = 3600, 900


def why_not() -> str | None:
    """Why the clock of a process cannot be moved here, if so."""
    if platform.machine() != "x86_64":
        return f"the clock of a single process can be moved on x86_64 only, and this is {platform.machine()}"
    try:
        absent = _CODE.keys() - dict(_functions()).keys()
    except OSError as error:
        return f"the functions that tell the time cannot be read: {error}"
    return f"this kernel has no {', '.join(sorted(absent))}" if absent else None


def move_to(offset_s: int) -> None:
    """Has the wall clock of this process be wrong by so many seconds from now on.

    Raises:
        OSError: The kernel does not let a process change its own pages.
    """
    _offset().value = offset_s


@cache
def _offset() -> ctypes.c_int64:
    """The offset of this process, after putting the functions that add it in place; it stays for the life of the
    process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
    )
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    page = libc.mmap(
        None, mmap.PAGESIZE, access, kind, -1, 0
    )  # nobody unmaps it, unlike one of Python's, while threads still ask
    if page == _FAILED:
        raise OSError(ctypes.get_errno(), "no page for code")
    offset, free = ctypes.c_int64.from_address(page), page + 8
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        for name, address in _functions():
            if name in _CODE:
                code = _CODE[name] % struct.pack("<Q", page)
                ctypes.memmove(free, code, len(code))
                os.pwrite(memory.fileno(), _JUMP % struct.pack("<Q", free), address)
                free += len(code)
    return offset


def _functions() -> Iterator[tuple[str, int]]:
    """Name and address of the functions of the vDSO, an ELF file in memory."""
    found = re.search(r"^(\w+)-(\w+) .*\[vdso\]$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    if found is None:
        raise OSError("there is no vDSO")
    base, end = int(found[1], 16), int(found[2], 16)
    image = ctypes.string_at(base, end - base)
    (sections,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, sections + i * size) for i in range(count)]
    for _, kind, _, _, at, length, link, _, _, each in headers:
        if kind != 11:  # SHT_DYNSYM
            continue
        names = headers[link][4]
        for place in range(at, at + length, each):
            name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", image, place)
            if section:
                yield image[names + name : image.index(b"\0", names + name)].decode(), base + value


@dataclass(frozen=True)
class Jump:
    """The wall clock of a rank jumps after a step; a hook for `Hooks.after_step`.

    Args:
        proofs: Where it is recorded, by the right clock.
        name: Name of the proof.
        step: Finished steps at which it happens.
        rank: Of which rank.
        offset_s: By how much it is wrong from then on.
    """

    proofs: Evidence
    name: str
    step: int
    rank: int
    offset_s: int

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if step == self.step and rank == self.rank and not self.proofs.has(self.name):
            try:
                move_to(0)
                self.proofs.put(self.name, rank=rank, step=step, clock_s=self.offset_s)
                move_to(self.offset_s)
            except OSError as error:  # the scenario counts as failed; the run must go on
                self.proofs.put("trouble", error=f"the clock cannot be moved: {error}")


def clock_jump(ground: ScenarioContext) -> Scenario | str:
    """The wall clock of the worker that writes the record and the checkpoints jumps hours ahead, then hours back, then
    is right again.
    """
    if reason := why_not():
        return reason
    if not isinstance(ground.paths.root, Path) or "://" in ground.config.data.path:
        return "S3 refuses what is signed at another hour"
    step, every = ground.step(), ground.checkpoint_every + 1
    hours_s = _HOUR_S * ground.random.randrange(2, 10)
    jumps = [(step, hours_s), (step + every, -hours_s), (step + 2 * every, 0)]
    names = [f"clock-{i}" for i in range(len(jumps))]
    hooks = tuple(Jump(ground.proofs, name, at, 0, offset_s) for name, (at, offset_s) in zip(names, jumps, strict=True))
    return Scenario([at for at, _ in jumps], names, wrong_times, Faults(train=Hooks(after_step=Several(hooks))))


def wrong_times(run: ScenarioResult) -> list[str]:
    """What speaks against it that the run was recorded by a clock that was wrong, and then by one that was right."""
    reader = MetricsReader(run.paths)
    reader.poll()
    jumps = sorted((p for name, p in run.proofs.items() if name.startswith("clock-")), key=lambda p: p["step"])
    missing = []
    for jump, until in zip(jumps, [jump["step"] for jump in jumps[1:]] + [max(reader.records)], strict=True):
        off_s = [
            reader.records[n].time_s - jump["time_s"] - jump["clock_s"] for n in range(jump["step"] + 1, until + 1)
        ]
        if not off_s or max(map(abs, off_s)) > _TOLERANCE_S:
            missing.append(f"steps after {jump['step']} were not recorded by a clock that is {jump['clock_s']} s wrong")
    return missing if run.paths.report.exists() else [*missing, "there is no report of the run"]
