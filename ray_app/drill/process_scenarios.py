"""Scenarios in which processes of a run die, are stopped or slowed down, end early or have a wrong clock.

In this order: workers and the evaluator are killed; a worker or the storage is slow, or the storage refuses; the
rendezvous is killed; the run ends early and is started again; the wall clock of a worker is hours wrong (`clock_jump`).
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
from ray_app.drill.delays import Freeze, RefusedCommit, Slow, SlowCommit, WaitForEvidence
from ray_app.drill.faults import (
    DrillStopError,
    Evidence,
    HookChain,
    Kill,
    KillAt,
    KillJoiningWorker,
    KillOnCommit,
    Stop,
    make_driver_command,
)
from ray_app.drill.scenario import Scenario, ScenarioContext, ScenarioResult, is_gone
from ray_app.driver.run import Faults
from ray_app.errors import unwrap_app_error
from ray_app.runlog.evaluations import read_evaluations
from ray_app.runlog.journal import MetricsReader
from ray_app.storage.files import put_atomic
from ray_app.train.job import Hooks, Job


def kill(context: ScenarioContext) -> Scenario | str:
    """One worker is killed."""
    return _make_kill_scenario(context, context.choose_step(), [context.choose_rank()])


def _make_kill_scenario(
    context: ScenarioContext, step: int, ranks: list[int], make_hooks: Callable[[Kill], Hooks] | None = None
) -> Scenario:
    """Returns a scenario that kills these ranks right after the step, or with the hooks that `make_hooks` returns."""
    names = [f"killed-{i}" for i in range(len(ranks))]
    kill = Kill(context.evidence, names, step, ranks)
    delay_plan = context.make_delay_plan(step + 1)
    hooks = make_hooks(kill) if make_hooks else Hooks(after_step=kill)
    after = HookChain((hooks.after_step, delay_plan)) if hooks.after_step else delay_plan
    return Scenario([step], names, confirm_deaths(names), Faults(train=Hooks(after_step=after, at=hooks.at)))


def confirm_deaths(names: list[str]) -> Callable[[ScenarioResult], list[str]]:
    """Returns a check that the processes of this evidence have ended, and that the run has recorded a failure."""

    def confirm(run: ScenarioResult) -> list[str]:
        missing = [f"the process of {name} still lives" for name in names if is_gone(run.evidence[name]) is False]
        return missing if run.events("failed") else [*missing, "the run has no record of a failure"]

    return confirm


def kill_twice(context: ScenarioContext) -> Scenario | str:
    """A worker is killed, and after another one has joined, one more in the same epoch."""
    low, high = int(0.2 * context.total_steps), int(0.8 * context.total_steps)
    starts = range(0, context.total_steps, context.steps_per_epoch)
    first, last = max(
        ((max(low, s) + 1, min(high, s + context.steps_per_epoch) - 1) for s in starts),
        key=lambda span: span[1] - span[0],
    )
    if last - first < 3:
        return f"an epoch of {context.steps_per_epoch} steps is too short to kill twice in it"
    first_kill, second_kill = (
        Kill(context.evidence, ["killed-0"], first, [context.choose_rank()]),
        Kill(context.evidence, ["killed-1"], last, [0]),
    )
    delay_plans = context.make_delay_plan(first + 1, last - 1), context.make_delay_plan(last + 1)
    hooks = Hooks(after_step=HookChain((first_kill, second_kill, *delay_plans)))
    return Scenario(
        [first, last], ["killed-0", "killed-1"], confirm_deaths(["killed-0", "killed-1"]), Faults(train=hooks)
    )


def kill_two(context: ScenarioContext) -> Scenario | str:
    """Two workers are killed at once."""
    if context.workers < 3:
        return f"it needs 3 workers so that one goes on, there are {context.workers}"
    return _make_kill_scenario(context, context.choose_step(), context.random.sample(range(context.workers), 2))


def kill_all(context: ScenarioContext) -> Scenario | str:
    """All workers are killed at once."""
    return _make_kill_scenario(context, context.choose_step(), list(range(context.workers)))


def kill_reduction(context: ScenarioContext) -> Scenario | str:
    """A worker is killed as its gradient reduction begins."""
    if context.workers < 2:
        return "one worker exchanges nothing"
    return _make_kill_scenario(
        context, context.choose_step(), [context.choose_rank()], lambda kill: Hooks(at=KillAt("reduction", kill))
    )


def kill_forming(context: ScenarioContext) -> Scenario | str:
    """A worker is killed, and another one as the rest form without it."""
    if context.workers < 3:
        return f"it needs 3 workers so that one goes on, there are {context.workers}"
    step, (first, second) = context.choose_step(), context.random.sample(range(context.workers), 2)
    first_kill, second_kill = (
        Kill(context.evidence, ["killed-0"], step, [first]),
        Kill(context.evidence, ["killed-1"], step, [second]),
    )
    after_step = HookChain((first_kill, context.make_delay_plan(step + 1)))
    hooks = Hooks(after_step=after_step, at=KillAt("forming", second_kill))
    return Scenario([step], ["killed-0", "killed-1"], confirm_deaths(["killed-0", "killed-1"]), Faults(train=hooks))


def kill_joining(context: ScenarioContext) -> Scenario | str:
    """So many workers are killed that others come for them, and the first of these is killed as it joins."""
    step, victims = context.choose_step(), context.workers - context.sufficient_workers.start + 1
    names = [f"killed-{i}" for i in range(victims)]
    kill = Kill(context.evidence, names, step, context.random.sample(range(context.workers), victims))
    kill_joining_worker = KillJoiningWorker(context.evidence, "killed-joining", names[0])
    hooks = Hooks(after_step=HookChain((kill, context.make_delay_plan(step + 1))), at=kill_joining_worker)
    return Scenario([step], [*names, "killed-joining"], confirm_deaths([*names, "killed-joining"]), Faults(train=hooks))


def kill_phases(context: ScenarioContext) -> Scenario | str:
    """Rank 0 is killed three times: as it asks for data, as it computes, and as its gradient reduction begins."""
    phases = ("data", "compute", "reduction" if context.workers > 1 else "compute")
    steps = [int(part * context.total_steps) for part in (0.25, 0.45, 0.65)]
    names = [f"killed-{i}" for i in range(len(phases))]
    kills = zip(phases, names, steps, strict=True)
    at = HookChain(tuple(KillAt(phase, Kill(context.evidence, [name], step, [0])) for phase, name, step in kills))
    delay_plans = [
        context.make_delay_plan(step + 1, until)
        for step, until in zip(steps, [step - 1 for step in steps[1:]] + [None], strict=True)
    ]
    hooks = Hooks(after_step=HookChain(tuple(delay_plans)), at=at)
    return Scenario(steps, names, confirm_deaths(names), Faults(train=hooks))


def kill_saving(context: ScenarioContext) -> Scenario | str:
    """The worker that writes a checkpoint is killed before it has committed it."""
    step = context.choose_checkpoint_step()
    hooks = Hooks(context.make_delay_plan(step + 1), KillOnCommit(context.evidence, "killed-0", step))

    def confirm(run: ScenarioResult) -> list[str]:
        is_committed = any(e.details["step"] == step for e in run.events("checkpointed"))
        return confirm_deaths(["killed-0"])(run) + (
            [] if is_committed else [f"the checkpoint of step {step} was never written"]
        )

    return Scenario([step], ["killed-0"], confirm, Faults(train=hooks))


def evaluator(context: ScenarioContext) -> Scenario | str:
    """The evaluator is killed while it evaluates."""
    if context.config.data.eval_path is None:
        return "there is no evaluator without data.eval_path"
    if context.config.evaluate.where == "workers":
        return "there is no evaluator with evaluate.where workers"
    step = context.choose_checkpoint_step()

    def confirm(run: ScenarioResult) -> list[str]:
        missing = ["the evaluator's process still lives"] if is_gone(run.evidence["killed-0"]) is False else []
        is_evaluated = any(e.step >= step for e in read_evaluations(run.paths))
        return missing if is_evaluated else [*missing, "nothing was evaluated after it"]

    kill = KillOnCommit(context.evidence, "killed-0", step)
    return Scenario([step], ["killed-0"], confirm, Faults(before_evaluation=kill))


def freeze(context: ScenarioContext) -> Scenario | str:
    """A worker is stopped (SIGSTOP) for longer than failure.heartbeat_timeout_s, then wants to go on."""
    step, seconds = context.choose_step(), context.config.failure.heartbeat_timeout_s + 4.0
    hook = Freeze(context.evidence, "frozen", step, context.choose_rank(), seconds)
    delay_plan = context.make_delay_plan(step + 1, min_s=seconds)

    def confirm(run: ScenarioResult) -> list[str]:
        is_recorded = any("no heartbeat for" in str(e.details["errors"]) for e in run.events("failed"))
        return [] if is_recorded else ["the run has no record of a worker that was silent"]

    return Scenario([step], ["frozen"], confirm, Faults(train=Hooks(after_step=HookChain((hook, delay_plan)))))


def slow(context: ScenarioContext) -> Scenario | str:
    """A worker takes three times as long as the others for a third of the steps."""
    step = context.choose_step()
    last = min(step + context.total_steps // 3, context.total_steps - 1)
    hook = Slow(context.evidence, "slow", step, last, context.choose_rank(), 3.0)

    def confirm(run: ScenarioResult) -> list[str]:
        failures = [str(e.details["errors"]) for e in run.events("failed")]
        missing = [] if run.evidence["slow"]["seconds"] > 0 else ["no time was wasted"]
        return [*missing, *(f"a slow worker was taken for a lost one: {errors}" for errors in failures)]

    return Scenario([step], ["slow"], confirm, Faults(train=Hooks(after_step=hook)))


def slow_storage(context: ScenarioContext) -> Scenario | str:
    """A checkpoint takes five seconds to be written."""
    step, seconds = context.choose_checkpoint_step(), 5.0
    hooks = Hooks(before_commit=SlowCommit(context.evidence, "slow", step, seconds))

    def confirm(run: ScenarioResult) -> list[str]:
        durations_s = [
            e.details["duration_s"]
            for e in run.events("checkpointed")
            if e.details["step"] == run.evidence["slow"]["step"]
        ]
        return [] if durations_s and durations_s[0] >= seconds else [f"no checkpoint took {seconds:g} s"]

    return Scenario([step], ["slow"], confirm, Faults(train=hooks))


def storage_away(context: ScenarioContext) -> Scenario | str:
    """The storage refuses a checkpoint for five seconds."""
    return _make_refusal_scenario(context, 5.0, errno.EIO, "write_retried")


def full_disk(context: ScenarioContext) -> Scenario | str:
    """The disk is full until a checkpoint is given up."""
    return _make_refusal_scenario(context, None, errno.ENOSPC, "write_failed")


def _make_refusal_scenario(context: ScenarioContext, seconds: float | None, number: int, kind: str) -> Scenario:
    """Returns a scenario in which the storage refuses a checkpoint.

    Args:
        seconds: Duration of the refusals; None: the checkpoint is never written.
        number: Number of the storage's error, see `errno`.
        kind: Kind of the event with which the run must record it.
    """
    step = context.choose_checkpoint_step()
    hooks = Hooks(before_commit=RefusedCommit(context.evidence, "refused", step, seconds, number))

    def confirm(run: ScenarioResult) -> list[str]:
        refused_step = run.evidence["refused"]["step"]
        has_event = any(e.details["step"] == refused_step for e in run.events(kind))
        written_steps = {e.details["step"] for e in run.events("checkpointed")}
        missing = [] if has_event else [f"there is no event {kind} of step {refused_step}"]
        is_written = refused_step in written_steps
        if is_written != (seconds is not None):
            missing.append(f"the checkpoint of step {refused_step} was {'' if is_written else 'not '}written")
        has_later = max(written_steps) > refused_step
        return missing if has_later else [*missing, f"no checkpoint after that of step {refused_step}"]

    return Scenario([step], ["refused"], confirm, Faults(train=hooks))


_RENDEZVOUS_TIMEOUT_S = 60.0


def rendezvous(context: ScenarioContext) -> Scenario | str:
    """The rendezvous, which forms the generations, is killed; a worker is killed right after it is back."""
    step = context.choose_step()
    wait = WaitForEvidence(context.evidence, "held", "rendezvous_killed", step, 0)
    kill = Kill(context.evidence, ["killed-0"], step + 1, [context.choose_rank()])

    def observe(job: Job) -> None:
        if context.evidence.has("held") and not context.evidence.has("rendezvous_killed"):
            actor = ray.get_actor(job.rendezvous)
            old_address, _ = ray.get(actor.address_and_secret.remote())
            ray.kill(actor, no_restart=False)
            new_address, deadline_s = old_address, time.monotonic() + _RENDEZVOUS_TIMEOUT_S
            # `ray.kill` does not wait for the death of the actor: the old process may still answer.
            while new_address == old_address and time.monotonic() < deadline_s:
                new_address, _ = ray.get(actor.address_and_secret.remote())
            context.evidence.put("rendezvous_killed", step=step, before=old_address, after=new_address)

    def confirm(run: ScenarioResult) -> list[str]:
        killed = run.evidence["rendezvous_killed"]
        missing = ["the rendezvous listens where it did before"] if killed["before"] == killed["after"] else []
        return missing + confirm_deaths(["killed-0"])(run)

    hooks = Hooks(after_step=HookChain((wait, kill, context.make_delay_plan(step + 2))))
    names, waits = ["held", "rendezvous_killed", "killed-0"], {"held": "rendezvous_killed"}
    return Scenario([step], names, confirm, Faults(train=hooks), observe, waits)


def damage(context: ScenarioContext) -> Scenario | str:
    """The run is stopped, one bit of its newest checkpoint flips, and it is started again."""
    return _make_damage_scenario(context, flip_middle_bit)


def torn_write(context: ScenarioContext) -> Scenario | str:
    """The run is stopped, half of the largest file of its newest checkpoint is gone, and it is started again."""
    return _make_damage_scenario(context, cut_in_half)


def _make_damage_scenario(context: ScenarioContext, damage: Callable[[bytearray], bytearray]) -> Scenario:
    """Returns a scenario that stops a run, damages its newest checkpoint, and starts the run again.

    It damages the largest file of the checkpoint.
    """
    step = context.random.randrange(2 * context.checkpoint_every + 1, 5 * context.checkpoint_every)

    def first_start(config: Config) -> None:
        try:
            context.train(config, Faults(train=Hooks(after_step=Stop(context.evidence, "stopped", step))))
        except Exception as error:
            if not isinstance(unwrap_app_error(error), DrillStopError):
                raise
        newest = CheckpointStore(context.paths).commits()[-1]
        folder = context.paths.checkpoint(newest.step, newest.fence)
        name = max(newest.files, key=lambda name: newest.files[name]["bytes"])
        put_atomic(folder / name, bytes(damage(bytearray((folder / name).read_bytes()))))
        context.evidence.put("damaged", step=newest.step, checkpoint=folder.name, file=name)

    def confirm(run: ScenarioResult) -> list[str]:
        damaged = run.evidence["damaged"]["checkpoint"]
        was_passed_over = any(e.details["checkpoint"] == damaged for e in run.events("fallback"))
        return [] if was_passed_over else [f"the run has no record that {damaged} was passed over"]

    return Scenario([step], ["stopped", "damaged"], confirm, first_start=first_start)


def flip_middle_bit(data: bytearray) -> bytearray:
    """Returns the data with one bit flipped in the middle."""
    data[len(data) // 2] ^= 1
    return data


def cut_in_half(data: bytearray) -> bytearray:
    """Returns the first half of the data."""
    return data[: len(data) // 2]


def driver(context: ScenarioContext) -> Scenario | str:
    """The driver is killed, and the same run is started again."""
    step = context.choose_step()
    wait = WaitForEvidence(context.evidence, "held", "driver_killed", step, 0)
    return _make_driver_scenario(context, step, Faults(train=Hooks(after_step=wait)), ["held"])


def evaluator_and_driver(context: ScenarioContext) -> Scenario | str:
    """The evaluator is killed while it evaluates, then the driver, and the same run is started again."""
    if context.config.data.eval_path is None or context.config.evaluate.where == "workers":
        return "there is no evaluator without data.eval_path, nor with evaluate.where workers"
    step = context.choose_checkpoint_step()
    wait = WaitForEvidence(context.evidence, "held", "driver_killed", step + 1, 0)
    faults = Faults(train=Hooks(after_step=wait), before_evaluation=KillOnCommit(context.evidence, "killed-0", step))
    scenario = _make_driver_scenario(context, step + 1, faults, ["held", "killed-0"])

    def confirm(run: ScenarioResult) -> list[str]:
        is_evaluated = any(e.step >= step for e in read_evaluations(run.paths))
        return scenario.confirm(run) + ([] if is_evaluated else ["nothing was evaluated after it"])

    return replace(scenario, confirm=confirm)


_DRIVER_TIMEOUT_S = 180.0


def _make_driver_scenario(context: ScenarioContext, step: int, faults: Faults, awaited_evidence: list[str]) -> Scenario:
    """Returns a scenario that starts the run with a driver in another process, kills it, and starts the run again.

    Args:
        step: The step for the certificate.
        faults: The faults of the first start.
        awaited_evidence: Names of the evidence that must exist before the driver is killed.
    """

    def first_start(config: Config) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with (Path(folder) / "output").open("wb") as output:
                command = make_driver_command(Path(folder) / "run", config, faults)
                process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
            try:
                deadline_s = time.monotonic() + _DRIVER_TIMEOUT_S
                while process.poll() is None and time.monotonic() < deadline_s:
                    if all(map(context.evidence.has, awaited_evidence)):
                        break
                    time.sleep(0.1)
                if process.poll() is None and all(map(context.evidence.has, awaited_evidence)):
                    process.kill()
                    process.wait()
                    context.evidence.put("driver_killed", step=step, pid=process.pid, exit_code=process.returncode)
                else:
                    context.evidence.put("trouble", error=(Path(folder) / "output").read_text()[-2000:])
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                process.wait()

    def confirm(run: ScenarioResult) -> list[str]:
        starts = len(run.events("started"))
        return [] if starts == 2 else [f"the run has the record of {starts} starts"]

    return Scenario(
        [step], [*awaited_evidence, "driver_killed"], confirm, waits={"held": "driver_killed"}, first_start=first_start
    )


_HOUR_S = 3600


_TOLERANCE_S = 900


def clock_jump(context: ScenarioContext) -> Scenario | str:
    """The wall clock of the rank that writes record and checkpoints is hours ahead, then hours behind, then right."""
    if reason := find_clock_obstacle():
        return reason
    if not isinstance(context.paths.root, Path) or "://" in context.config.data.path:
        return "S3 refuses what is signed at another hour"
    step, every = context.choose_step(), context.checkpoint_every + 1
    hours_s = _HOUR_S * context.random.randrange(2, 10)
    jumps = [(step, hours_s), (step + every, -hours_s), (step + 2 * every, 0)]
    names = [f"clock-{i}" for i in range(len(jumps))]
    hooks = tuple(
        ClockJump(context.evidence, name, jump_step, 0, offset_s)
        for name, (jump_step, offset_s) in zip(names, jumps, strict=True)
    )
    faults = Faults(train=Hooks(after_step=HookChain(hooks)))
    return Scenario([jump_step for jump_step, _ in jumps], names, confirm_clock_jumps, faults)


def confirm_clock_jumps(run: ScenarioResult) -> list[str]:
    """Confirms that the run was recorded by a clock that was wrong, then right; returns what is missing.

    The time of each step's record must be that of the clock after the last jump before it.
    """
    reader = MetricsReader(run.paths)
    reader.poll()
    jumps = sorted((p for name, p in run.evidence.items() if name.startswith("clock-")), key=lambda p: p["step"])
    missing = []
    for jump, last_step in zip(jumps, [jump["step"] for jump in jumps[1:]] + [max(reader.records)], strict=True):
        errors_s = [
            reader.records[n].time_s - jump["time_s"] - jump["clock_s"] for n in range(jump["step"] + 1, last_step + 1)
        ]
        if not errors_s or max(map(abs, errors_s)) > _TOLERANCE_S:
            missing.append(f"steps after {jump['step']} were not recorded by a clock that is {jump['clock_s']} s wrong")
    return missing if run.paths.report.exists() else [*missing, "there is no report of the run"]


@dataclass(frozen=True)
class ClockJump:
    """Shifts the wall clock of a rank after a step; a hook for `Hooks.after_step`.

    Args:
        evidence: Records the fault with the time of the right clock.
        step: Finished steps at which the clock jumps.
        offset_s: Difference of the clock to the right one from then on.
    """

    evidence: Evidence
    name: str
    step: int
    rank: int
    offset_s: int

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if step == self.step and rank == self.rank and not self.evidence.has(self.name):
            # On an error the scenario counts as failed, but the run must go on.
            try:
                shift_clock(0)
                self.evidence.put(self.name, rank=rank, step=step, clock_s=self.offset_s)
                shift_clock(self.offset_s)
            except OSError as error:
                self.evidence.put("trouble", error=f"the clock cannot be moved: {error}")


def find_clock_obstacle() -> str | None:
    """Returns why the wall clock of a process cannot be shifted on this machine; None if it can."""
    if platform.machine() != "x86_64":
        return f"the clock of a single process can be moved on x86_64 only, and this is {platform.machine()}"
    try:
        absent = _VDSO_CODE.keys() - dict(_vdso_functions()).keys()
    except OSError as error:
        return f"the functions that tell the time cannot be read: {error}"
    return f"this kernel has no {', '.join(sorted(absent))}" if absent else None


def shift_clock(offset_s: int) -> None:
    """Shifts the wall clock of this process by an offset from now on, for all of its code: Python, C, threads.

    A process reads the clocks with functions of the vDSO, a library that the kernel maps into every process. Its pages
    become private to the process with the first write. Each function that returns the wall clock is overwritten with a
    jump to a replacement, which makes the system call and adds the offset. Other clocks stay right.

    Raises:
        OSError: The kernel does not allow a process to change these pages.
    """
    _install_clock_offset().value = offset_s


# mov rcx, <address of the offset>; mov rcx, [rcx]
_LOAD_OFFSET = b"\x48\xb9%s\x48\x8b\x09"


_VDSO_CODE = {
    # rdi is the number of the clock, rsi the address of the result. The wall clocks are 0 and, with less resolution, 5.
    "__vdso_clock_gettime": b"\xb8\xe4\0\0\0\x0f\x05\x85\xff\x74\x06\x83\xff\x05\x74\x01\xc3"
    + _LOAD_OFFSET
    + b"\x48\x01\x0e\xc3",
    "__vdso_gettimeofday": b"\xb8\x60\0\0\0\x0f\x05\x48\x85\xff\x74\x10" + _LOAD_OFFSET + b"\x48\x01\x0f\xc3",
    "__vdso_time": b"\xb8\xc9\0\0\0\x0f\x05" + _LOAD_OFFSET + b"\x48\x01\xc8\x48\x85\xff\x74\x03\x48\x89\x07\xc3",
}
"""Machine code (x86-64) of the replacement of each vDSO function.

