"""The command `ray-app evaluate`: evaluates the checkpoints of a running, finished or failed run, from another job."""

from __future__ import annotations

import logging
import shlex
import time
from dataclasses import dataclass, replace

import ray
from rich.console import Console

from ray_app.checkpoint.store import CheckpointStore
from ray_app.cli.main import exit_code
from ray_app.cluster.resources import check_evaluator_fits, cluster
from ray_app.config.checks import check_config
from ray_app.config.config import Config
from ray_app.config.sections import ClassSpec
from ray_app.driver.finalize import make_stored_task, newest_start, report_end
from ray_app.driver.parsing import Parser, add_current_folder_to_path
from ray_app.driver.trained_run import load_trained_task, send_to_mlflow
from ray_app.errors import ConfigError, DataError, EvaluationError, RayAppError
from ray_app.evaluate.evaluator import EvaluatorHandle, start_evaluator
from ray_app.evaluate.job import EvaluationJob, pending_commits
from ray_app.models.inputs import open_evaluation_rows
from ray_app.preflight.batch_checks import refuse_other_batches
from ray_app.preflight.inputs import check_evaluation_data
from ray_app.runlog.evaluations import Evaluation, read_evaluations
from ray_app.runlog.lease import is_held, newest_fence
from ray_app.runlog.output import TextConsole
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.runlog.stored_config import read_config
from ray_app.storage.files import poll_interval_s, to_location
from ray_app.task.base import Task

logger = logging.getLogger(__name__)

_PATIENCE_S = 10.0
_NAME_CHARS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"


@dataclass(frozen=True)
class EvaluateOptions:
    """What the command evaluates, and the resources of its evaluator.

    Args:
        run: Directory of the run, or its URI in a bucket.
        name: Name of this evaluator. Its evaluations are stored separately from the run's own, and its metrics in
            MLflow are called `eval_<name>_<metric>`. Default: the command does the work of the run's own evaluator.
        data: Folder (or file) of Parquet to evaluate on; this needs a name. Default: the run's `data.eval_path`.
        follow: Continues until the run has ended; otherwise the command ends after the committed checkpoints.
        workers: Number of actors that evaluate a checkpoint together. Default: the value of the run.
        batch_size: Rows of one forward pass. Default: the value of the run.
        max_rows: Largest number of rows to evaluate on; this needs a name. Default: the value of the run.
        num_cpus: Logical CPUs that each actor reserves, and threads to compute with. Default: the value of the run.
        num_gpus: GPUs that each actor reserves. Default: the value of the run.
        ray_address: Address of the Ray cluster to connect to. Default: see `run.ray_address`.
    """

    run: str
    name: str | None = None
    data: str | None = None
    follow: bool = False
    workers: int | None = None
    batch_size: int | None = None
    max_rows: int | None = None
    num_cpus: float | None = None
    num_gpus: float | None = None
    ray_address: str | None = None


def evaluate_run(options: EvaluateOptions, task: ClassSpec | None, console: Console) -> list[Evaluation]:
    """Evaluates the committed checkpoints, with `follow` also later ones; returns this evaluator's evaluations by step.

    Checkpoints that are already evaluated are not evaluated again. The driver of a running run sends the evaluations to
    MLflow; after its end this function does. The model of another `task`, for other metrics, must accept the same
    parameters.

    Raises:
        ConfigError: The run does not exist, or the options do not fit it.
        DataError: The data does not fit the task.
        EvaluationError: The evaluator gave up.
    """
    paths = RunPaths(to_location(options.run))
    newest_start(paths)
    config = config_of_evaluation(paths, options, task)
    trained = load_trained_task(paths, config, make_stored_task(paths, config))
    data = open_evaluation_rows(trained, config)
    if options.name is None:
        check_evaluation_data(paths, config, data.manifest.digest)
    job = EvaluationJob.of(config, trained, str(paths.root), newest_fence(paths), data, options.name, True)
    with cluster(config):
        check_evaluator_fits(config, ray.nodes())
        evaluator = start_evaluator(job)
        try:
            _follow(job, evaluator, options.follow, console)
        finally:
            evaluator.end()
            CheckpointStore(paths).remove_pin(job.evaluator_id)
    if not is_held(paths):
        _publish(paths, config)
    return read_evaluations(paths, options.name)


