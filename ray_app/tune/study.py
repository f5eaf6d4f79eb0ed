"""A study: trials of one configuration with other settings train in slots, and the best ones go on.

`run_study` starts or continues a study. Its driver makes decisions (`Scheduler`) and writes them down (`StudyRecord`)
before it carries them out. It keeps no other state, so the same command continues after a kill of any process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import stdev
from typing import Any

import yaml
from rich.console import Console

from ray_app.cluster.resources import cluster, keep_connection
from ray_app.config.config import Config, TextDumper
from ray_app.driver.parsing import load_section
from ray_app.driver.result import Result
from ray_app.driver.trained_run import load_trained_job
from ray_app.errors import ConfigError, RayAppError, unwrap_app_error
from ray_app.preflight.prepare import check_storage, prepare
from ray_app.retrain.options import RetrainSection
from ray_app.retrain.retraining import retrain
from ray_app.retrain.situation import StudyWinner
from ray_app.runlog.lease import acquire_lease, check_lease
from ray_app.runlog.output import TextConsole
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.storage.files import Location, put_atomic, read_json
from ray_app.track.tracker import check_available
from ray_app.tune.options import TuneSection, check_section, uses_optuna
from ray_app.tune.record import (
    StudyPaths,
    StudyRecord,
    TrialResult,
    combine_folds,
    put_record,
    read_record,
    refuse_other_study,
    settings_text,
    study_identity,
    trial_name,
)
from ray_app.tune.report import study_cell, study_page
from ray_app.tune.samplers import check_optuna, count_trials, propose, sample
from ray_app.tune.scheduler import Promotion, Scheduler, rung_epochs
from ray_app.tune.slots import LostSlotError, Slots, alive_nodes, count_slots
from ray_app.tune.space import Dimension, parse_space
from ray_app.tune.tracking import StudyTracker
from ray_app.tune.trials import EarlierTrials, TrialConfigs, TrialJob, in_process_config, shorten

logger = logging.getLogger(__name__)

_POLL_S = 2.0
_SHORT_POLL_S = 0.1
"""Seconds until the next look if a trial that could train is still being sent to MLflow, or was refused."""
_STOP_S = 30.0
"""Seconds that trials have to write a checkpoint when the study is interrupted."""
_MAX_ATTEMPTS = 3
"""Attempts of a trial in a rung that may end by a lost process or a storage that fails; then it counts as failed."""
_ALIKE = 5
"""Number of first trials that end the study if all of them fail with the same error."""
_GROW_S = 30.0
"""Seconds that a trial needs at least until its rung ends before it gets more workers, which take seconds to start."""


class StudyFailedError(RayAppError):
    """All trials fail in the same way, or none has a result."""


@dataclass(frozen=True, repr=False)
class Study:
    """A study that has ended, or was interrupted.

    Args:
        path: Folder of the study.
        record: What it has decided.
        winner: The best trial with its rung; None without a result.
    """

    path: Location
    record: StudyRecord
    winner: Promotion | None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the winner by their dotted names."""
        return self.record.trials[self._winner.trial]

    @property
    def run(self) -> Location:
        """The run directory of the winner; with folds that of the first one."""
        return StudyPaths(self.path).runs(self._winner.trial, self.record.folds)[0].root

    @property
    def result(self) -> Result:
        """The result of the winner's run, which loads its model and predicts."""
        paths = RunPaths(self.run)
        return Result(self.run, read_json(paths.summary), load_trained_job(paths).task)

    @property
    def value(self) -> float | None:
        """The metric by which the winner was chosen: that of its best checkpoint, or the mean over the folds."""
        return self.record.newest_results()[self._winner.trial].value

    @property
    def trials(self) -> list[dict[str, Any]]:
        """A dictionary for each trial with its settings and its newest result, for `pandas.DataFrame`."""
        newest = self.record.newest_results()
        rows = []
        for number, settings in sorted(self.record.trials.items()):
            result = newest.get(number, TrialResult(number, 0, None))
            values = {"rung": result.rung, "epochs": result.epochs, self.record.metric: result.value}
            values |= {f"fold {fold}": score for fold, score in enumerate(result.scores)}
            rows.append({"trial": trial_name(number), **settings, **values, "failed": result.reason})
        return rows

    @property
    def _winner(self) -> Promotion:
        if self.winner is None:
            raise StudyFailedError(f"The study in {self.path} has no result yet.")
        return self.winner

    def _repr_html_(self) -> str:
        """Returns the report of the study, for notebooks."""
        return study_cell(self.path.name, self.record, self.winner)

    def __repr__(self) -> str:
        if self.winner is None:
            return f"<study of {len(self.record.trials)} trials without a result, in {self.path}>"
        score = f"{self.record.metric} {self.value:.4f}"
        return (
            f"<study of {len(self.record.trials)} trials: {trial_name(self.winner.trial)} has {score}, in {self.path}>"
        )