It makes the system call of that name and adds the offset to the seconds of the result.
"""


# mov rax, <address>; jmp rax
_JUMP = b"\x48\xb8%s\xff\xe0"


_MAP_FAILED = ctypes.c_void_p(-1).value


@cache
def _install_clock_offset() -> ctypes.c_int64:
    """Installs the replacements of the vDSO's functions, once in the life of the process; returns their offset."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # A page of Python's `mmap` would be unmapped with its object, while threads may still read the clock in it.
    page = libc.mmap(None, mmap.PAGESIZE, access, kind, -1, 0)
    if page == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "no page for code")
    # The page starts with the offset (8 bytes); the code of the replacements follows.
    offset, free = ctypes.c_int64.from_address(page), page + 8
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        for name, address in _vdso_functions():
            if name in _VDSO_CODE:
                code = _VDSO_CODE[name] % struct.pack("<Q", page)
                ctypes.memmove(free, code, len(code))
                os.pwrite(memory.fileno(), _JUMP % struct.pack("<Q", free), address)
                free += len(code)
    return offset


_SHT_DYNSYM = 11


def _vdso_functions() -> Iterator[tuple[str, int]]:
    """Yields name and address of each function of the vDSO, an ELF file in memory."""
    mapping = re.search(r"^(\w+)-(\w+) .*\[vdso\]$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    if mapping is None:
        raise OSError("there is no vDSO")
    base, end = int(mapping[1], 16), int(mapping[2], 16)
    image = ctypes.string_at(base, end - base)
    (sections,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, sections + i * size) for i in range(count)]
    for _, kind, _, _, table, length, link, _, _, entry_size in headers:
        if kind != _SHT_DYNSYM:
            continue
        names = headers[link][4]
        for entry in range(table, table + length, entry_size):
            name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", image, entry)
            if section:
                yield image[names + name : image.index(b"\0", names + name)].decode(), base + value
