"""Scenarios in which processes of a run die, are stopped or slowed down, end early or have a wrong clock."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import StringIO
from math import ceil
from pathlib import Path
from typing import Any

import ray

from ray_app.checkpoint.store import CheckpointStore
from ray_app.config.config import Config
from ray_app.drill.faults import (
    ActOnWaits,
    DrillStopError,
    Evidence,
    Freeze,
    HookChain,
    Kill,
    KillAt,
    KillJoiningWorker,
    KillOnCommit,
    RefusedCommit,
    Slow,
    SlowCommit,
    Stop,
    WaitForEvidence,
    address_of_actor,
    make_driver_command,
)
from ray_app.drill.scenario import Scenario, ScenarioContext, ScenarioResult, is_gone, unmet
from ray_app.driver.run import Faults
from ray_app.errors import unwrap_app_error
from ray_app.runlog.evaluations import read_evaluations
from ray_app.runlog.journal import read_records
from ray_app.runlog.lease import LeaseHolder, newest_fence
from ray_app.runlog.output import TextConsole
from ray_app.storage.files import put_atomic, read_json
from ray_app.train.job import Hooks, Job
from ray_app.tune.options import TuneSection
from ray_app.tune.record import StudyPaths, StudyRecord, read_record
from ray_app.tune.study import run_study

_RENDEZVOUS_TIMEOUT_S = 60.0
_DRIVER_TIMEOUT_S = 180.0
_HOUR_S = 3600
_TOLERANCE_S = 900


def kill(context: ScenarioContext) -> Scenario | str:
    """One worker is killed."""
    return _kill_at_once(context, [context.choose_rank()])


def _make_kills(context: ScenarioContext, step: int, ranks: list[int]) -> Kill:
    """Returns a hook that kills these ranks at the same moment, right after a step."""
    return Kill(context.evidence, [f"killed-{i}" for i in range(len(ranks))], step, ranks)


def _make_death_scenario(steps: list[int], names: list[str], hooks: Hooks) -> Scenario:
    """Returns a scenario in which hooks kill workers, with these names of the evidence."""
    return Scenario(steps, names, confirm_deaths(names), Faults(train=hooks))


def _kill_at_once(context: ScenarioContext, ranks: list[int]) -> Scenario:
    kills = _make_kills(context, context.choose_step(), ranks)
    return _make_death_scenario([kills.step], kills.names, Hooks(after_step=context.delayed(kills.step, kills)))


def make_kill_for_replacement(context: ScenarioContext, step: int) -> Kill:
    """Returns a hook that kills so many workers after a step that others join for them."""
    num_victims = context.workers - context.sufficient_workers.start + 1
    return _make_kills(context, step, context.random.sample(range(context.workers), num_victims))


def confirm_deaths(names: list[str]) -> Callable[[ScenarioResult], list[str]]:
    """Returns a check that the processes of this evidence have ended, and that the run has recorded a failure."""

    def confirm(run: ScenarioResult) -> list[str]:
        deaths = [(is_gone(run.evidence[name]) is not False, f"the process of {name} still lives") for name in names]
        return unmet(*deaths, (bool(run.events("failed")), "the run has no record of a failure"))

    return confirm


def kill_twice(context: ScenarioContext) -> Scenario | str:
    """A worker is killed, and after another one has joined, one more in the same epoch."""
    low, high = int(0.2 * context.total_steps), int(0.8 * context.total_steps)
    starts = range(0, context.total_steps, context.steps_per_epoch)
    spans = ((max(low, s) + 1, min(high, s + context.steps_per_epoch) - 1) for s in starts)
    first, last = max(spans, key=lambda span: span[1] - span[0])
    if last - first < 3:
        return f"an epoch of {context.steps_per_epoch} steps is too short for two kills"
    first_kill = Kill(context.evidence, ["killed-0"], first, [context.choose_rank()])
    second_kill = Kill(context.evidence, ["killed-1"], last, [0])
    delay_plans = context.make_delay_plan(first + 1, last - 1), context.make_delay_plan(last + 1)
    hooks = Hooks(after_step=HookChain((first_kill, second_kill, *delay_plans)))
    return _make_death_scenario([first, last], ["killed-0", "killed-1"], hooks)


def kill_two(context: ScenarioContext) -> Scenario | str:
    """Two workers are killed at once."""
    if context.workers < 3:
        return f"the scenario needs 3 workers, so that one survives, but has {context.workers}"
    return _kill_at_once(context, context.random.sample(range(context.workers), 2))


def kill_all(context: ScenarioContext) -> Scenario | str:
    """All workers are killed at once."""
    return _kill_at_once(context, list(range(context.workers)))


def kill_reduction(context: ScenarioContext) -> Scenario | str:
    """A worker is killed as its gradient reduction begins."""
    if context.workers < 2:
        return "a single worker has no peer"
    kills = _make_kills(context, context.choose_step(), [context.choose_rank()])
    hooks = Hooks(after_step=context.delayed(kills.step), at=KillAt("reduction", kills))
    return _make_death_scenario([kills.step], kills.names, hooks)


def kill_forming(context: ScenarioContext) -> Scenario | str:
    """A worker is killed, and another one as the rest form without it."""
    if context.workers < 3:
        return f"the scenario needs 3 workers, so that one survives, but has {context.workers}"
    step, (first, second) = context.choose_step(), context.random.sample(range(context.workers), 2)
    first_kill = Kill(context.evidence, ["killed-0"], step, [first])
    second_kill = Kill(context.evidence, ["killed-1"], step, [second])
    hooks = Hooks(after_step=context.delayed(step, first_kill), at=KillAt("forming", second_kill))
    return _make_death_scenario([step], ["killed-0", "killed-1"], hooks)


def kill_joining(context: ScenarioContext) -> Scenario | str:
    """So many workers are killed that others come for them, and the first of these is killed as it joins."""
    step = context.choose_step()
    kills = make_kill_for_replacement(context, step)
    kill_joining_worker = KillJoiningWorker(context.evidence, "killed-joining", kills.names[0])
    hooks = Hooks(after_step=context.delayed(step, kills), at=kill_joining_worker)
    return _make_death_scenario([step], [*kills.names, "killed-joining"], hooks)


def kill_phases(context: ScenarioContext) -> Scenario | str:
    """Rank 0 is killed three times: as it asks for data, as it computes, and as its gradient reduction begins."""
    phases = ("data", "compute", "reduction" if context.workers > 1 else "compute")
    steps = [int(part * context.total_steps) for part in (0.25, 0.45, 0.65)]
    names = [f"killed-{i}" for i in range(len(phases))]
    kills = zip(phases, names, steps, strict=True)
    at = HookChain(tuple(KillAt(phase, Kill(context.evidence, [name], step, [0])) for phase, name, step in kills))
    spans = zip(steps, [step - 1 for step in steps[1:]] + [None], strict=True)
    delay_plans = tuple(context.make_delay_plan(step + 1, until) for step, until in spans)
    return _make_death_scenario(steps, names, Hooks(after_step=HookChain(delay_plans), at=at))


def kill_saving(context: ScenarioContext) -> Scenario | str:
    """The worker that writes a checkpoint is killed before it has committed it."""
    step = context.choose_checkpoint_step()
    hooks = Hooks(context.make_delay_plan(step + 1), KillOnCommit(context.evidence, "killed-0", step))

    def confirm(run: ScenarioResult) -> list[str]:
        is_committed = any(e.details["step"] == step for e in run.events("checkpointed"))
        return confirm_deaths(["killed-0"])(run) + unmet(
            (is_committed, f"the checkpoint of step {step} was never written")
        )

    return Scenario([step], ["killed-0"], confirm, Faults(train=hooks))


def evaluator(context: ScenarioContext) -> Scenario | str:
    """The evaluator is killed while it evaluates."""
    if context.config.data.evaluation_path is None:
        return "there is no evaluator without data.eval_path"
    if context.config.evaluate.where == "workers":
        return "there is no evaluator with evaluate.where workers"
    step = context.choose_checkpoint_step()

    def confirm(run: ScenarioResult) -> list[str]:
        is_killed = is_gone(run.evidence["killed-0"]) is not False
        return unmet((is_killed, "the evaluator's process still lives")) + _confirm_evaluation(run, step)

    kill = KillOnCommit(context.evidence, "killed-0", step)
    return Scenario([step], ["killed-0"], confirm, Faults(before_evaluation=kill))


def _confirm_evaluation(run: ScenarioResult, step: int) -> list[str]:
    """Confirms that a checkpoint from a step on was evaluated; returns what is missing."""
    return unmet((any(e.step >= step for e in read_evaluations(run.paths)), "no checkpoint was evaluated afterwards"))


def freeze(context: ScenarioContext) -> Scenario | str:
    """A worker is stopped (SIGSTOP) for longer than failure.heartbeat_timeout_s, then wants to go on."""
    step, seconds = context.choose_step(), context.config.failure.heartbeat_timeout_s + 4.0
    hook = Freeze(context.evidence, "frozen", step, context.choose_rank(), seconds)

    def confirm(run: ScenarioResult) -> list[str]:
        is_recorded = any("no heartbeat for" in str(e.details["errors"]) for e in run.events("failed"))
        return unmet((is_recorded, "the run has no record of a worker that was silent"))

    hooks = Hooks(after_step=context.delayed(step, hook, min_s=seconds))
    return Scenario([step], ["frozen"], confirm, Faults(train=hooks))


def slow(context: ScenarioContext) -> Scenario | str:
    """A worker takes three times as long as the others for a third of the steps."""
    step = context.choose_step()
    last = min(step + context.total_steps // 3, context.total_steps - 1)
    hook = Slow(context.evidence, "slow", step, last, context.choose_rank(), 3.0)

    def confirm(run: ScenarioResult) -> list[str]:
        failures = [str(e.details["errors"]) for e in run.events("failed")]
        missing = unmet((run.evidence["slow"]["seconds"] > 0, "no time was lost"))
        return [*missing, *(f"a slow worker was declared lost: {errors}" for errors in failures)]

    return Scenario([step], ["slow"], confirm, Faults(train=Hooks(after_step=hook)))


def slow_storage(context: ScenarioContext) -> Scenario | str:
    """A checkpoint takes five seconds to be written."""
    step, seconds = context.choose_checkpoint_step(), 5.0
    hooks = Hooks(before_commit=SlowCommit(context.evidence, "slow", step, seconds))

    def confirm(run: ScenarioResult) -> list[str]:
        details = [e.details for e in run.events("checkpointed")]
        durations_s = [d["duration_s"] for d in details if d["step"] == run.evidence["slow"]["step"]]
        return unmet((bool(durations_s) and durations_s[0] >= seconds, f"no checkpoint took {seconds:g} s"))

    return Scenario([step], ["slow"], confirm, Faults(train=hooks))


def storage_away(context: ScenarioContext) -> Scenario | str:
    """The storage refuses a checkpoint for five seconds."""
    return _make_refusal_scenario(context, 5.0, errno.EIO, "write_retried")


def full_disk(context: ScenarioContext) -> Scenario | str:
    """The disk is full until a checkpoint is given up."""
    return _make_refusal_scenario(context, None, errno.ENOSPC, "write_failed")


def _make_refusal_scenario(context: ScenarioContext, seconds: float | None, number: int, kind: str) -> Scenario:
    """Returns a scenario in which the storage refuses a checkpoint for some seconds, or (None) until it is given up.

    The run must record the error `number` (see `errno`) by an event of this kind.
    """
    step = context.choose_checkpoint_step()
    hooks = Hooks(before_commit=RefusedCommit(context.evidence, "refused", step, seconds, number))

    def confirm(run: ScenarioResult) -> list[str]:
        refused_step = run.evidence["refused"]["step"]
        has_event = any(e.details["step"] == refused_step for e in run.events(kind))
        written_steps = {e.details["step"] for e in run.events("checkpointed")}
        is_written = refused_step in written_steps
        return unmet(
            (has_event, f"there is no event {kind} of step {refused_step}"),
            (
                is_written == (seconds is not None),
                f"the checkpoint of step {refused_step} was {'' if is_written else 'not '}written",
            ),
            (max(written_steps) > refused_step, f"no checkpoint was written after step {refused_step}"),
        )

    return Scenario([step], ["refused"], confirm, Faults(train=hooks))


def rendezvous(context: ScenarioContext) -> Scenario | str:
    """The rendezvous, which forms the generations, is killed; a worker is killed right after it is back."""
    step = context.choose_step()
    wait = WaitForEvidence(context.evidence, "held", "rendezvous_killed", step, 0)
    kill = Kill(context.evidence, ["killed-0"], step + 1, [context.choose_rank()])

    def restart(_: dict[str, Any], job: Job) -> dict[str, Any]:
        old_address = address_of_actor(job.rendezvous)
        ray.kill(ray.get_actor(job.rendezvous), no_restart=False)
        new_address, deadline_s = old_address, time.monotonic() + _RENDEZVOUS_TIMEOUT_S
        # `ray.kill` does not wait for the death of the actor: the old process may still answer.
        while new_address == old_address and time.monotonic() < deadline_s:
            new_address = address_of_actor(job.rendezvous)
        return {"before": old_address, "after": new_address}

    def confirm(run: ScenarioResult) -> list[str]:
        killed = run.evidence["rendezvous_killed"]
        has_moved = killed["before"] != killed["after"]
        return unmet((has_moved, "the rendezvous has its old address")) + confirm_deaths(["killed-0"])(run)

    hooks = Hooks(after_step=context.delayed(step + 1, wait, kill))
    names, waits = ["held", "rendezvous_killed", "killed-0"], {"held": "rendezvous_killed"}
    observe = ActOnWaits(context.evidence, {"held": ("rendezvous_killed", restart)})
    return Scenario([step], names, confirm, Faults(train=hooks), observe, waits)


def damage(context: ScenarioContext) -> Scenario | str:
    """The run is stopped, one bit of its newest checkpoint flips, and it is started again."""
    return _make_damage_scenario(context, flip_middle_bit)


def torn_write(context: ScenarioContext) -> Scenario | str:
    """The run is stopped, half of the largest file of its newest checkpoint is gone, and it is started again."""
    return _make_damage_scenario(context, lambda data: data[: len(data) // 2])


def _make_damage_scenario(context: ScenarioContext, damage: Callable[[bytearray], bytearray]) -> Scenario:
    """Returns a scenario that stops a run, damages the largest file of its newest checkpoint, and starts it again."""
    step = context.random.randrange(2 * context.checkpoint_every + 1, 5 * context.checkpoint_every)

    def first_start(config: Config) -> None:
        try:
            context.train(config, Faults(train=Hooks(after_step=Stop(context.evidence, "stopped", step))))
        except Exception as error:
            if not isinstance(unwrap_app_error(error), DrillStopError):
                raise
        newest = CheckpointStore(context.paths).commits()[-1]
        folder = context.paths.checkpoint(newest.step, newest.fence)
        name = newest.prefix + max(newest.files, key=lambda name: newest.files[name]["bytes"])
        put_atomic(folder / name, bytes(damage(bytearray((folder / name).read_bytes()))))
        context.evidence.put("damaged", step=newest.step, checkpoint=folder.name, file=name)

    def confirm(run: ScenarioResult) -> list[str]:
        damaged = run.evidence["damaged"]["checkpoint"]
        was_passed_over = any(e.details["checkpoint"] == damaged for e in run.events("fallback"))
        return unmet((was_passed_over, f"the run has no record that {damaged} was skipped"))

    return Scenario([step], ["stopped", "damaged"], confirm, first_start=first_start)


def flip_middle_bit(data: bytearray) -> bytearray:
    """Returns the data with one bit flipped in the middle."""
    data[len(data) // 2] ^= 1
    return data


def driver(context: ScenarioContext) -> Scenario | str:
    """The driver is killed, and the same run is started again."""
    step = context.choose_step()
    wait = WaitForEvidence(context.evidence, "held", "driver_killed", step, 0)
    return _make_driver_scenario(context, step, Faults(train=Hooks(after_step=wait)), ["held"])


def evaluator_and_driver(context: ScenarioContext) -> Scenario | str:
    """The evaluator is killed while it evaluates, then the driver, and the same run is started again."""
    if context.config.data.evaluation_path is None or context.config.evaluate.where == "workers":
        return "there is no evaluator without data.eval_path, nor with evaluate.where workers"
    step = context.choose_checkpoint_step()
    wait = WaitForEvidence(context.evidence, "held", "driver_killed", step + 1, 0)
    faults = Faults(train=Hooks(after_step=wait), before_evaluation=KillOnCommit(context.evidence, "killed-0", step))
    scenario = _make_driver_scenario(context, step + 1, faults, ["held", "killed-0"])
    return replace(scenario, confirm=lambda run: scenario.confirm(run) + _confirm_evaluation(run, step))


def _make_driver_scenario(context: ScenarioContext, step: int, faults: Faults, awaited_evidence: list[str]) -> Scenario:
    """Returns a scenario that kills a driver in another process once some evidence exists, and starts the run again.

    `step` is the one of the certificate, and `faults` those of the first start.
    """

    def first_start(config: Config) -> None:
        with tempfile.TemporaryDirectory() as folder:
            command = make_driver_command(Path(folder) / "run", config, faults)
            _kill_driver(
                context.evidence,
                command,
                lambda: all(map(context.evidence.has, awaited_evidence)),
                "driver_killed",
                step=step,
            )

    def confirm(run: ScenarioResult) -> list[str]:
        starts = len(run.events("started"))
        return unmet((starts == 2, f"the run has records of {starts} starts"))

    return Scenario(
        [step], [*awaited_evidence, "driver_killed"], confirm, waits={"held": "driver_killed"}, first_start=first_start
    )


def _kill_driver(
    evidence: Evidence, command: list[str], is_reached: Callable[[], bool], name: str, **facts: Any
) -> None:
    """Starts a driver in another process, and kills it once something is reached, of which `name` is the evidence."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            deadline_s, reached = time.monotonic() + _DRIVER_TIMEOUT_S, False
            while process.poll() is None and not reached and time.monotonic() < deadline_s:
                time.sleep(0.1)
                reached = is_reached()
            if process.poll() is None and reached:
                process.kill()
                process.wait()
                evidence.put(name, pid=process.pid, exit_code=process.returncode, **facts)
            else:
                output.seek(0)
                evidence.put("trouble", error=output.read().decode(errors="replace")[-2000:])
        finally:
            process.kill()
            process.wait()


