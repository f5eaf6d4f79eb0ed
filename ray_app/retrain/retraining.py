"""One start of a retraining, from the decision to the audit record.

A round is a chain of stages, each recorded once after its effects, and every effect can be repeated: the run has a name
made of its key and is continued, the version is found again, the alias moves to where it is already. So a start after a
crash at any point goes on and comes to the same outcome. One scheduler at a time: all of it happens under a lease.

What the stages of a round do. Each can be repeated: doing it again finds what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from ray_app.config.config import Config, default_tracking_uri
from ray_app.data.dataset import open_dataset
from ray_app.driver.model_export import register_best, user_name
from ray_app.driver.run import run_training
from ray_app.errors import DataError, RegistryError, StorageError
from ray_app.models.registry import (
    Version,
    champion_of,
    log_metrics,
    promote,
    tag_model,
    tag_version,
    version_of,
    versions_with_tag,
)
from ray_app.preflight.prepare import prepare
from ray_app.retrain.champion import KEY_TAG, deciding, package, record_rollbacks
from ray_app.retrain.gate import (
    GUARD,
    MOST_BLOCKS,
    Decision,
    figures,
    judge,
    old_files,
    put_together,
    score_packages,
    selection_part,
)
from ray_app.retrain.options import RetrainSection, check_section
from ray_app.retrain.profile import Known, problems
from ray_app.retrain.rounds import RetrainPaths, Round, audit, delivered, digest_of, now, open_rounds
from ray_app.retrain.situation import Situation, Triggered, champion_now, gate_request
from ray_app.runlog.endings import put_summary
from ray_app.runlog.lease import Lease, acquire_lease, check_lease, remove_old_fences
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact, register_secrets
from ray_app.storage.files import read_json, remove_tree
from ray_app.track.mlflow_client import connect
from ray_app.track.tracker import check_available


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
        wrong = problems(
            look.train, look.evaluation, look.gate, known, look.agreement, now.delivery.twice(), now.section
        )
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
            raise RegistryError(
                f"MLflow does not have the run {result.path.name!r} yet; start again, which sends its record."
            )
        said = {name: result.summary[name] for name in ("status", "steps", "rows", "params_digest", "best")}
        return {"run": result.path.name, **said}

    def register(self) -> dict[str, Any]:
        """Makes the run's best checkpoint a version, which serves nobody yet."""
        job = prepare(self._config).job
        done = register_best(job, self._now.model, self._now.uri, {KEY_TAG: self._round.key}, first_serves=False)
        model = {"name": done.name, "version": done.version, "aliases": list(done.aliases)}
        put_summary(job.paths, read_json(job.paths.summary) | {"model": model})
        return {
            "version": done.version,
            "params_digest": version_of(self._now.client, done.name, done.version).params_digest,
        }

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
            job.task,
            job.best_metric,
            job.best_mode,
            scored["challenger"],
            scored.get("champion"),
            now.config.seed,
            now.section,
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
            log_metrics(
                now.client, challenger, _numbers(judged["figures"]), datetime.fromisoformat(judged["at"]).timestamp()
            )
            why = (self._round.read("decided") or {})["decision"]["reason"]
            tags = {
                KEY_TAG: self._round.key,
                "ray_app.gate": outcome,
                "ray_app.gate_reason": decision.reason,
                "ray_app.trained_because": why,
            }
            tag_version(now.client, challenger, tags | {"ray_app.data_digest": self._round.inputs.data})
        if decision.promote:
            promote(now.client, now.model, challenger.version, f"retraining: {decision.reason}", user_name())
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
            return Decision(
                False, f"{said}; but these parameters, version {challenger.version}, were rolled back: {because}"
            )
        if serves != before:
            return Decision(
                False, f"{said}; but meanwhile version {serves} has become the champion, which it was not compared with"
            )
        return decision

    @cached_property
    def _config(self) -> Config:
        """The configuration of the round's run."""
        now = self._now
        fields: dict[str, Any] = {
            "run__name": now.paths.run_name(now.inputs.training_key),
            "tracking__registered_model": None,
        }
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
                fields["data__path"] = str(
                    put_together(dataset, columns, now.delivery.train, old, now.section.old_fraction, out)
                )
        if now.section.start == "champion" and now.champion is not None:
            fields["train__init_from"] = str(now.champion.export())
        return now.config.replace(**fields)


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """The figures of the gate as metrics of the challenger's MLflow run."""
    return {
        f"gate_{name}": values[name]
        for name in ("challenger", "champion", "gain", "low", "high", "rows")
        if values[name] is not None
    }


What = Literal["nothing", "would train", "promoted", "gate refused", "data refused", "interrupted"]
EXIT_CODES: dict[What, int] = {
    "nothing": 0,
    "would train": 0,
    "promoted": 0,
    "gate refused": 0,
    "data refused": 2,
    "interrupted": 75,
}


