"""The checks before a run: `CHECKS` is the list of all of them, in the order in which they run.

The start of a run (`prepare`) makes those with `at_start` and ends with the error of the first that refuses it.
`ray-app check` (`check_task`) makes all of them and reports each with its duration.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import psutil

from ray_app.preflight import comparisons, dry_run, gradient_checks, metric_checks, rare_rows, start_checks
from ray_app.preflight.context import Outcome, PreflightContext
from ray_app.preflight.model_checks import check_shardable
from ray_app.preflight.short_trainings import MIDDLE, STEPS, WORKERS
from ray_app.task.module import ModuleTask
from ray_app.task.user_loop import LoopTask
from ray_app.task.whole_batches import BatchTask
from ray_app.train.checkpointing.snapshots import check_snapshot_memory


@dataclass(frozen=True)
class Check:
    """A check before a run.

    Args:
        name: The subject, in a word or two.
        cost_s: The seconds that it roughly adds, for a small model and a few files; 0 if they are not noticed, or if it
            runs concurrently with a check before it.
        message: What is true if nothing is wrong, as a sentence.
        run: Makes the check, and sets what checks after it use. It returns warnings, an outcome, or nothing; an error
            that it raises refuses the run.
        needs: Names of the checks before this one that set what it uses.
        applies: Returns whether there is anything to check.
        calls_task: Whether `run` calls the task, for which it needs `PreflightContext.dry_run`.
        at_start: Whether the start of a run makes the check, too; otherwise only `ray-app check` does, if a run would
            start.
    """

    name: str
    cost_s: float
    message: str
    run: Callable[[PreflightContext], Outcome | list[str] | None]
    needs: tuple[str, ...] = ()
    applies: Callable[[PreflightContext], bool] = lambda context: True
    calls_task: bool = False
    at_start: bool = True

    def execute(self, context: PreflightContext) -> Outcome | None:
        """Makes the check and returns its outcome, or None if it does not apply.

        Raises:
            ConfigError: The configuration or the task is refused.
            DataError: The data is refused.
        """
        if not self.applies(context):
            return None
        with context.dry_run() if self.calls_task else nullcontext():
            result = self.run(context)
        return result if isinstance(result, Outcome) else Outcome(warnings=result or ())


# fmt: off
CHECKS = (
    # The configuration, the data, and the run if it exists.
    Check("configuration", 0.01, "Its values go together.", start_checks.complete_config),
    Check("initial parameters", 0.1, "They can be read.", start_checks.read_initial_parameters, ("configuration",),
          applies=lambda context: context.config.train.init_from is not None),
    Check("data", 0.1, "It can be read.", start_checks.open_training_data, ("configuration",)),
    Check("task", 0.01, "It fits the data and the configuration.", start_checks.fit_task, ("data",)),
    Check("plan", 0.01, "An epoch has at least one step.", start_checks.plan_rows, ("data",)),
    Check("stored run", 0.1, "What decides its result is the same.", start_checks.check_stored_run, ("task", "plan"),
          applies=lambda context: context.before is not None),
    Check("code", 0.1, "It can be read.", start_checks.read_code, ("task",)),
    Check("rows", 0.01, "The first ones can be decoded.", start_checks.decode_rows, ("task", "plan")),
    Check("cache", 0, "It can hold the decoded rows.", start_checks.check_cache, ("task",),
          applies=lambda context: context.config.data.cache != "none"),
    Check("row lengths", 0, "They are those of a decoded field.", start_checks.check_length_field, ("rows",),
          applies=lambda context: context.config.data.by_length is not None),
    Check("decoding", 0.01, "Rows to train on are like those to evaluate on.",
          rare_rows.check_training_decode, ("rows",), applies=lambda context: context.task.has_epoch_decode),
    Check("rounds", 0, "Each of them ends in the epoch in which it begins.", start_checks.check_rounds, ("rows",),
          applies=lambda context: context.job.steps_per_round > 1),
    Check("evaluation data", 0.01, "It is like the data to train on.", start_checks.open_evaluation_data, ("rows",),
          applies=lambda context: context.config.data.eval_path is not None),

    # The dry run: the model on a few rows, and what trains it.
    Check("model", 0.1, "It can be made, with optimizer and schedule.", dry_run.make_state, ("rows",),
          calls_task=True),
    Check("one row", 2, "It went through training and evaluation.", dry_run.try_first_row, ("model",),
          calls_task=True),
    Check("normalization", 0, "It is that of several values.", gradient_checks.check_normalization, ("one row",)),
    Check("value ranges", 0.1, "The model has classes and embeddings for them.",
          rare_rows.try_value_ranges, ("one row",),
          applies=lambda context: isinstance(context.task, ModuleTask) and not isinstance(context.task, LoopTask),
          calls_task=True),
    Check("targets", 0, "The loss takes those of the first rows to evaluate on.", dry_run.check_eval_targets,
          ("one row", "evaluation data"), calls_task=True,
          applies=lambda context: isinstance(context.task, ModuleTask) and context.eval_rows is not None),
    Check("rare rows", 0.1, "The longest ones can be trained and evaluated on.", rare_rows.try_rare_rows,
          ("one row", "evaluation data"), calls_task=True),
    Check("metrics", 0.2, "They do not depend on how the rows are divided into batches.", metric_checks.try_metrics,
          ("one row", "evaluation data"), calls_task=True,
          applies=lambda context: context.config.data.eval_path is not None),
    Check("gradients", 0.1, "Those of logical workers add up to those of a batch.", gradient_checks.try_gradients,
          ("one row",), calls_task=True,
          applies=lambda context: bool(context.unused_parameters) or isinstance(context.task, BatchTask)),
    Check("optimizer", 0.01, "It makes steps, and a checkpoint holds its state.", dry_run.try_optimizers, ("model",)),
    Check("snapshots", 0, "They fit into the memory of this machine.",
          lambda context: check_snapshot_memory(context.model, psutil.virtual_memory().available), ("model",),
          applies=lambda context: context.config.checkpoint.snapshot_every_steps is not None),
    Check("page-locked memory", 0, "This machine has enough.", dry_run.check_page_locked_memory, ("model",),
          applies=lambda context: (
              context.config.scaling.gpus_per_worker > 0 and context.config.train.strategy != "parameter_server")),
    Check("parameter servers", 0, "They can have parts of the model.", dry_run.check_server_parts, ("model",),
          applies=lambda context: context.config.train.strategy == "parameter_server"),
    Check("parameter groups", 0, "They are configured.", dry_run.check_parameter_groups, ("model",),
          applies=lambda context: context.config.train.strategy in ("local_sgd", "parameter_server")),
    Check("shards", 0, "The model can be cut into them.", lambda context: check_shardable(context.model), ("model",),
          applies=lambda context: context.config.train.strategy == "fsdp"),
    Check("schedule", 0, "It lasts for all steps of the run.", dry_run.try_schedules, ("model",)),
    Check("data files", 0.01, "Their versions are known.", start_checks.read_data_files, ("evaluation data",)),

    # Trainings of a few steps in processes of their own, several at a time.
    Check("randomness", 7, "The same rows, keys and seeds of torch's give the same; nothing else is drawn from.",
          comparisons.try_repetitions, at_start=False),
    Check("training", 0, f"{STEPS} steps on one worker, twice: the same parameters, bit for bit.",
          comparisons.compare_repetition, at_start=False),
    Check("workers", 3, f"{STEPS} steps on one worker and on {WORKERS}: the same parameters, bit for bit.",
          comparisons.compare_workers, applies=comparisons.is_repeatable, at_start=False),
    Check("resume", 0, f"{STEPS} steps, and the same from step {MIDDLE} on after a resume on 2 workers: the same"
          " parameters, bit for bit.", comparisons.compare_resume, applies=comparisons.is_repeatable, at_start=False),
    Check("evaluation", 0, f"The same metrics from one worker and from {WORKERS}.", comparisons.compare_scores,
          applies=comparisons.has_comparable_scores, at_start=False),
    Check("export", 0, "The model can be exported.", comparisons.try_export, at_start=False),
    Check("GPU", 0, "It was not tried: a check computes on the CPU.", lambda context: Outcome(level="warning"),
          applies=lambda context: context.config.scaling.gpus_per_worker > 0, at_start=False),
)
# fmt: on
"""All checks before a run. One that needs what was refused is not made."""
