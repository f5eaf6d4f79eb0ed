"""Scenarios in which processes of a run die or stand still."""

from __future__ import annotations

from collections.abc import Callable

from ray_app.drill.faults import Freeze, Kill, KillAt, KillOnCommit, Several
from ray_app.drill.ground import Disturbance, Ended, Ground, is_gone
from ray_app.record.evaluations import read_evaluations
from ray_app.runs.faults import Faults
from ray_app.train.hooks import Hooks


def _died(names: list[str]) -> Callable[[Ended], list[str]]:
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
    return Disturbance([step], names, _died(names), Faults(train=Hooks(after_step=after, at=hooks.at)))


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
    return Disturbance([first, last], ["killed-0", "killed-1"], _died(["killed-0", "killed-1"]), Faults(train=hooks))


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


def kill_saving(ground: Ground) -> Disturbance | str:
    """The worker that writes a checkpoint is killed before it has committed it."""
    step = ground.checkpoint()
    hooks = Hooks(ground.pace(step + 1), KillOnCommit(ground.proofs, "killed-0", step))

    def confirm(run: Ended) -> list[str]:
        written = any(e.details["step"] == step for e in run.events("checkpointed"))
        return _died(["killed-0"])(run) + ([] if written else [f"the checkpoint of step {step} was never written"])

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
