"""The command `ray-app evaluate`: evaluates the checkpoints of a run that trains, has ended or has failed, from another
job.
"""

from __future__ import annotations

import logging
import shlex
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray
from rich.console import Console

from ray_app.checkpoint.store import CheckpointStore
from ray_app.cli.main import exit_code
from ray_app.cluster.ray_private import nodes_with_labels
from ray_app.cluster.resources import cluster
from ray_app.config.checks import check_config
from ray_app.config.config import Config
from ray_app.config.sections import ClassSpec, EvaluateSection
from ray_app.driver.finalize import newest_start, report_end
from ray_app.driver.parsing import Parser, add_current_folder_to_path
from ray_app.driver.trained_run import open_training_data, send_to_mlflow
from ray_app.errors import ConfigError, DataError, EvaluationError, RayAppError
from ray_app.evaluate.evaluator import start_evaluator
from ray_app.evaluate.job import EvaluationJob, pending_commits
from ray_app.preflight.prepare import check_evaluation_data, make_task, open_evaluation_source
from ray_app.runlog.evaluations import Evaluation, read_evaluations
from ray_app.runlog.lease import is_held, newest_fence
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.runlog.stored_config import read_config
from ray_app.storage.files import poll_interval_s, to_location
from ray_app.task.base import Task
from ray_app.task.schema import prepare_task

logger = logging.getLogger(__name__)

_PATIENCE_S = 10.0
_NAME_CHARS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"


@dataclass(frozen=True)
class EvaluateOptions:
    """What the command evaluates.

    Args:
        run: Directory of the run, or its s3:// URI.
        name: Of this evaluator: its evaluations stand beside the run's own, and its metrics in MLflow are called
            `eval_<name>_<metric>`. Not given: it does the work of the run's own evaluator.
        data: Folder (or file) of Parquet to evaluate on; needs a name. Not given: the run's `data.eval_path`.
        follow: Goes on until the run has ended; otherwise it ends with what is committed now.
        every: See `evaluate.every`; not given: as the run has it.
        batch_size: Rows of one forward pass; not given: as the run has it.
        num_cpus: Logical CPUs to reserve; not given: as the run has it.
        num_gpus: GPUs to reserve; not given: as the run has it.
        threads: CPU threads of the computation; not given: as the run has it.
        ray_address: Ray cluster to join; not given: see `run.ray_address`.
    """

    run: str
    name: str | None = None
    data: str | None = None
    follow: bool = False
    every: Literal["checkpoint", "latest"] | None = None
    batch_size: int | None = None
    num_cpus: float | None = None
    num_gpus: float | None = None
    threads: int | None = None
    ray_address: str | None = None


def evaluate_run(options: EvaluateOptions, task: ClassSpec | None, console: Console) -> list[Evaluation]:
    """Evaluates what is committed, and with `follow` what comes; returns the evaluations of this evaluator by step.

    What was evaluated before is not evaluated again. A driver that lives sends the evaluations to MLflow; after its end
    this does.

    Args:
        options: See there.
        task: Another task than the run's, for other metrics; its model must take the same parameters.
        console: Where progress is shown.

    Raises:
        ConfigError: There is no such run, or the options do not fit.
        DataError: The data does not fit.
        EvaluationError: The evaluator gave up.
    """
    paths = RunPaths(to_location(options.run))
    newest_start(paths)
    config = _config(paths, options, task)
    job = _job(paths, config, options)
    with cluster(config):
        _refuse_if_it_never_fits(job.section)
        evaluator = start_evaluator(job)
        try:
            _follow(job, evaluator, options.follow, console)
        finally:
            ray.kill(evaluator, no_restart=True)
            CheckpointStore(paths).release(job.follower)
    if not is_held(paths):
        _tell(paths, config)
    return read_evaluations(paths, options.name)


def _config(paths: RunPaths, options: EvaluateOptions, task: ClassSpec | None) -> Config:
    """The run's configuration with what is asked for here."""
    config = read_config(paths)
    if options.name is not None and (not options.name or set(options.name) - set(_NAME_CHARS)):
        raise ConfigError(f"--name is {options.name!r}; use letters, digits, '_' and '-'.")
    if (options.data is not None or task is not None) and options.name is None:
        raise ConfigError(
            "--data and --task make other evaluations than the run's own; give them a --name, such as --name fresh."
        )
    if options.data is None and config.data.eval_path is None:
        raise ConfigError(
            f"The run {paths.name!r} has no data.eval_path; say with --data and --name what to evaluate on."
        )
    given = {name: getattr(options, name) for name in ("every", "batch_size", "num_cpus", "num_gpus", "threads")}
    section = replace(config.evaluate, **{name: value for name, value in given.items() if value is not None})
    config = replace(config, evaluate=section, task=task or config.task)
    if options.data is not None:
        config = config.replace(data__eval_path=options.data)
    check_config(
        config if options.name is None else config.replace(evaluate__patience=None)
    )  # only the run's own evaluations stop it
    return config.replace(
        run__ray_address=options.ray_address or config.run.ray_address, scaling__max_workers=1, scaling__min_workers=1
    )