@dataclass(frozen=True)
class Outcome:
    """What came of a start.

    Args:
        what: `nothing` was to be done, `would train` (of a dry run), `promoted`, `gate refused`, `data refused`, or
            `interrupted`.
        reason: Why, with figures.
        version: The version that was made.
    """

    what: What
    reason: str
    version: str | None = None


def retrain(
    config: Config,
    section: RetrainSection,
    console: Console | None = None,
    at: Callable[[str], None] = lambda stage: None,
) -> Outcome:
    """Decides whether to train, and if so trains, compares and promotes or refuses; starting again after a crash goes
    on.

    Args:
        config: The configuration of the runs.
        section: How to retrain.
        console: Where to say how it gets on; not given: standard output.
        at: For fault tests: called with the name of each stage when its effects are done and not recorded, and with
            `training` a few times a second while that goes on.

    Raises:
        ConfigError: The configuration is refused.
        RunHeldError: Another scheduler retrains this model.
        DataError: There is no data.
        StorageError: The data cannot be read now; starting again goes on.
        RayAppError: The training failed, or MLflow refused something; starting again goes on.
    """
    check_section(config, section)
    check_available(config)
    register_secrets(config.to_dict())
    paths = RetrainPaths.of(config)
    with ExitStack() as stack:
        lease = None if section.dry_run else stack.enter_context(acquire_lease(RunPaths(paths.root)))
        if lease is not None:
            remove_old_fences(RunPaths(paths.root), lease.fence)
        return _Start(config, section, paths, console or Console(), at, lease, stack).go()


