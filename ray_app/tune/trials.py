"""The configurations of a study's trials, what a slot does with one, and trials of earlier studies.

A slot trains a trial to the end of a rung. A trial is a run of its own, which a rung pauses and the next rung
continues. It trains in the process of its slot, or on several workers; both give the same bits. All trials evaluate in
the processes that train, if the strategy can.
"""

from __future__ import annotations

import io
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import ray
import yaml

from ray_app.config.checks import RULES, check_config
from ray_app.config.config import Config, TextDumper, digest_json, from_dict, with_absolute_paths
from ray_app.config.rules import value_of
from ray_app.config.strategies import STRATEGIES, strategy_with_workers
from ray_app.data.folds import fold_configs
from ray_app.driver.parsing import parse, without_defaults
from ray_app.driver.run import open_run
from ray_app.errors import (
    ConfigError,
    DataError,
    RayAppError,
    RunExistsError,
    RunHeldError,
    TaskError,
    unwrap_app_error,
)
from ray_app.preflight.prepare import prepare, update_stored_config
from ray_app.runlog.lease import is_released
from ray_app.runlog.output import TextConsole
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.runlog.stored_config import read_config
from ray_app.storage.data_files import open_data_file
from ray_app.storage.files import Location, list_tree, poll_interval_s, put_atomic, read_json, remove_tree, to_location
from ray_app.tune.options import TuneSection
from ray_app.tune.record import StudyPaths, StudyRecord, TrialResult, read_record, trial_name
from ray_app.tune.scheduler import Promotion
from ray_app.tune.space import Dimension

_COMMON_SECTIONS = ("scaling", "failure", "evaluate", "train.profile_steps", "checkpoint")
"""Where a setting for which the process of a slot has no use is set to its default."""
_CLASSES = ("task", "optimizer", "schedule")
_MAX_PENDING = 1_000_000
"""Evaluations that may wait: none is skipped, or the best one would depend on how fast the evaluator is."""
_opening = threading.Lock()
_MAX_REASON = 200


@dataclass(frozen=True)
class TrialJob:
    """A trial that is to train until the end of a rung.

    Args:
        config: The configuration of its run.
        fold: The fold that it evaluates on; None without folds.
        epochs: Epochs of the run after which it pauses.
        workers: Number of workers; None if the process of the slot trains.
        stop_file: File that stops it, with a checkpoint, when it exists.
    """

    trial: int
    rung: int
    fold: int | None
    config: Config
    epochs: int
    workers: int | None
    stop_file: str


class TrialConfigs:
    """Makes the configurations of the trials of a study from the one of the user.

    The parser takes longer than a short trial, so most settings are put into the parsed configuration: those for which
    `check` has seen that this gives the same.

    Args:
        config: The configuration that the trials have in common.
        paths: The paths of the study.
        section: The section `tune`.
        plain: Names of the settings that need no parser, from `check`.
    """

    def __init__(self, config: Config, paths: StudyPaths, section: TuneSection, plain: Set[str] = frozenset()) -> None:
        self._paths, self._section = paths, section
        self._plain = plain
        config = with_absolute_paths(config)
        self._text = config.to_yaml()
        self._values = self._parse({}).to_dict()

    def check(self, space: tuple[Dimension, ...]) -> set[str]:
        """Returns the names of the settings that need no parser.

        Raises:
            ConfigError: A setting has no field, or one of another type; it has the parser's sentences.
        """
        problems, plain = list[str](), {dimension.name for dimension in space}
        for dimension in space:
            for value in dimension.probes():
                settings = {dimension.name: value}
                try:
                    parsed, config = self._parse(settings), self._insert(settings)
                    # The digests of 1 and 1.0 differ.
                    if config is None or digest_json(config.to_dict()) != digest_json(parsed.to_dict()):
                        plain.discard(dimension.name)
                except ConfigError as error:
                    reason = str(error).removeprefix("The configuration is refused:").strip()
                    problems.append(f"tune.space has {dimension.name}, and {value!r} is refused: {reason}")
                    break
        if problems:
            raise ConfigError("The configuration is refused:\n" + "\n".join(f"  - {problem}" for problem in problems))
        return plain

    def make(self, trial: int, settings: Mapping[str, Any]) -> list[Config]:
        """Returns the configuration of a trial for each fold; raises ConfigError if its settings do not go together."""
        config = self._insert(settings) if self._plain >= settings.keys() else None
        config = config or self._parse(settings)
        # The driver of the study sends what a trial has recorded, see `StudyTracker`.
        config = config.replace(
            run__storage_path=str(self._paths.trials),
            run__name=trial_name(trial),
            evaluate__max_pending=_MAX_PENDING,
            tracking__enabled=False,
            tracking__registered_model=None,
        )
        if config.train.strategy_traits.can_evaluate:
            config = config.replace(evaluate__where="workers", evaluate__workers=1, evaluate__num_gpus=0)
        if self._section.folds is not None:
            return fold_configs(config, self._section.folds)
        return [config.replace(evaluate__half="selection" if self._section.split_evaluation else None)]

    def _insert(self, settings: Mapping[str, Any]) -> Config | None:
        """Returns the configuration with settings, as they are, at their fields; None if that needs the parser.

        Raises:
            ConfigError: The settings do not go together.
        """
        values = deepcopy(self._values)
        for name, value in settings.items():
            *parents, last = name.split(".")
            section: Any = values
            for parent in parents:
                section = section.get(parent) if isinstance(section, dict) else None
            # The parser drops arguments that another class does not have.
            if not parents or not isinstance(section, dict) or last == "class_path":
                return None
            section[last] = value
            if (spec := parents[0]) in _CLASSES:
                values[spec] |= without_defaults({key: values[spec][key] for key in ("class_path", "init_args")})
        config = from_dict(values)
        check_config(config)
        return config

    def _parse(self, settings: Mapping[str, Any]) -> Config:
        with tempfile.TemporaryDirectory(prefix="ray_app-tune-") as folder:
            file = Path(folder) / "config.yaml"
            file.write_text(self._text)
            arguments = [f"--{name}={to_text(value)}" for name, value in settings.items()]
            return parse(["--config", str(file), *arguments], prog="tune", exit_on_error=False)