def _job(paths: RunPaths, config: Config, options: EvaluateOptions) -> EvaluationJob:
    ready = prepare_task(make_task(config), open_training_data(paths, config).facts)
    data = open_evaluation_source(ready, str(config.data.eval_path), config.data.read_task_mb)
    if options.name is None:
        check_evaluation_data(paths, config, data.manifest.digest)
    exact = config.train.reduction == "exact"
    return EvaluationJob(config.evaluate, ready, str(paths.root), newest_fence(paths), data, options.name, True, exact)


def _follow(job: EvaluationJob, evaluator: Any, follow: bool, console: Console) -> None:
    """Shows each evaluation as it comes, until none will come any more."""
    shown: set[int] = {e.step for e in read_evaluations(job.paths, job.name)}
    asked, waits = evaluator.error.remote(), False
    while True:
        is_last_look = not (follow and is_held(job.paths)) and not pending_commits(job)
        for found in read_evaluations(job.paths, job.name):
            if found.step not in shown:
                shown.add(found.step)
                values = ", ".join(f"{name} {value:.4f}" for name, value in found.metrics.items())
                console.print(
                    f"step {found.step}: {values}  ({found.duration_s:.1f} s, {found.behind} waiting)", highlight=False
                )
        if is_last_look:
            return
        if ray.wait([asked], timeout=_PATIENCE_S)[0]:
            try:
                gave_up = ray.get(asked)
            except ray.exceptions.RayActorError as error:
                gave_up = str(error)
            if gave_up is not None:
                kind = DataError if isinstance(gave_up, DataError) else EvaluationError
                raise kind(f"The evaluator gave up: {gave_up}")
            asked = evaluator.error.remote()
        elif not waits:
            console.print("The evaluator waits for room in the cluster ...")
            waits = True
        time.sleep(poll_interval_s(job.paths.root))


def _refuse_if_it_never_fits(section: EvaluateSection) -> None:
    nodes = [
        node["Resources"] for node in nodes_with_labels(ray.nodes(), section.label_selector, "evaluate.label_selector")
    ]
    if not any(node.get("CPU", 0.0) >= section.num_cpus and node.get("GPU", 0.0) >= section.num_gpus for node in nodes):
        labels = f", labelled {section.label_selector}," if section.label_selector else ""
        raise ConfigError(
            f"The evaluator reserves {section.num_cpus:g} CPU and {section.num_gpus:g} GPU, which no node{labels} has."
            f" Give less with"
            " --num_cpus and --num_gpus (0: it computes on the CPU), or add a node."
        )


def _tell(paths: RunPaths, config: Config) -> None:
    """Brings what others read of a run that has ended up to date."""
    if config.tracking.enabled:
        try:
            send_to_mlflow(str(paths.root))
        except (RayAppError, OSError) as error:
            command = shlex.join(["ray-app", "track", "--replay", str(paths.root)])
            logger.warning("MLflow was not told, %s does it later: %s", command, redact(str(error)))
    report_end(paths)


def main(arguments: list[str] | None = None, prog: str = "ray-app evaluate") -> int:
    """Parses the command line and evaluates.

    Returns:
        Exit code: see `exit_code`; starting it again goes on.
    """
    add_current_folder_to_path()
    parser = Parser(
        prog=prog, description="Evaluates the checkpoints of a run, also while it trains.", allow_abbrev=False
    )
    parser.add_class_arguments(EvaluateOptions, None, skip={"follow"})
    parser.add_argument(
        "--follow",
        action="store_true",
        help="Goes on until the run has ended, rather than ending with what is committed.",
    )
    parser.add_subclass_arguments(
        Task,
        "task",
        instantiate=False,
        required=False,
        help="Another task, for other metrics: class_path and init_args; needs a name.",
    )
    values = parser.parse_args(arguments).as_dict()
    spec = values.pop("task", None)
    options = EvaluateOptions(**values)
    task = ClassSpec(spec["class_path"], spec.get("init_args") or {}) if spec else None
    console = Console()

    def work() -> None:
        found = evaluate_run(options, task, console)
        console.print(f"{len(found)} checkpoints of {options.run} are evaluated.", highlight=False)

    return exit_code(work, "The evaluation failed")