class _Start:
    """The parts of one start."""

    def __init__(
        self,
        config: Config,
        section: RetrainSection,
        paths: RetrainPaths,
        console: Console,
        at: Callable[[str], None],
        lease: Lease | None,
        stack: ExitStack,
    ) -> None:
        self._section, self._paths, self._console, self._at, self._lease = section, paths, console, at, lease
        uri, self._name = default_tracking_uri(config), str(config.tracking.registered_model)
        self._client = connect(uri)
        delivery = delivered(config, paths.contents if lease is not None else None, section.gate_path)
        serves = champion_now(paths, self._client, self._name, uri)
        self._given = Situation(config, section, paths, self._client, delivery, serves, stack)

    def go(self) -> Outcome:
        champion = self._given.champion
        self._say(
            "champion",
            f"{self._name} version {champion.version.version}" if champion is not None else f"{self._name}: none yet",
        )
        if self._lease is not None:
            record_rollbacks(self._paths, self._client, self._name)
        opened = self._continued() if self._lease is not None else None
        if opened is not None:
            self._say(
                "decided", f"going on with what was stopped: {(opened.read('decided') or {})['decision']['reason']}"
            )
            return self._finish(opened)
        made = self._decided()
        if isinstance(made, Outcome):
            self._say("nothing" if made.what == "nothing" else made.what, made.reason)
            return made
        return self._dry_run(made) if self._lease is None else self._finish(self._begun(made))

    def _continued(self) -> Round | None:
        """The round that was stopped, if it is about the same; others are closed, since what they were about is no
        more.

        What one of these did already, a promotion above all, is recorded as what it is.
        """
        found = None
        for one in open_rounds(self._paths):
            decided = one.read("decided") or {}
            then = self._given.at_champion(decided["champion"])
            if found is None and then.inputs == one.inputs:
                found = one
            elif one.read("concluded") is not None or self._has_promoted(one, decided):
                self._stage(one, "concluded", Stages(then, one, self._console, self._at).conclude)
                self._record(one)
            else:
                self._supersede(one, decided)
        return found

    def _has_promoted(self, round: Round, decided: dict[str, Any]) -> bool:
        """Whether its challenger serves, since it was stopped between the alias and its record."""
        serves = self._given.champion
        if serves is None or round.read("judged") is None:
            return False
        return serves.version.tags.get(KEY_TAG) == round.key and serves.version.version != decided["champion"]

    def _supersede(self, round: Round, decided: dict[str, Any]) -> None:
        why = "data, configuration or code changed before it was done"
        details = {"key": round.key, "inputs": decided["inputs"], "decision": decided["decision"]}
        audit(self._paths, f"superseded {round.key} {decided['at']}", "superseded", why, details)
        if versions_with_tag(
            self._client, self._name, KEY_TAG, round.key
        ):  # a version says by it what data it is of, and may come to serve
            round.put("recorded", {"superseded": why})
        else:
            remove_tree(self._paths.round(round.key))

    def _decided(self) -> Triggered | Outcome:
        """The decision to train, or why there is nothing to do."""
        same = Round(self._paths, self._given.inputs.key)
        before = same.read("concluded") if same.is_done else None
        if before and self._is_overtaken(same, before):
            before = None
        judged = f"{before['outcome']}: {before['reason']} ({before['at']})" if before else None
        if before and before["outcome"] == "data refused":
            return Outcome("data refused", f"the same data was refused before: {before['reason']} ({before['at']})")
        try:
            decision = self._given.decide(judged)
        except StorageError:
            raise
        except DataError as error:
            decision = Triggered(True, "new data", f"the delivered data cannot be used: {error}")
        return decision if decision.retrain else Outcome("nothing", decision.reason)

    def _is_overtaken(self, round: Round, concluded: dict[str, Any]) -> bool:
        """Whether data or a model was refused that was not compared with what serves now."""
        champion = self._given.champion
        serves = champion.version.version if champion is not None else None
        if concluded["outcome"] == "data refused":
            return (round.read("decided") or {}).get("champion") != serves
        return concluded["outcome"] == "gate refused" and serves not in (concluded["before"], concluded["version"])

    def _begun(self, decision: Triggered) -> Round:
        made = Round(self._paths, self._given.inputs.key)
        made.clear()  # of a round that was overtaken or superseded; its entry in the audit record stays
        champion = self._given.champion
        value = {
            "inputs": asdict(self._given.inputs),
            "champion": champion.version.version if champion is not None else None,
            "decision": asdict(decision),
        }
        self._stage(made, "decided", lambda: value)
        self._say("decided", decision.reason)
        return made

    def _dry_run(self, decision: Triggered) -> Outcome:
        self._say("decided", decision.reason)
        found = Stages(self._given, Round(self._paths, self._given.inputs.key), self._console, self._at).validate()
        self._say_data(found)
        if not found["accepted"]:
            return Outcome("data refused", "; ".join(found["problems"]))
        return Outcome("would train", decision.reason)

    def _finish(self, round: Round) -> Outcome:
        """Takes a round from where it is to its end."""
        situation = self._given.at_champion((round.read("decided") or {})["champion"])
        stages = Stages(situation, round, self._console, self._at)
        validated = self._stage(round, "validated", stages.validate)
        self._say_data(validated)
        if not validated["accepted"]:
            return self._refused_data(round, validated["problems"])
        try:
            trained = self._stage(round, "trained", stages.train)
        except InterruptedRunError:
            return Outcome("interrupted", "the run was stopped with a checkpoint; starting again continues it")
        except StorageError:  # says nothing of the data
            raise
        except DataError as error:
            return self._refused_data(round, [str(error)])
        self._say("trained", f"run {trained['run']}: {trained['status']}, {trained['steps']:,} steps")
        registered = self._stage(round, "registered", stages.register)
        self._say("registered", f"version {registered['version']}, the challenger")
        self._stage(round, "judged", stages.judge)
        concluded = self._stage(round, "concluded", stages.conclude)
        self._record(round)
        self._say(concluded["outcome"], f"version {concluded['version']}: {concluded['reason']}")
        return Outcome(concluded["outcome"], concluded["reason"], concluded["version"])

    def _refused_data(self, round: Round, wrong: list[str]) -> Outcome:
        """Records that the data is refused; the champion stays."""
        reason = "; ".join(wrong)

        def conclude() -> dict[str, Any]:
            told = f"{now()}: {reason}"
            tag_model(
                self._client,
                self._name,
                {"ray_app.data_refused": told, "ray_app.refused_data_digest": round.inputs.data},
            )
            return {"outcome": "data refused", "reason": reason}

        concluded = self._stage(round, "concluded", conclude)
        self._record(round)
        return Outcome("data refused", concluded["reason"])

    def _stage(self, round: Round, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What a stage came to, now or before."""
        found = round.read(name)
        if found is None:
            assert self._lease is not None
            check_lease(RunPaths(self._paths.root), self._lease.fence)
            made = make()
            self._at(name)
            check_lease(RunPaths(self._paths.root), self._lease.fence)
            found = round.put(name, made)
        return found

    def _record(self, round: Round) -> None:
        """Adds what was concluded to the audit record and closes the round."""

        def make() -> dict[str, Any]:
            concluded, decided, judged = (round.read(name) or {} for name in ("concluded", "decided", "judged"))
            details = {
                "key": round.key,
                "inputs": decided["inputs"],
                "decision": decided["decision"],
                "version": concluded.get("version"),
                "champion_before": decided["champion"],
                "run": (round.read("trained") or {}).get("run"),
                "figures": judged.get("figures"),
                "validation": {
                    name: (round.read("validated") or {}).get(name)
                    for name in ("problems", "agreement", "drift", "because")
                },
            }
            audit(
                self._paths,
                f"{round.key} {decided['champion']} {decided['at']}",
                concluded["outcome"],
                concluded["reason"],
                details,
            )
            return {}

        self._stage(round, "recorded", make)

    def _say_data(self, validated: dict[str, Any]) -> None:
        if validated["problems"]:
            verb = f"accepted ({validated.get('because')}) although" if validated["accepted"] else "refused:"
            self._say("data", f"{verb} " + "\n           ".join(validated["problems"]))
        else:
            train, evaluation = validated["train"], validated["evaluation"]
            self._say("data", f"sound: {train['rows']:,} training rows, {evaluation['rows']:,} evaluation rows")

    def _say(self, what: str, text: str) -> None:
        self._console.print(redact(f"{what:<10} {text}"), markup=False, highlight=False, soft_wrap=True)