def study(context: ScenarioContext) -> Scenario | str:
    """The driver of a study is killed, then a slot, and the study decides as one without a disturbance."""
    if context.config.data.eval_path is None:
        return "a study needs data.eval_path, by which it compares its trials"
    if context.nodes is None:
        return "the slots of a study are killed only on a cluster that the drill has started"
    evidence, seed = context.evidence, context.config.seed
    epochs = ceil(context.total_steps / context.steps_per_epoch)
    storage = f"{context.config.run.storage_path}/studies"
    config = context.config.replace(run__name=None, run__storage_path=storage, train__epochs=epochs)
    tune: dict[str, Any] = {
        "name": "killed",
        "space": {"seed": {"choice": [seed, seed + 1, seed + 2]}},
        "sampler": "grid",
    }
    tune |= {"trials": 3, "scheduler": {"kind": "halving", "eta": 2, "min_epochs": max(1, epochs // 2)}}

    def run(name: str) -> StudyRecord:
        return run_study(config, {**tune, "name": name}, TextConsole(file=StringIO())).record

    def first_start(_: Config) -> None:
        undisturbed, paths = run("undisturbed"), StudyPaths.of(config, TuneSection(name="killed"))
        fields = {**config.replace(run__ray_address=ray.get_runtime_context().gcs_address).to_dict(), "tune": tune}
        command = [sys.executable, "-m", "ray_app", "tune", "--config", json.dumps(fields)]
        _kill_driver(evidence, command, lambda: bool((r := read_record(paths)) and r.results), "study_killed")
        threading.Thread(target=_kill_slot, args=(evidence, paths), daemon=True).start()
        killed = run("killed")
        evidence.put("decided", is_equal=killed.decisions == undisturbed.decisions, end=killed.end)

    def confirm(run: ScenarioResult) -> list[str]:
        return unmet((run.evidence["decided"]["is_equal"], "the study has decided otherwise than the undisturbed one"))

    return Scenario([], ["study_killed", "slot_killed", "decided"], confirm, first_start=first_start)


def _kill_slot(evidence: Evidence, paths: StudyPaths) -> None:
    """Kills the process of a slot in which a trial has begun since now."""
    began_s = time.time()
    while not evidence.has("slot_killed") and not evidence.has("decided"):
        for trial_run in (run for trial in range(3) for run in paths.runs(trial, None)):
            fence = newest_fence(trial_run)
            lease = (read_json(trial_run.fence(fence)) if fence else None) or {"released": True}
            # A trial with several workers is driven by this process.
            if not lease["released"] and lease["since_s"] > began_s and lease["holder"]["pid"] != os.getpid():
                os.kill(LeaseHolder(**lease["holder"]).pid, signal.SIGKILL)
                evidence.put("slot_killed", trial=trial_run.name)
                return
        time.sleep(0.02)


def clock_jump(context: ScenarioContext) -> Scenario | str:
    """The wall clock of the rank that writes record and checkpoints is hours ahead, then hours behind, then right."""
    step, every = context.choose_step(), context.checkpoint_every + 1
    hours_s = _HOUR_S * context.random.randrange(2, 10)
    jumps = [(step, hours_s), (step + every, -hours_s), (step + 2 * every, 0)]
    hooks = tuple(
        ClockJump(context.evidence, f"clock-{i}", jump_step, 0, offset_s)
        for i, (jump_step, offset_s) in enumerate(jumps)
    )
    faults = Faults(train=Hooks(after_step=HookChain(hooks)))
    return Scenario([hook.step for hook in hooks], [hook.name for hook in hooks], confirm_clock_jumps, faults)


def confirm_clock_jumps(run: ScenarioResult) -> list[str]:
    """Confirms that each step was recorded by the clock after the last jump before it; returns what is missing."""
    records, _ = read_records(run.paths)
    jumps = sorted((p for name, p in run.evidence.items() if name.startswith("clock-")), key=lambda p: p["step"])
    missing = []
    for jump, last_step in zip(jumps, [jump["step"] for jump in jumps[1:]] + [max(records)], strict=True):
        shifted_s = jump["time_s"] + jump["clock_s"]
        errors_s = [records[n].time_s - shifted_s for n in range(jump["step"] + 1, last_step + 1)]
        if not errors_s or max(map(abs, errors_s)) > _TOLERANCE_S:
            missing.append(f"steps after {jump['step']} were not recorded by a clock that is {jump['clock_s']} s wrong")
    return missing + unmet((run.paths.report.exists(), "the run has no report"))


@dataclass(frozen=True)
class ClockJump:
    """Shifts the wall clock of a rank after a step, by an offset to the right clock; a hook for `Hooks.after_step`.

    The evidence has the time of the right clock.
    """

    evidence: Evidence
    name: str
    step: int
    rank: int
    offset_s: int

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if step == self.step and rank == self.rank and not self.evidence.has(self.name):
            shift_clock(0)
            self.evidence.put(self.name, rank=rank, step=step, clock_s=self.offset_s)
            shift_clock(self.offset_s)


_right_time, _right_time_ns = time.time, time.time_ns


def shift_clock(offset_s: int) -> None:
    """Shifts the wall clock of this process's Python code by an offset to the right clock; other clocks stay right."""
    vars(time).update(time=lambda: _right_time() + offset_s, time_ns=lambda: _right_time_ns() + offset_s * 10**9)
