"""Scenarios in which processes of a run die or stand still."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

import ray

from ray_app.drill.delays import Freeze, Hold, RefusedCommit, Slow, SlowCommit
from ray_app.drill.faults import Kill, KillAt, KillNewcomer, KillOnCommit, Several
from ray_app.drill.ground import Disturbance, Ended, Ground, is_gone
from ray_app.record.evaluations import read_evaluations
from ray_app.runs.faults import Faults
from ray_app.train.hooks import Hooks
from ray_app.train.job import Job

_BACK_S = 60.0


def died(names: list[str]) -> Callable[[Ended], list[str]]:
    """Confirms that the processes of these proofs have ended, and that the run has recorded a failure."""

    def confirm(run: Ended) -> list[str]:
        missing = [f"the process of {name} still lives" for name in names if is_gone(run.proofs[name]) is False]
        return missing if run.events("failed") else [*missing, "the run has no record of a failure"]

    return confirm


def _killed(ground: Ground, step: int, ranks: list[int], how: Callable[[Kill], Hooks] | None = None) -> Disturbance:
    names = [f"killed-{i}" for i in range(len(ranks))]
    kill = Kill(ground.proofs, names, step, ranks)
    pace = ground.pace(step + 1)
    hooks = how(kill) if how else Hooks(after_step=kill)
    after = Several((hooks.after_step, pace)) if hooks.after_step else pace
    return Disturbance([step], names, died(names), Faults(train=Hooks(after_step=after, at=hooks.at)))


def kill(ground: Ground) -> Disturbance | str:
    """One worker is killed."""
    return _killed(ground, ground.step(), [ground.rank()])


def kill_twice(ground: Ground) -> Disturbance | str:
    """A worker is killed, and after another one has joined, one more in the same epoch."""
    low, high = int(0.2 * ground.total_steps), int(0.8 * ground.total_steps)
    starts = range(0, ground.total_steps, ground.steps_per_epoch)
    first, last = max(((max(low, s) + 1, min(high, s + ground.steps_per_epoch) - 1) for s in starts), key=lambda span: span[1] - span[0])
    if last - first < 3:
        return f"an epoch of {ground.steps_per_epoch} steps is too short to kill twice in it"
    one, other = Kill(ground.proofs, ["killed-0"], first, [ground.rank()]), Kill(ground.proofs, ["killed-1"], last, [0])
    paces = ground.pace(first + 1, last - 1), ground.pace(last + 1)
    hooks = Hooks(after_step=Several((one, other, *paces)))
    return Disturbance([first, last], ["killed-0", "killed-1"], died(["killed-0", "killed-1"]), Faults(train=hooks))


def kill_two(ground: Ground) -> Disturbance | str:
    """Two workers are killed at once."""
    if ground.workers < 3:
        return f"it needs 3 workers so that one goes on, there are {ground.workers}"
    return _killed(ground, ground.step(), ground.random.sample(range(ground.workers), 2))


def kill_all(ground: Ground) -> Disturbance | str:
    """All workers are killed at once."""
    return _killed(ground, ground.step(), list(range(ground.workers)))


def kill_exchange(ground: Ground) -> Disturbance | str:
    """A worker is killed as it begins to exchange gradients."""
    if ground.workers < 2:
        return "one worker exchanges nothing"
    return _killed(ground, ground.step(), [ground.rank()], lambda kill: Hooks(at=KillAt("exchange", kill)))


def kill_forming(ground: Ground) -> Disturbance | str:
    """A worker is killed, and another one as the rest form without it."""
    if ground.workers < 3:
        return f"it needs 3 workers so that one goes on, there are {ground.workers}"
    step, (first, second) = ground.step(), ground.random.sample(range(ground.workers), 2)
    one, other = Kill(ground.proofs, ["killed-0"], step, [first]), Kill(ground.proofs, ["killed-1"], step, [second])
    hooks = Hooks(after_step=Several((one, ground.pace(step + 1))), at=KillAt("forming", other))
    return Disturbance([step], ["killed-0", "killed-1"], died(["killed-0", "killed-1"]), Faults(train=hooks))


def kill_joining(ground: Ground) -> Disturbance | str:
    """So many workers are killed that others come for them, and the first of these is killed as it joins."""
    step, victims = ground.step(), ground.workers - ground.enough.start + 1
    names = [f"killed-{i}" for i in range(victims)]
    kill = Kill(ground.proofs, names, step, ground.random.sample(range(ground.workers), victims))
    newcomer = KillNewcomer(ground.proofs, "newcomer", names[0])
    hooks = Hooks(after_step=Several((kill, ground.pace(step + 1))), at=newcomer)
    return Disturbance([step], [*names, "newcomer"], died([*names, "newcomer"]), Faults(train=hooks))


def kill_phases(ground: Ground) -> Disturbance | str:
    """Rank 0 is killed three times: as it asks for data, as it computes, and as it exchanges gradients."""
    phases = ("data", "compute", "exchange" if ground.workers > 1 else "compute")
    steps = [int(part * ground.total_steps) for part in (0.25, 0.45, 0.65)]
    names = [f"killed-{i}" for i in range(len(phases))]
    kills = zip(phases, names, steps, strict=True)
    at = Several(tuple(KillAt(phase, Kill(ground.proofs, [name], step, [0])) for phase, name, step in kills))
    paces = [ground.pace(step + 1, until) for step, until in zip(steps, [step - 1 for step in steps[1:]] + [None], strict=True)]
    return Disturbance(steps, names, died(names), Faults(train=Hooks(after_step=Several(tuple(paces)), at=at)))


def kill_saving(ground: Ground) -> Disturbance | str:
    """The worker that writes a checkpoint is killed before it has committed it."""
    step = ground.checkpoint()
    hooks = Hooks(ground.pace(step + 1), KillOnCommit(ground.proofs, "killed-0", step))

    def confirm(run: Ended) -> list[str]:
        written = any(e.details["step"] == step for e in run.events("checkpointed"))
        return died(["killed-0"])(run) + ([] if written else [f"the checkpoint of step {step} was never written"])

    return Disturbance([step], ["killed-0"], confirm, Faults(train=hooks))


def evaluator(ground: Ground) -> Disturbance | str:
    """The evaluator is killed while it evaluates."""
    if ground.config.data.eval_path is None:
        return "there is no evaluator without data.eval_path"
    if ground.config.evaluate.where == "workers":
        return "there is no evaluator with evaluate.where workers"
    step = ground.checkpoint()

    def confirm(run: Ended) -> list[str]:
        missing = ["the evaluator's process still lives"] if is_gone(run.proofs["killed-0"]) is False else []
        again = any(e.step >= step for e in read_evaluations(run.paths))
        return missing if again else [*missing, "nothing was evaluated after it"]

    kill = KillOnCommit(ground.proofs, "killed-0", step)
    return Disturbance([step], ["killed-0"], confirm, Faults(before_evaluation=kill))


def freeze(ground: Ground) -> Disturbance | str:
    """A worker stands still (SIGSTOP) for longer than failure.heartbeat_timeout_s, then wants to go on."""
    step, seconds = ground.step(), ground.config.failure.heartbeat_timeout_s + 4.0
    hook = Freeze(ground.proofs, "frozen", step, ground.rank(), seconds)
    pace = ground.pace(step + 1, least_s=seconds)

    def confirm(run: Ended) -> list[str]:
        silent = any("no sign of life" in str(e.details["errors"]) for e in run.events("failed"))
        return [] if silent else ["the run has no record of a worker that was silent"]

    return Disturbance([step], ["frozen"], confirm, Faults(train=Hooks(after_step=Several((hook, pace)))))


def slow(ground: Ground) -> Disturbance | str:
    """A worker takes three times as long as the others for a third of the steps."""
    step = ground.step()
    last = min(step + ground.total_steps // 3, ground.total_steps - 1)
    hook = Slow(ground.proofs, "slow", step, last, ground.rank(), 3.0)

    def confirm(run: Ended) -> list[str]:
        blamed = [str(e.details["errors"]) for e in run.events("failed")]
        wasted = [] if run.proofs["slow"]["seconds"] > 0 else ["no time was wasted"]
        return [*wasted, *(f"a slow worker was taken for a lost one: {said}" for said in blamed)]

    return Disturbance([step], ["slow"], confirm, Faults(train=Hooks(after_step=hook)))


def storage_away(ground: Ground) -> Disturbance | str:
    """The storage refuses a checkpoint for five seconds."""
    return _refused(ground, 5.0, errno.EIO, "write_retried")


def full_disk(ground: Ground) -> Disturbance | str:
    """The disk is full until a checkpoint is given up."""
    return _refused(ground, None, errno.ENOSPC, "write_failed")


def _refused(ground: Ground, seconds: float | None, number: int, kind: str) -> Disturbance:
    step = ground.checkpoint()
    hooks = Hooks(before_commit=RefusedCommit(ground.proofs, "refused", step, seconds, number))

    def confirm(run: Ended) -> list[str]:
        at = run.proofs["refused"]["step"]
        told = [e for e in run.events(kind) if e.details["step"] == at]
        written = {e.details["step"] for e in run.events("checkpointed")}
        missing = [] if told else [f"there is no event {kind} of step {at}"]
        if (at in written) != (seconds is not None):
            missing.append(f"the checkpoint of step {at} was {'' if at in written else 'not '}written")
        return missing if max(written) > at else [*missing, f"no checkpoint after that of step {at}"]

    return Disturbance([step], ["refused"], confirm, Faults(train=hooks))


def slow_storage(ground: Ground) -> Disturbance | str:
    """A checkpoint takes five seconds to be written."""
    step, seconds = ground.checkpoint(), 5.0
    hooks = Hooks(before_commit=SlowCommit(ground.proofs, "slow", step, seconds))

    def confirm(run: Ended) -> list[str]:
        took = [e.details["duration_s"] for e in run.events("checkpointed") if e.details["step"] == run.proofs["slow"]["step"]]
        return [] if took and took[0] >= seconds else [f"no checkpoint took {seconds:g} s"]

    return Disturbance([step], ["slow"], confirm, Faults(train=hooks))


def rendezvous(ground: Ground) -> Disturbance | str:
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
            while after == before and time.monotonic() < deadline_s:  # Ray does not wait until it is dead: it may still answer
                after, _ = ray.get(actor.lifeline.remote())
            ground.proofs.put("rendezvous_killed", step=step, before=before, after=after)

    def confirm(run: Ended) -> list[str]:
        killed = run.proofs["rendezvous_killed"]
        same = ["the rendezvous listens where it did before"] if killed["before"] == killed["after"] else []
        return same + died(["killed-0"])(run)

    hooks = Hooks(after_step=Several((hold, kill, ground.pace(step + 2))))
    names, held = ["held", "rendezvous_killed", "killed-0"], {"held": "rendezvous_killed"}
    return Disturbance([step], names, confirm, Faults(train=hooks), observe, held)