def to_text(value: Any) -> str:
    """Returns a value as the text that the parser reads it from."""
    if isinstance(value, str):
        return value
    return yaml.dump(value, Dumper=TextDumper, default_flow_style=True).split("\n...")[0].strip()


def in_process_config(config: Config) -> Config | None:
    """Returns the configuration with which the process of a slot trains itself; None if the strategy needs workers.

    What only workers have a use for is set to its default: it does not decide the result.
    """
    with_workers = strategy_with_workers(config.train.strategy)
    forms = [name for name, traits in STRATEGIES.items() if traits.in_process_form_of == with_workers]
    if not forms:
        return None
    config = config.replace(train__strategy=forms[0], scaling__min_workers=1, scaling__max_workers=1)
    for rule in RULES:
        section, _, name = rule.field.rpartition(".")
        if rule.is_broken(config) and rule.field.startswith(_COMMON_SECTIONS):
            default = getattr(type(value_of(config, section)), name)
            config = config.replace(**{rule.field.replace(".", "__"): default})
    check_config(config)
    return config


def run_trial(job: TrialJob) -> TrialResult:
    """Trains a trial until the end of its rung, and returns its result; an error of the trial is a result, too.

    Raises:
        InterruptedTrialError: The trial was stopped; starting it again continues it.
        RayAppError, OSError: An error that another attempt may not have, such as one of the storage.
    """
    started_s = time.time()
    is_in_process = job.workers is None
    config = in_process_config(job.config) if is_in_process else job.config.replace(scaling__max_workers=job.workers)
    assert config is not None
    try:
        console = TextConsole(file=io.StringIO())
        with ExitStack() as stack:
            # The checks before a run draw from generators that the threads of a process share.
            with _opening:
                opened = open_run(config, console, background=not is_in_process, pause_epochs=job.epochs)
                run = stack.enter_context(opened)
            stack.enter_context(_stopped_by_file(to_location(job.stop_file), run.stop))
            result, last_step = run.run(), run.job.last_step
    except Exception as error:
        cause = unwrap_app_error(error)
        is_retryable = getattr(cause, "retryable", False) and not isinstance(cause, TaskError)
        if is_retryable or isinstance(cause, RunHeldError | OSError | ray.exceptions.RayError):
            raise
        first_line = redact(str(cause)).strip().partition("\n")[0]
        reason = f"{type(cause).__name__}: {shorten(first_line)}"
        return TrialResult(job.trial, job.rung, None, reason=reason, **_spent(job, started_s))
    summary = result.summary
    if summary["status"] == "interrupted" and summary["steps"] < last_step:
        raise InterruptedTrialError(trial_name(job.trial))
    best = summary["best"] or {}
    value = best.get("value")
    return TrialResult(
        job.trial,
        job.rung,
        float("nan") if value is None else float(value),
        step=best.get("step", 0),
        epochs=summary["epochs"],
        params_digest=summary["params_digest"],
        **_spent(job, started_s),
    )


