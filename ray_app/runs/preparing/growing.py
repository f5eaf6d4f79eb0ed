"""A run that exists may be told to go on for longer: with more `train.epochs` or `train.max_steps` than at its last start."""

from __future__ import annotations

from ray_app.config.config import Config, refuse_other_config, result_fields
from ray_app.errors import RunExistsError
from ray_app.plan.order import Plan
from ray_app.train.state.schedules import counts_total_steps


def refuse_other_run(name: str, before: Config, stored_digest: str, config: Config, plan: Plan) -> None:
    """Refuses to continue a run with other values that decide the result, but for a later end that leaves what is done as it is.

    A run that has grown has the bits of one that was as long from the beginning.

    Args:
        name: The run's name.
        before: The configuration of its last start.
        stored_digest: Digest of the manifest of its data.
        config: What is asked for now.
        plan: The order of the data that is there now.

    Raises:
        RunExistsError: It would be another run.
    """
    longer = before.replace(train__epochs=config.train.epochs, train__max_steps=config.train.max_steps)
    refuse_other_config(name, result_fields(longer, stored_digest), result_fields(config, plan.manifest.digest))
    ended, ends = (each.train.total_steps(plan.steps_per_epoch) for each in (before, config))
    if ends != ended and (reason := _why_not(config, ended, ends, plan)):
        raise RunExistsError(
            f"The run {name!r} exists with train.epochs {before.train.epochs} and train.max_steps {before.train.max_steps}, {ended} steps;"
            f" asked for now are {config.train.epochs} and {config.train.max_steps}, {ends} steps. {reason} Nothing was changed. Give"
            " another run.name for a new run."
        )


def _why_not(config: Config, ended: int, ends: int, plan: Plan) -> str | None:
    """Why a run that was to end after some steps cannot end after others; None where it can."""
    train, cadence = config.train, config.checkpoint
    if ends < ended:
        return "A run can become longer, not shorter."
    if config.schedule is not None and counts_total_steps(config.schedule):
        return (
            f"Its schedule {config.schedule.class_path} spreads over all steps of a run, so a longer one has had other learning rates from"
            " the beginning. Schedules whose arguments say all, such as CosineAnnealingLR with T_max, StepLR and LambdaLR, let a run grow."
        )
    if ended % train.local_steps:
        return f"Its logical workers averaged at its end, in the middle of a round of train.local_steps = {train.local_steps}."
    planned = (cadence.every_steps, cadence.every_epochs and cadence.every_epochs * (train.steps_per_epoch or plan.steps_per_epoch))
    if config.evaluate.patience is not None and not any(every and ended % every == 0 for every in planned):
        return (
            "The checkpoint of its end counts for evaluate.patience, but in a longer run checkpoint.every_steps and every_epochs plan none"
            " there."
        )
    return None