def config_of_evaluation(paths: RunPaths, options: EvaluateOptions, task: ClassSpec | None) -> Config:
    """Returns the run's configuration with the options of the command."""
    config = read_config(paths)
    if options.name is not None and (not options.name or set(options.name) - set(_NAME_CHARS)):
        raise ConfigError(f"--name is {options.name!r}; use letters, digits, '_' and '-'.")
    if (options.data, options.max_rows, task) != (None, None, None) and options.name is None:
        raise ConfigError(
            "--data, --max_rows and --task make evaluations other than the run's; set a --name, such as --name fresh."
        )
    if options.data is None and config.data.evaluation_path is None:
        raise ConfigError(
            f"The run {paths.name!r} has no data.eval_path; set --data and --name to evaluate on other data."
        )
    if options.name is None and options.batch_size is not None:
        refuse_other_batches(paths.name, config.evaluate, options.batch_size)
    names = ("workers", "batch_size", "max_rows", "num_cpus", "num_gpus")
    overrides = {name: value for name in names if (value := getattr(options, name)) is not None}
    # The command starts an evaluator, also for a run with `evaluate.where: workers`.
    section = replace(config.evaluate, **overrides, where="actor")
    config = replace(config, evaluate=section, task=task or config.task)
    if options.data is not None:
        config = config.replace(data__eval_path=options.data, data__fold=None)
    check_config(config)
    return config.replace(
        run__ray_address=options.ray_address or config.run.ray_address, scaling__max_workers=1, scaling__min_workers=1
    )


def _follow(job: EvaluationJob, evaluator: EvaluatorHandle, follow: bool, console: Console) -> None:
    """Shows each new evaluation until all checkpoints are evaluated and, with `follow`, the run has ended.

    Raises:
        DataError: The evaluator gave up because of the data.
        EvaluationError: The evaluator gave up for another reason.
    """
    shown_steps: set[int] = {e.step for e in read_evaluations(job.paths, job.name)}
    is_waiting = False
    while True:
        is_last_look = not (follow and is_held(job.paths)) and not pending_commits(job)
        for evaluation in read_evaluations(job.paths, job.name):
            if evaluation.step not in shown_steps:
                shown_steps.add(evaluation.step)
                values = ", ".join(f"{name} {value:.4f}" for name, value in evaluation.metrics.items())
                console.print(
                    f"step {evaluation.step}: {values}  ({evaluation.duration_s:.1f} s, {evaluation.behind} waiting)",
                    highlight=False,
                )
        if is_last_look:
            return
        try:
            failure = evaluator.failure(_PATIENCE_S)
        except TimeoutError:
            failure = None
            if not is_waiting:
                console.print("The evaluator waits for capacity in the cluster ...")
                is_waiting = True
        if failure is not None:
            kind = DataError if isinstance(failure, DataError) else EvaluationError
            raise kind(f"The evaluator gave up: {failure}")
        time.sleep(poll_interval_s(job.paths.root))


def _publish(paths: RunPaths, config: Config) -> None:
    """Updates MLflow and the report page of a run that has ended."""
    if config.tracking.enabled:
        try:
            send_to_mlflow(str(paths.root))
        except (RayAppError, OSError) as error:
            command = shlex.join(["ray-app", "track", "--replay", str(paths.root)])
            logger.warning("MLflow lacks the evaluations, %s sends them: %s", command, redact(str(error)))
    report_end(paths)


def main(arguments: list[str] | None = None, prog: str = "ray-app evaluate") -> int:
    """Runs `ray-app evaluate`; see `exit_code`. A second start continues with the remaining checkpoints."""
    add_current_folder_to_path()
    description = "Evaluates the checkpoints of a run, during or after training."
    parser = Parser(prog=prog, description=description, allow_abbrev=False)
    parser.add_class_arguments(EvaluateOptions, None, skip={"follow"})
    follow_help = "Continues until the run has ended, instead of ending after the committed checkpoints."
    parser.add_argument("--follow", action="store_true", help=follow_help)
    task_help = "Another task, for other metrics: class_path and init_args. This needs --name."
    parser.add_subclass_arguments(Task, "task", instantiate=False, required=False, help=task_help)
    values = parser.parse_args(arguments).as_dict()
    spec = values.pop("task", None)
    options = EvaluateOptions(**values)
    task = ClassSpec(spec["class_path"], spec.get("init_args") or {}) if spec else None
    console = TextConsole()

    def work() -> None:
        evaluations = evaluate_run(options, task, console)
        console.print(f"{len(evaluations)} checkpoints of {options.run} are evaluated.", highlight=False)

    return exit_code(work, "The evaluation failed")
