"""What the stages of a round do. Each can be repeated: doing it again finds what is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from ray_app.config.config import Config
from ray_app.data.dataset.dataset import open_dataset
from ray_app.errors import DataError, RegistryError, StorageError
from ray_app.models.registry import champion_of, promote
from ray_app.models.versions import Version, log_figures, tag, version_of
from ray_app.record.ends import put_summary
from ray_app.record.files import read_json
from ray_app.record.paths import RunPaths
from ray_app.retrain.champion import KEY_TAG, package
from ray_app.retrain.comparison import MOST_BLOCKS, score_packages
from ray_app.retrain.gate import GUARD, Decision, figures, judge
from ray_app.retrain.key import digest_of
from ray_app.retrain.look import gate_request
from ray_app.retrain.rollback import deciding
from ray_app.retrain.rounds import Round
from ray_app.retrain.selection import old_files, put_together, selection_part
from ray_app.retrain.situation import Situation
from ray_app.retrain.validate import Known, problems
from ray_app.runs.in_process import run_training
from ray_app.runs.outcome.registering import register_best, user
from ray_app.runs.preparing.prepare import prepare


class InterruptedRunError(Exception):
    """The run was stopped by a signal; starting again continues it."""


class Stages:
    """The stages of one round.

    Args:
        situation: How things stand, with the champion of when the round began.
        round: The round.
        console: Where training shows its progress.
        at: For fault tests: called with `training` while it goes on.
    """

    def __init__(self, situation: Situation, round: Round, console: Console, at: Callable[[str], None]) -> None:
        self._now, self._round, self._console, self._at = situation, round, console, at

    def validate(self) -> dict[str, Any]:
        """Looks whether the data is sound.

        Raises:
            StorageError: It cannot be said now.
        """
        now = self._now
        found: dict[str, Any] = {"delivery": asdict(now.delivery)}
        try:
            look = now.look
        except StorageError:
            raise
        except DataError as error:
            return {**found, "problems": [str(error)], "accepted": False}
        known = now.champion.known if now.champion is not None else Known()
        wrong = problems(look.train, look.evaluation, look.gate, known, look.agreement, now.delivery.twice(), now.section)
        found |= {"train": look.train.to_json(), "evaluation": look.evaluation.to_json(), "drift": look.drift}
        found |= {"gate": look.gate.own.to_json()} if look.gate.own is not None else {}
        found |= {"agreement": asdict(look.agreement) if look.agreement is not None else None}
        return {
            **found,
            "problems": wrong,
            "accepted": not wrong or now.section.accept_data is not None,
            "because": now.section.accept_data,
        }

    def train(self) -> dict[str, Any]:
        """Trains the run of this key, or continues it.

        Raises:
            InterruptedRunError: It was stopped by a signal.
            DataError: A row cannot be used.
            RegistryError: MLflow does not have the run.
        """
        self._now.connect()
        result = run_training(self._config, self._console, observe=lambda _: self._at("training"))
        if result.status == "interrupted":
            raise InterruptedRunError
        if not (read_json(RunPaths(result.path).tracking) or {}).get("run_id"):
            raise RegistryError(f"MLflow does not have the run {result.path.name!r} yet; start again, which sends its record.")
        said = {name: result.summary[name] for name in ("status", "steps", "rows", "params_digest", "best")}
        return {"run": result.path.name, **said}

    def register(self) -> dict[str, Any]:
        """Makes the run's best checkpoint a version, which serves nobody yet."""
        job = prepare(self._config).job
        done = register_best(job, self._now.model, self._now.uri, {KEY_TAG: self._round.key}, first_serves=False)
        model = {"name": done.name, "version": done.version, "aliases": list(done.aliases)}
        put_summary(job.paths, read_json(job.paths.summary) | {"model": model})
        return {"version": done.version, "params_digest": version_of(self._now.client, done.name, done.version).params_digest}

    def judge(self) -> dict[str, Any]:
        """Scores champion and challenger on the same rows, by which no checkpoint was chosen."""
        now, challenger = self._now, self._challenger
        now.connect()
        job = prepare(self._config).job
        models = {"challenger": package(now.uri, challenger)}
        if now.champion is not None:
            models["champion"] = now.champion.files
        request = gate_request(job, now.config, now.section, now.delivery, models, MOST_BLOCKS)
        [scored] = score_packages(job.task, (job.best_metric, GUARD), [request], now.config.evaluate)
        found = figures(
            job.task, job.best_metric, job.best_mode, scored["challenger"], scored.get("champion"), now.config.seed, now.section
        )
        return {"figures": asdict(found), "verdict": asdict(judge(found, now.section))}

    def conclude(self) -> dict[str, Any]:
        """Does what the gate says, while nobody rolls back; the alias moves in the last call."""
        with deciding(self._now.paths):
            return self._conclude()

    def _conclude(self) -> dict[str, Any]:
        now, challenger = self._now, self._challenger
        judged = self._round.read("judged") or {}
        decision = Decision(**judged["verdict"])
        before = now.champion.version.version if now.champion is not None else None
        decision = self._still(decision, challenger, before)
        outcome = "promoted" if decision.promote else "gate refused"
        if challenger.version != before:  # else the same parameters came out again: nothing new is to be said of it
            log_figures(now.client, challenger, _numbers(judged["figures"]), datetime.fromisoformat(judged["at"]).timestamp())
            why = (self._round.read("decided") or {})["decision"]["reason"]
            tags = {
                KEY_TAG: self._round.key,
                "ray_app.gate": outcome,
                "ray_app.gate_reason": decision.reason,
                "ray_app.trained_because": why,
            }
            tag(now.client, challenger, tags | {"ray_app.data_digest": self._round.inputs.data})
        if decision.promote:
            promote(now.client, now.model, challenger.version, f"retraining: {decision.reason}", user())
        return {"outcome": outcome, "reason": decision.reason, "version": challenger.version, "before": before}

    @property
    def _challenger(self) -> Version:
        return version_of(self._now.client, self._now.model, (self._round.read("registered") or {})["version"])

    def _still(self, decision: Decision, challenger: Version, before: str | None) -> Decision:
        """The decision, unless what it was about has changed meanwhile."""
        serves = champion_of(self._now.client, self._now.model)
        said = decision.reason
        if challenger.version == before:
            return Decision(False, f"{said}; training gave the parameters of the champion itself, version {before}")
        if serves == challenger.version:  # it was promoted just before a crash
            return decision
        if "ray_app.rolled_back_at" in challenger.tags:
            because = challenger.tags.get("ray_app.rolled_back_because", "")
            return Decision(False, f"{said}; but these parameters, version {challenger.version}, were rolled back: {because}")
        if serves != before:
            return Decision(False, f"{said}; but meanwhile version {serves} has become the champion, which it was not compared with")
        return decision

    @cached_property
    def _config(self) -> Config:
        """The configuration of the round's run."""
        now = self._now
        fields: dict[str, Any] = {"run__name": now.paths.run_name(now.inputs.training_key), "tracking__registered_model": None}
        before = now.champion.delivery if now.champion is not None else None
        dataset = open_dataset(now.config.data.path)
        columns = now.task.prepare(dataset.facts).columns()
        if now.section.gate_path is None:
            out = Path(
                str(now.paths.selection(digest_of([sorted(now.delivery.evaluation.items()), columns])))
            )  # a folder: see check_section
            held_out = open_dataset(str(now.config.data.eval_path))
            fields["data__eval_path"] = str(selection_part(held_out, columns, now.delivery.evaluation, out))
        if now.section.data == "new_and_sample" and before is not None:
            old = old_files(now.delivery.train, before.train)
            if set(dataset.manifest.paths) - old and old & set(dataset.manifest.paths):
                out = Path(str(now.paths.data(now.inputs.training_key)))
                fields["data__path"] = str(put_together(dataset, columns, now.delivery.train, old, now.section.old_fraction, out))
        if now.section.start == "champion" and now.champion is not None:
            fields["train__init_from"] = str(now.champion.export())
        return now.config.replace(**fields)


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """The figures of the gate as metrics of the challenger's MLflow run."""
    return {f"gate_{name}": values[name] for name in ("challenger", "champion", "gain", "low", "high", "rows") if values[name] is not None}
