"""`check_task` and `ray-app check`: what a run would show much later, in seconds and without Ray."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ray_app.config.config import Config
from ray_app.data.read.first import first_rows
from ray_app.errors import BadRowError, ConfigError, TaskError
from ray_app.models.package_files import write_files
from ray_app.record.redact import redact
from ray_app.runs.preparing.prepare import Prepared, prepare
from ray_app.runs.trial.processes import EndedCall, Processes
from ray_app.runs.trial.purity import impurities
from ray_app.runs.trial.training import MIDDLE, STEPS, WORKERS, Trained, calls, from_the_middle, outcome, trial_job
from ray_app.train.job import Job
from ray_app.train.state.seeds import seed_init
from ray_app.watch.findings import Finding

_LIMIT_S = 300.0


@dataclass(frozen=True)
class TaskCheck:
    """What a check of a task found.

    Args:
        findings: Line by line; the level is `ok`, `failed` or `warning`.
    """

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(finding.level in ("ok", "warning") for finding in self.findings)

    def __str__(self) -> str:
        return "\n".join(f"{finding.level:<8} {finding.topic}: {redact(finding.text)}" for finding in self.findings)


def check_task(config: Config) -> TaskCheck:
    """Takes some rows of the data through everything that a run does with a task, on the CPU and without Ray: decoding, training by one
    worker and by four, a resume in the middle, evaluation, export; and looks for random numbers that do not come from torch or the keys.

    Nothing is left behind: the processes that do it, and their files, are gone at the end. A test of a project's can be
    `check = check_task(load_config("train.yaml")); assert check.ok, check`.

    Args:
        config: From `load_config`; where a run would be stored does not matter.

    Raises:
        ConfigError: The configuration is refused, as a run would refuse it.
        DataError: The data is refused, likewise.
    """
    try:
        prepared = prepare(config.replace(run__name=None, train__strategy=_tried(config)))
    except BadRowError as error:
        return TaskCheck((Finding("failed", "rows", f"{error}. Mend Task.decode, or the row."),))
    except ConfigError as error:
        if not isinstance(error.__cause__, TaskError):
            raise
        return TaskCheck((Finding("failed", "one row", str(error)),))
    with tempfile.TemporaryDirectory(prefix="ray_app-check-") as name:
        folder = Path(name)
        job = trial_job(prepared, folder)
        with closing(Processes(folder / "processes")) as processes:
            said = [Finding("ok", "data", line) for line in prepared.data] + [Finding("warning", "data", line) for line in prepared.doubts]
            done = Finding("ok", "one row", "went through training and evaluation.")
            return TaskCheck((*said, done, *_checks(prepared, job, processes)))


def _tried(config: Config) -> str:
    return "ddp" if config.train.strategy == "single" else config.train.strategy


def _checks(prepared: Prepared, job: Job, processes: Processes) -> Iterator[Finding]:
    """All checks; what needs nothing of others runs at the same time."""
    alone, again, together = (replace(job, run_root=f"{job.run_root}-{name}") for name in ("alone", "again", "together"))
    pure, exported, *ended = processes.run([(impurities, (job,)), (export, (job,)), *calls(alone, 1), *calls(again, 1)], _LIMIT_S)
    yield _randomness(pure)
    one, repeated = outcome(alone, ended[:1]), outcome(again, ended[1:])
    if one.error is not None:
        yield Finding("failed", "training", f"{STEPS} steps on one worker: {one.error}")
    else:
        resumed = from_the_middle(alone, "resumed")
        ended = processes.run([*calls(together, WORKERS), *calls(resumed, 2)], _LIMIT_S)
        yield from _trained(one, repeated, outcome(together, ended[:WORKERS]), outcome(resumed, ended[WORKERS:]))
    yield _export(exported)
    if prepared.job.config.scaling.gpus_per_worker:
        yield Finding("warning", "GPU", "was not tried: a check computes on the CPU.")


def _randomness(pure: EndedCall) -> Finding:
    if pure.error is not None:
        return Finding("failed", "randomness", str(pure.error))
    if pure.value:
        return Finding("failed", "randomness", "\n".join(pure.value))
    return Finding("ok", "randomness", "the same rows, keys and seeds of torch's give the same; nothing else is drawn from.")


def _trained(one: Trained, repeated: Trained, together: Trained, resumed: Trained) -> Iterator[Finding]:
    """Compares trainings; what is wrong with the first of these is told, since the others then follow."""
    many = f"{STEPS} steps on one worker and on {WORKERS}"
    again = f"{STEPS} steps, and the same from step {MIDDLE} on after a resume on 2 workers"
    if repeated.error is not None or repeated.params != one.params:
        why = (
            f": {repeated.error}"
            if repeated.error
            else " give other parameters each time. See docs/own-task.md on where randomness must come from."
        )
        yield Finding("failed", "training", f"{STEPS} steps on one worker, twice,{why}")
        return
    kept = "A worker has only its own rows: nothing may be kept from one batch for the next but in the model's parameters and buffers."
    yield _compared("workers", many, one, together, kept)
    kept = "A worker that resumes has the checkpoint alone: what a task or a model keeps elsewhere than in parameters and buffers is gone."
    yield _compared("resume", again, one, resumed, kept)
    if not one.scores:
        yield Finding("warning", "evaluation", "there is none: data.eval_path is not given.")
    elif together.error is None and together.params == one.params:
        kept = "The metrics' states must be sums, minima, maxima or lists, and say nothing of who updates them, or of the order."
        if one.scores == together.scores:
            yield Finding("ok", "evaluation", f"the same metrics from one worker and from {WORKERS}: {one.scores[-1][1]}.")
        else:
            yield Finding("failed", "evaluation", f"one worker finds {one.scores[-1][1]}, {WORKERS} find {together.scores[-1][1]}. {kept}")


def _compared(topic: str, what: str, one: Trained, other: Trained, advice: str) -> Finding:
    if other.error is not None:
        return Finding("failed", topic, f"{what}: {other.error}")
    if other.params != one.params:
        return Finding("failed", topic, f"{what}: other parameters ({one.params[:12]}, {other.params[:12]}). {advice}")
    return Finding("ok", topic, f"{what}: the same parameters, bit for bit.")


def export(job: Job) -> tuple[str, tuple[str, ...]]:
    """Writes the model as it is before the first step, loads it again and compares; called in a process of its own."""
    seed_init(job.config.seed, torch.device("cpu"))
    source = job.evaluation or job.source
    with tempfile.TemporaryDirectory() as folder:
        made = write_files(job.task, job.task.build_model(), first_rows(source.reader, source.manifest, 2), Path(folder))
        return made.format, made.refused


def _export(exported: EndedCall) -> Finding:
    if exported.error is not None:
        return Finding(
            "failed", "export", f"{exported.error}\nA run trains all the same; ray-app export and register would refuse its model."
        )
    form, refused = exported.value
    if refused:
        return Finding("warning", "export", f"as {form} with the task's code; not as a program of its own ({'; '.join(refused)}).")
    return Finding("ok", "export", f"as {form}, which predicts the same.")
