"""Checks that compare short trainings and other calls of the task in a sandbox; only `ray-app check` makes them."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from ray_app.preflight.context import Outcome, PreflightContext
from ray_app.preflight.sandbox import Sandbox
from ray_app.preflight.short_trainings import MIDDLE, STEPS, WORKERS, ShortTrainings, TrainingResult, make_short_job


def try_repetitions(context: PreflightContext) -> Outcome:
    """Starts the sandbox, and looks for random numbers that come neither from torch's generators nor from the keys."""
    # The model of the dry run would take the memory of one more process.
    context.close()
    del context.row_probe
    enter = context.exit_stack.enter_context
    folder = Path(enter(tempfile.TemporaryDirectory(prefix="ray_app-check-")))
    job = make_short_job(replace(context.job, evaluation=context.eval_source), context.initial.params, folder)
    context.short_trainings = ShortTrainings(job, enter(closing(Sandbox(folder / "processes"))))
    result = context.short_trainings.first.impurities
    if result.error is not None or result.value:
        text = str(result.error) if result.error is not None else "\n".join(result.value)
        return Outcome(text, "failed", seconds=result.seconds)
    return Outcome(seconds=result.seconds)


def compare_repetition(context: PreflightContext) -> Outcome:
    """Compares a training on one worker with its repetition."""
    _, _, one, repeated = context.short_trainings.first
    text = ""
    if one.error is not None:
        text = f"{STEPS} steps on one worker: {one.error}"
    elif repeated.error is not None:
        text = f"{STEPS} steps on one worker, twice: {repeated.error}"
    elif repeated.params != one.params:
        text = (
            f"{STEPS} steps on one worker, twice, give other parameters each time. See docs/own-task.md on where"
            " randomness must come from."
        )
    return Outcome(text, "failed" if text else "ok", seconds=max(one.seconds, repeated.seconds))


def is_repeatable(context: PreflightContext) -> bool:
    """Returns whether a training and its repetition agree; if not, no other comparison says anything."""
    _, _, one, repeated = context.short_trainings.first
    return one.error is None and repeated.error is None and one.params == repeated.params


def has_comparable_scores(context: PreflightContext) -> bool:
    """Returns whether trainings on one worker and on several agree, or there are no metrics to compare."""
    if not is_repeatable(context):
        return False
    one, (together, _) = context.short_trainings.first.one, context.short_trainings.later
    return not one.scores or (together.error is None and together.params == one.params)


def compare_workers(context: PreflightContext) -> Outcome:
    """Compares a training on one worker with one on several."""
    advice = (
        "A worker has only its own rows: nothing may be kept from one batch for the next but in the model's parameters"
        " and buffers."
    )
    together, _ = context.short_trainings.later
    return _compare_params(context, f"{STEPS} steps on one worker and on {WORKERS}", together, advice)


def compare_resume(context: PreflightContext) -> Outcome:
    """Compares a training with one that was resumed in the middle."""
    advice = (
        "A worker that resumes has the checkpoint alone: what a task or a model keeps elsewhere than in parameters and"
        " buffers is gone."
    )
    description = f"{STEPS} steps, and the same from step {MIDDLE} on after a resume on 2 workers"
    return _compare_params(context, description, context.short_trainings.later[1], advice)


def _compare_params(context: PreflightContext, description: str, other: TrainingResult, advice: str) -> Outcome:
    """Compares the final parameters of a training on one worker with those of another training."""
    one, text = context.short_trainings.first.one, ""
    if other.error is not None:
        text = f"{description}: {other.error}"
    elif other.params != one.params:
        text = f"{description}: other parameters ({one.params[:12]}, {other.params[:12]}). {advice}"
    return Outcome(text, "failed" if text else "ok", seconds=other.seconds)


def compare_scores(context: PreflightContext) -> Outcome:
    """Compares the metrics by one worker with those by several."""
    one, (together, _) = context.short_trainings.first.one, context.short_trainings.later
    if not one.scores:
        return Outcome("There is none: data.eval_path is not set.", "warning")
    if one.scores == together.scores:
        return Outcome(f"The same metrics from one worker and from {WORKERS}: {one.scores[-1][1]}.")
    return Outcome(
        f"One worker finds {one.scores[-1][1]}, {WORKERS} find {together.scores[-1][1]}. The metrics' states must be"
        " sums, minima, maxima or lists, and must not depend on the process that updates them, or on the order.",
        "failed",
    )


def try_export(context: PreflightContext) -> Outcome:
    """Reports whether the model can be exported, and predicts the same."""
    result = context.short_trainings.first.export
    if result.error is not None:
        text = f"{result.error}\nA run trains all the same; ray-app export and register would refuse its model."
        return Outcome(text, "failed", seconds=result.seconds)
    export_format, refused = result.value
    if refused:
        text = f"as {export_format} with the task's code; not as a program of its own ({'; '.join(refused)})."
        return Outcome(text, "warning", seconds=result.seconds)
    return Outcome(f"as {export_format}, which predicts the same.", seconds=result.seconds)