def run_study(
    config: Config,
    tune: Mapping[str, Any] | TuneSection,
    console: Console | None = None,
    gate: Mapping[str, Any] | None = None,
) -> Study:
    """Runs a study; the same call continues it, after an interruption or with more trials.

    Args:
        config: From `load_config`: what all trials have in common.
        tune: The fields of the section `tune` of a configuration, by name.
        console: Where progress is shown; by default standard output.
        gate: The fields of the section `retrain` by which `tune.register` decides whether the winner serves.

    Raises:
        ConfigError: The configuration, the space or the study is refused; nothing was started or written.
        DataError: The data is refused, and nothing was started or written.
        StudyFailedError: All trials fail in the same way, or none has a result.
    """
    section = tune if isinstance(tune, TuneSection) else load_section("tune", TuneSection, tune)
    gate_section = load_section("retrain", RetrainSection, gate or {})
    driver = StudyDriver(config, section, gate_section, console or TextConsole())
    return driver.run()


class StudyDriver:
    """The driver of one start of a study; making it checks all that can be checked before anything is written.

    Args:
        config: The configuration as the user wrote it.
        section: The section `tune`.
        gate: The section `retrain`.
        console: Where progress is shown.
    """

    def __init__(self, config: Config, section: TuneSection, gate: RetrainSection, console: Console) -> None:
        config = check_section(config, section, gate)
        check_storage(config)
        check_available(config)
        if uses_optuna(section):
            check_optuna()
        self._section, self._gate = section, gate
        self._console = console
        self._space: tuple[Dimension, ...] = parse_space(section.space, section.sampler == "grid")
        self.paths = StudyPaths.of(config, section)
        plain = TrialConfigs(config, self.paths, section).check(self._space)
        before = read_record(self.paths)
        if before is not None and config.scaling.logical_workers is None:
            config = config.replace(scaling__logical_workers=before.identity["scaling.logical_workers"])
        self._config, metric, mode = self._resolve(config)
        self._configs = TrialConfigs(self._config, self.paths, section, plain)
        folds = len(self._configs.make(0, {})) if section.folds is not None else None
        self.num_trials = count_trials(self._space, section.sampler, section.trials)
        rules = section.scheduler
        self.rungs = rung_epochs(rules.kind, rules.eta, rules.min_epochs, config.train.epochs)
        identity = study_identity(self._config, section)
        if before is not None:
            refuse_other_study(section.name, before.identity, identity)
            if len(before.trials) > self.num_trials:
                raise ConfigError(
                    f"tune.trials is {self.num_trials}, and the study {section.name!r} has begun {len(before.trials)}"
                    " trials already. Give at least as many."
                )
        self._load(before or StudyRecord(identity, metric, mode, list(self.rungs), folds=folds))
        self._earlier = EarlierTrials([StudyPaths(self.paths.root.parent / name) for name in section.reuse])
        # For each attempt of a trial the nodes when its slot began.
        self._attempts = dict[tuple[Promotion, int | None], list[set[str]]]()
        self._tracker: StudyTracker | None = None

    def _load(self, record: StudyRecord) -> None:
        """Continues from a record."""
        rules, is_fixed = self._section.scheduler, self._section.order == "fixed"
        self.record, self._is_changed = record, False
        self.scheduler = Scheduler(rules.kind, rules.eta, len(self.rungs), self.num_trials, record.mode, is_fixed)
        for result in record.results:
            self.scheduler.put(result.trial, result.rung, result.value)
        self._began_s, self._hours_before = time.monotonic(), record.hours

    def _resolve(self, config: Config) -> tuple[Config, str, str]:
        """Returns the configuration with what a run of it resolves, for all trials; the metric and its mode."""
        trial = TrialConfigs(config, self.paths, self._section).make(0, {})[0].replace(run__name=None)
        job = prepare(in_process_config(trial) or trial).job
        if (epochs := job.config.train.epochs) != trial.train.epochs:
            raise ConfigError(
                f"train.epochs is {trial.train.epochs}, and the task sets {epochs} by the number of rows. All trials of"
                f" a study need the same number, whatever their settings are. Set train.epochs, such as {epochs}."
            )
        resolved = {
            "scaling__logical_workers": trial.scaling.logical_workers or trial.logical_workers,
            "scaling__gpus_per_worker": job.config.scaling.worker_gpus,
            "train__init_from": job.config.train.init_from,
            "train__init_digest": job.config.train.init_digest,
            "evaluate__metric": job.best_metric,
            "evaluate__mode": job.best_mode,
        }
        return config.replace(**resolved), job.best_metric, job.best_mode

    def run(self) -> Study:
        """Runs the study to its end; see `run_study`."""
        if self._section.dry_run:
            self._say_plan()
            return Study(self.paths.root, self.record, None)
        slots = self._section.slots or 1
        cluster_config = self._config.replace(scaling__max_workers=slots, scaling__min_workers=1)
        with keep_connection(), cluster(cluster_config), acquire_lease(RunPaths(self.paths.root)) as lease:
            self._fence = lease.fence
            # Another driver may have ended since this one has read it.
            self._load(read_record(self.paths) or self.record)
            self.record.end, self.record.budget = None, asdict(self._section.budget)
            verb = "Continuing" if self.record.results else "Starting"
            self._say(f"{verb} study {self._section.name} in {self.paths.root}")
            self._say(f"{self._plan_text()}; {self._count_slots()} at the same time")
            if self._config.tracking.enabled:
                self._tracker = StudyTracker(self._config, self.paths, self.record)
            try:
                with Slots(self._config, self._count_slots()) as pool:
                    try:
                        self._train(pool)
                    except BaseException:
                        self._stop(pool)
                        raise
                study = self._end()
            finally:
                self._put_record()
                page = study_page(self.paths.root.name, self.record, self.scheduler.winner())
                put_atomic(self.paths.report, page.encode())
                if self._tracker is not None:
                    self._tracker.close()
                    self._put_record()
            self._say_end(study)
            if self._section.register:
                self._register(study)
        return study

    def _register(self, study: Study) -> None:
        """Makes the winner a version of the registered model, which serves if it passes the gate of retraining."""
        trials = len(self.record.trials)
        tags = {"ray_app.study": str(self.paths.root), "ray_app.study_trials": str(trials)}
        [trial] = self._configs.make(study._winner.trial, study.settings)
        config = replace(trial, run=self._config.run, tracking=self._config.tracking).replace(evaluate__half=None)
        reason = f"the winner of the study {self._section.name}, the best of {trials} trials"
        gate = replace(self._gate, force=reason, start="scratch")
        winner = StudyWinner(in_process_config(trial) or trial, tags)
        retrain(config, gate, self._console, winner=winner)

    @property
    def _stop_file(self) -> Location:
        return self.paths.root / f"stop-{self._fence:04d}"

    def _train(self, pool: Slots) -> None:
        """Starts trials and takes their results until all is decided, or the budget is spent."""
        while not self.scheduler.is_decided():
            is_complete = True
            if not self._is_spent():
                pool.count = self._count_slots()
                self._is_changed |= pool.count != self.record.slots
                self.record.slots = pool.count
                is_complete = self._start_jobs(pool)
            elif not pool.jobs:
                self._say("The budget of the study is spent; no more trial begins or continues.")
                return
            for job, outcome in pool.wait(_POLL_S if is_complete else _SHORT_POLL_S):
                if isinstance(outcome, TrialResult):
                    self._take(outcome)
                else:
                    self._count_attempt(job, outcome)

    def _count_slots(self) -> int:
        """Returns the number of slots; by default that of the cluster as it is now."""
        return self._section.slots or min(count_slots(self._config), self.num_trials * (self.record.folds or 1))

    def _is_spent(self) -> bool:
        budget, record = self._section.budget, self.record
        hours = self._hours_before + (time.monotonic() - self._began_s) / 3600
        limits = (hours, budget.hours), (record.worker_hours, budget.worker_hours)
        return any(limit is not None and spent >= limit for spent, limit in limits)

    def _start_jobs(self, pool: Slots) -> bool:
        """Starts trials in the free slots, after the record has them and the results before.

        Returns:
            Whether there is nothing to start before another trial ends.
        """
        begun = {(job.trial, job.rung, job.fold) for job in pool.jobs}
        begun |= {(part.trial, part.rung, part.fold) for part in self.record.parts}
        folds = [None] if self.record.folds is None else range(self.record.folds)
        waiting = [job for job in self.scheduler.waiting() if self._is_ready(job)]
        parts = [(job, fold) for job in waiting for fold in folds if (*job, fold) not in begun]
        # Sending a trial and training it would both write to its run.
        free = [part for part in parts if self._tracker is None or self._tracker.take_back(part[0].trial)]
        chosen = free[: pool.free]
        for (trial, _), _ in chosen:
            if trial not in self.record.trials:
                self.record.trials[trial], self._is_changed = self._choose_settings(trial), True
        if self._is_changed:
            self._put_record()
        # Free slots are for the trials that are left, if there are fewer than slots.
        share = pool.free // len(chosen) if chosen and len(chosen) == len(parts) else 1
        for job, fold in chosen:
            try:
                config = self._configs.make(job.trial, self.record.trials[job.trial])[fold or 0]
                earlier = self._earlier.take(self.record, job, fold, config)
            except ConfigError as error:
                reason = f"ConfigError: {shorten(' '.join(str(error).split()))}"
                self._take(TrialResult(*job, None, reason=reason, fold=fold))
                continue
            if earlier is not None:
                self._take(earlier)
                continue
            workers = self._count_workers(job, config, share)
            pool.start(TrialJob(*job, fold, config, self.rungs[job.rung], workers, str(self._stop_file)))
        # The result of a trial that was refused may let others go on.
        return len(free) == len(parts) and not self._is_changed

    def _is_ready(self, job: Promotion) -> bool:
        """Returns whether the results are there by which Optuna proposes the settings of a trial."""
        if job.trial in self.record.trials or not uses_optuna(self._section):
            return True
        results = {result.trial for result in self.record.results if not result.rung}
        if self._section.order == "arrival":
            return job.trial - len(results) < self._section.ahead
        return results.issuperset(range(job.trial - self._section.ahead + 1))

    def _choose_settings(self, trial: int) -> dict[str, Any]:
        section, seed = self._section, self._config.seed
        if not uses_optuna(section):
            return sample(self._space, section.sampler, seed, trial)
        before = trial if section.order == "arrival" else trial - section.ahead + 1
        return propose(self._space, section.sampler, seed, trial, self.record.observed(before), self.record.mode)

    def _count_workers(self, job: Promotion, config: Config, share: int) -> int | None:
        """Returns the workers of a trial for which there are so many free slots; None: the slot itself trains."""
        scaling = config.scaling
        limit = config.logical_workers if scaling.max_workers == "all" else scaling.worker_limit
        if in_process_config(config) is None:
            return limit
        before = self.record.newest_results().get(job.trial) if min(share, limit) > 1 else None
        if before is None or not before.epochs or not config.train.strategy_traits.has_workers:
            return None
        left_s = (self.rungs[job.rung] - before.epochs) * before.seconds * before.workers / before.epochs
        return min(share, limit) if left_s >= _GROW_S else None

    def _count_attempt(self, job: TrialJob, error: BaseException) -> None:
        """Lets a trial start again after an attempt without a result, unless there were too many."""
        attempts = self._attempts.setdefault((Promotion(job.trial, job.rung), job.fold), [])
        attempts.append(error.nodes if isinstance(error, LostSlotError) else set())
        # Ray notices the end of a node after that of its processes. The result must not depend on how often nodes end.
        count = sum(not (nodes and nodes - alive_nodes()) for nodes in attempts)
        reason = redact(str(unwrap_app_error(error))).strip().partition("\n")[0]
        self._say(f"trial {trial_name(job.trial)}: {reason}; attempts that count: {count} of {_MAX_ATTEMPTS}")
        if count >= _MAX_ATTEMPTS:
            reason = f"{_MAX_ATTEMPTS} attempts failed, the last one: {reason}"
            self._take(TrialResult(job.trial, job.rung, None, reason=reason, fold=job.fold))

    def _take(self, result: TrialResult) -> None:
        """Records a result and, when it is that of the last fold of a trial, what it decides."""
        if result.fold is not None:
            self.record.parts.append(result)
            self._is_changed = True
            parts = [one for one in self.record.parts if (one.trial, one.rung) == (result.trial, result.rung)]
            if len(parts) != self.record.folds:
                return
            result = combine_folds(sorted(parts, key=lambda part: part.fold or 0))
        self.record.results.append(result)
        self._is_changed = True
        promotions = self.scheduler.put(result.trial, result.rung, result.value)
        earlier = set(self.record.promotions)
        self.record.promotions += [promotion for promotion in promotions if promotion not in earlier]
        if self._tracker is not None:
            self._tracker.put(result.trial)
        self._say_result(result, promotions)
        self._check_failures()

    def _put_record(self) -> None:
        check_lease(RunPaths(self.paths.root), self._fence)
        self.record.hours = self._hours_before + (time.monotonic() - self._began_s) / 3600
        put_record(self.paths, self.record)
        self._is_changed = False

    def _check_failures(self) -> None:
        """Raises StudyFailedError if the first trials all have failed with the same error."""
        first = {r.trial: r.reason for r in self.record.results if not r.rung and r.trial < _ALIKE}
        reasons = set(first.values())
        if len(first) == min(_ALIKE, self.num_trials) and len(reasons) == 1 and (reason := reasons.pop()) is not None:
            raise StudyFailedError(f"The first {len(first)} trials failed with the same error: {reason}")

    def _stop(self, pool: Slots) -> None:
        """Lets the trials that train write a checkpoint."""
        if not pool.jobs:
            return
        self._say("Stopping the trials, with a checkpoint ...")
        put_atomic(self._stop_file, b"")
        deadline_s = time.monotonic() + _STOP_S
        while pool.jobs and time.monotonic() < deadline_s:
            pool.wait(_POLL_S)
        self._stop_file.unlink(missing_ok=True)

    def _end(self) -> Study:
        study = Study(self.paths.root, self.record, self.scheduler.winner())
        if study.winner is None:
            raise StudyFailedError(f"No trial of the study in {self.paths.root} has a result; see its report.")
        best = self.record.newest_results()[study.winner.trial]
        report = None
        if self.record.folds is None and self._section.split_evaluation:
            report = study.result.evaluate(half="report")[self.record.metric]
        self.record.end = {"winner": trial_name(best.trial), "value": best.value, "step": best.step}
        put_atomic(self.paths.winner, _to_yaml(study.settings).encode())
        self.record.end |= {"params_digest": best.params_digest, "settings": study.settings, "report": report}
        return study

    def _say(self, text: str) -> None:
        self._console.print(redact(text), markup=False, highlight=False, soft_wrap=True)

    def _say_plan(self) -> None:
        """Prints the trials and the rungs."""
        self._say(self._plan_text())
        for trial in range(self.num_trials):
            text = "as the results before it say"
            if trial in self.record.trials or not uses_optuna(self._section):
                text = settings_text(self.record.trials.get(trial) or self._choose_settings(trial))
            self._say(f"  {trial_name(trial)}  {text}")

    def _plan_text(self) -> str:
        """Returns how many trials train for how many epochs."""
        rules, size = self._section.scheduler, self.num_trials
        parts = list[str]()
        for epochs in self.rungs:
            about = {"asha": "about ", "median": "up to "}.get(rules.kind, "") if parts else ""
            parts.append(f"{about}{size} to epoch {epochs}")
            size = max(1, size // rules.eta) if rules.kind != "median" else size
        text = f"{self.num_trials} trials, {rules.kind}: {', '.join(parts)}; {self.record.metric} ({self.record.mode})"
        if len(parts) == 1 and rules.kind != "none":
            text += f"; no trial ends early with train.epochs below {rules.min_epochs * rules.eta}"
        return text

    def _say_result(self, result: TrialResult, promotions: list[Promotion]) -> None:
        name, settings = trial_name(result.trial), settings_text(self.record.trials[result.trial])
        if result.has_failed:
            self._say(f"trial {name}  failed: {result.reason}  ({settings})")
        else:
            text = f"{self.record.metric} {result.value:.4f} after {result.epochs} epochs, {result.seconds:.1f} s"
            self._say(f"trial {name}  {text}  ({settings})")
        for rung in sorted({promotion.rung for promotion in promotions}):
            names = ", ".join(trial_name(one.trial) for one in promotions if one.rung == rung)
            self._say(f"to epoch {self.rungs[rung]}: {names}")

    def _say_end(self, study: Study) -> None:
        failed = sum(result.has_failed for result in self.record.results)
        rate = f", {failed} failed" if failed else ""
        self._say(
            f"{len(self.record.trials)} trials{rate}, {self.record.worker_hours * 3600:.0f} worker-seconds,"
            f" {self.record.hours * 3600:.0f} s"
        )
        best = self.record.newest_results()[study._winner.trial]
        self._say(f"winner     trial {trial_name(study._winner.trial)}: {settings_text(study.settings)}")
        text = f"score      {self.record.metric} {study.value:.4f}"
        if best.scores:
            text += f", the mean of {len(best.scores)} folds, with a deviation of {stdev(best.scores):.4f}"
        else:
            text += f" at step {best.step}, by which it was chosen"
        self._say(text)
        if (report := (self.record.end or {}).get("report")) is not None:
            self._say(f"           {self.record.metric} {report:.4f} on the other half of the rows")
        self._say(f"parameters {best.params_digest}")
        if self.record.folds is None:
            self._say(f"export     ray-app export --run {study.run} --out FOLDER")
        self._say(f"train      ray-app train --config FILE --config {self.paths.winner}")
        self._say(f"report     {self.paths.report}")


def _to_yaml(settings: Mapping[str, Any]) -> str:
    """Returns settings by dotted names as the text of a configuration."""
    content: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, field = name.split(".")
        section = content
        for part in sections:
            section = section.setdefault(part, {})
        section[field] = value
    return yaml.dump(content, Dumper=TextDumper, sort_keys=False)