def _spent(job: TrialJob, started_s: float) -> dict[str, Any]:
    """Returns what a trial has taken, as fields of its result."""
    now_s = time.time()
    return {"fold": job.fold, "seconds": round(now_s - started_s, 3), "workers": job.workers or 1, "ended_s": now_s}


def shorten(text: str) -> str:
    """Returns the beginning of a text that is too long for a line."""
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} ..."


class InterruptedTrialError(RayAppError):
    """A trial was stopped before the end of its rung; it continues when it is started again."""


@contextmanager
def _stopped_by_file(file: Location, stop: Callable[[], None]) -> Iterator[None]:
    """Calls a function once a file exists, from a thread, inside the block."""
    ended, poll_s = threading.Event(), poll_interval_s(file)

    def watch() -> None:
        while not ended.wait(poll_s):
            with suppress(OSError):
                if file.exists():
                    stop()
                    return

    threading.Thread(target=watch, name="stop file", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class EarlierTrials:
    """The results of other studies, which trials with the same settings, data and code take in place of training.

    Args:
        studies: The paths of the studies.

    Raises:
        ConfigError: One of them is not a study.
    """

    def __init__(self, studies: Sequence[StudyPaths]) -> None:
        self._results = dict[tuple[str, int, int | None], tuple[RunPaths, TrialResult]]()
        for paths in studies:
            if (record := read_record(paths)) is None:
                raise ConfigError(
                    f"tune.reuse has {paths.root.name!r}, but {paths.root} is not a study. Name studies in"
                    " run.storage_path, or leave it out."
                )
            for result in record.results if record.folds is None else record.parts:
                if not result.has_failed:
                    run = paths.runs(result.trial, record.folds)[result.fold or 0]
                    self._results[_trial_key(record, result.trial), result.rung, result.fold] = run, result

    def take(self, record: StudyRecord, job: Promotion, fold: int | None, config: Config) -> TrialResult | None:
        """Returns the result of a trial in a rung after copying its run; None if there is none, or it has changed.

        Args:
            record: The record of the study, with the settings of the trial.
            fold: The fold; None without folds.
            config: The configuration of the run.
        """
        run, result = self._results.get((_trial_key(record, job.trial), job.rung, fold), (None, None))
        if run is None or result is None or not is_released(run):
            return None
        copy = RunPaths(to_location(config.run.storage_path) / str(config.run.name))
        is_new = not copy.config.exists()
        if is_new:
            _copy_run(run, copy)
        try:
            # What a start that continues the copy would refuse, or warn of.
            with _opening:
                prepared = prepare(in_process_config(config) or config, record.rungs[job.rung])
            is_same = not prepared.changed_code and not prepared.changed_data
            is_same = is_same and _has_same_results(prepared.job.config, run, copy)
        except (ConfigError, DataError, RunExistsError):
            is_same = False
        if not is_same:
            if is_new:
                remove_tree(copy.root)
            return None
        # The copy has the name and the folder of the other run.
        update_stored_config(prepared.job)
        return replace(result, trial=job.trial, seconds=0.0, ended_s=time.time())


def _trial_key(record: StudyRecord, trial: int) -> str:
    """Returns a digest of what decides the results of a trial, but for data, code and evaluations."""
    names = [name for name in record.identity if not name.startswith("tune.") or name.startswith("tune.folds")]
    fields = {name: record.identity[name] for name in names} | record.trials[trial]
    set_fields = {name: value for name, value in fields.items() if value is not None}
    return digest_json([set_fields, record.rungs, record.metric, record.mode])


def _has_same_results(config: Config, run: RunPaths, copy: RunPaths) -> bool:
    """Returns whether a run evaluates as a configuration says, with the data and the code of a copy.

    An earlier start may have begun the copy by itself.
    """
    other = read_config(run)
    one, two = ((c.evaluate, c.checkpoint.every_steps, c.checkpoint.every_epochs) for c in (config, other))
    return one == two and all(read_json(a) == read_json(b) for a, b in ((run.data, copy.data), (run.code, copy.code)))


def _copy_run(run: RunPaths, copy: RunPaths) -> None:
    """Copies a run, without its place in MLflow; the configuration comes last, with which a run exists."""
    for name, file in sorted(list_tree(run.root).items(), key=lambda item: item[0] == run.config.name):
        if name != run.tracking.name:
            mode = file.stat().st_mode & 0o777 if isinstance(file, Path) else 0o644
            put_atomic(copy.root / name, partial(_copy_file, file), mode=mode)


def _copy_file(file: Location, target: IO[bytes]) -> None:
    with open_data_file(file) as source:
        shutil.copyfileobj(source, target)
