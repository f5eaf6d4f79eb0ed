"""One start of a retraining (`retrain`), from the decision to the audit record, and the stages of a round (`Stages`).

A round is a chain of stages, each recorded once after its effects. Every effect can be repeated: the name of the run
depends on the round's key, so that the run is continued; a registered version is registered once; the alias may move to
the version that has it. So a start after a crash at any point continues the round and has the same outcome. A lease
lets only one scheduler at a time do this.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

from rich.console import Console

from ray_app.config.config import Config, default_tracking_uri
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
from ray_app.retrain.gate import (
    GUARD_METRIC,
    MAX_BLOCKS,
    Decision,
    compare_models,
    decide_promotion,
    score_packages,
)
from ray_app.retrain.options import RetrainSection, check_section
from ray_app.retrain.profile import ReferenceProfiles, find_problems
from ray_app.retrain.rounds import RetrainPaths, Round, add_audit_entry, current_time, open_rounds, read_delivery
from ray_app.retrain.situation import (
    KEY_TAG,
    Situation,
    StudyWinner,
    TriggerDecision,
    acquire_alias_lease,
    fetch_package,
    gate_request,
    load_champion,
    record_rollbacks,
)
from ray_app.runlog.lease import Lease, acquire_lease, check_lease, remove_old_fences
from ray_app.runlog.output import TextConsole
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact, register_secrets
from ray_app.storage.files import put_json, read_json, remove_tree, to_location
from ray_app.track.mlflow_client import connect
from ray_app.track.tracker import check_available


class InterruptedRunError(Exception):
    """The run was stopped by a signal; starting again continues it."""


class Stages:
    """The stages of one round, with the champion that served when it began; each returns the value to record."""

    def __init__(self, situation: Situation, round: Round, console: Console, at: Callable[[str], None]) -> None:
        self._situation = situation
        self._round = round
        self._console = console
        self._at = at

    def validate(self) -> dict[str, Any]:
        """Validates the delivered data; raises StorageError if it cannot be read now."""
        situation = self._situation
        result: dict[str, Any] = {"delivery": asdict(situation.delivery)}
        try:
            inspection = situation.inspection
        except StorageError:
            raise
        except DataError as error:
            return {**result, "problems": [str(error)], "accepted": False}
        reference = situation.champion.profiles if situation.champion is not None else ReferenceProfiles()
        train, evaluation = inspection.train, inspection.evaluation
        gate, agreement = inspection.gate, inspection.agreement
        duplicates = situation.delivery.find_duplicates()
        messages = find_problems(train, evaluation, gate, reference, agreement, duplicates, situation.section)
        result |= {"train": train.to_json(), "evaluation": evaluation.to_json(), "drift": inspection.drift}
        result |= {"gate": gate.profile.to_json()} if gate.profile is not None else {}
        return {
            **result,
            "agreement": asdict(agreement) if agreement is not None else None,
            "problems": messages,
            "accepted": not messages or situation.section.accept_data is not None,
            "because": situation.section.accept_data,
        }

    def train(self) -> dict[str, Any]:
        """Trains the run of this round's key, or continues it; raises InterruptedRunError if a signal stopped it.

        The winner of a study has trained already. Raises DataError for a row that cannot be used, and RegistryError if
        MLflow does not have the run.
        """
        if self._situation.winner is None:
            self._situation.connect()
            result = run_training(self._config, self._console, observe=lambda _: self._at("training"))
            if result.status == "interrupted":
                raise InterruptedRunError
        paths = RunPaths(to_location(self._config.run.storage_path) / str(self._config.run.name))
        if not (read_json(paths.tracking) or {}).get("run_id"):
            raise RegistryError(f"MLflow does not have the run {paths.name!r} yet; start again to send its record.")
        summary = read_json(paths.summary) or {}
        return {"run": paths.name} | {
            name: summary[name] for name in ("status", "steps", "rows", "params_digest", "best")
        }

    def register(self) -> dict[str, Any]:
        """Registers the run's best checkpoint as a version, which does not serve yet."""
        job, winner = prepare(self._config).job, self._situation.winner
        tags = {KEY_TAG: self._round.key} | (winner.tags if winner is not None else {})
        registered = register_best(job, self._situation.model, self._situation.uri, tags, first_serves=False)
        model = {"name": registered.name, "version": registered.version, "aliases": list(registered.aliases)}
        put_json(job.paths.summary, read_json(job.paths.summary) | {"model": model})
        return {
            "version": registered.version,
            "params_digest": version_of(self._situation.client, registered.name, registered.version).params_digest,
        }

    def judge(self) -> dict[str, Any]:
        """Scores champion and challenger on the same rows, by which no checkpoint was chosen, and decides."""
        situation, challenger = self._situation, self._challenger
        situation.connect()
        job = prepare(self._config).job
        models = {"challenger": fetch_package(situation.uri, challenger)}
        if situation.champion is not None:
            models["champion"] = situation.champion.files
        request = gate_request(job, situation.config, situation.section, models, MAX_BLOCKS)
        metric, mode = job.best_metric, job.best_mode
        section = situation.section
        [scored] = score_packages(job.task, (metric, GUARD_METRIC), [request], job.config.evaluate)
        chunks = (scored["challenger"], scored.get("champion"))
        result = compare_models(job.task, metric, mode, *chunks, situation.config.seed, section)
        return {"figures": asdict(result), "verdict": asdict(decide_promotion(result, section))}

    def conclude(self) -> dict[str, Any]:
        """Carries out the decision of the gate while no rollback can happen; the alias moves in the last call."""
        with acquire_alias_lease(self._situation.paths):
            return self._conclude()

    def _conclude(self) -> dict[str, Any]:
        situation, challenger = self._situation, self._challenger
        judged = self._round.read("judged") or {}
        decision = Decision(**judged["verdict"])
        champion_version = situation.champion.version.version if situation.champion is not None else None
        decision = self._confirm_champion(decision, challenger, champion_version)
        outcome = "promoted" if decision.promote else "gate refused"
        # If training gave the champion's parameters again, its tags and metrics must stay as they are.
        if challenger.version != champion_version:
            judged_s = datetime.fromisoformat(judged["at"]).timestamp()
            names = ("challenger", "champion", "gain", "low", "high", "rows")
            metrics = {f"gate_{name}": value for name in names if (value := judged["figures"][name]) is not None}
            log_metrics(situation.client, challenger, metrics, judged_s)
            tags = {
                KEY_TAG: self._round.key,
                "ray_app.gate": outcome,
                "ray_app.gate_reason": decision.reason,
                "ray_app.trained_because": (self._round.read("decided") or {})["decision"]["reason"],
                "ray_app.data_digest": self._round.inputs.data,
            }
            tag_version(situation.client, challenger, tags)
        if decision.promote:
            why = f"retraining: {decision.reason}"
            promote(situation.client, situation.model, challenger.version, why, user_name())
        result = {"outcome": outcome, "reason": decision.reason}
        return result | {"version": challenger.version, "before": champion_version}

    @property
    def _challenger(self) -> Version:
        version = (self._round.read("registered") or {})["version"]
        return version_of(self._situation.client, self._situation.model, version)

    def _confirm_champion(self, decision: Decision, challenger: Version, champion_version: str | None) -> Decision:
        """Returns the decision, or a refusal if the champion has changed since the comparison."""
        serving_version = champion_of(self._situation.client, self._situation.model)
        reason = decision.reason
        if challenger.version == champion_version:
            same = f"training gave exactly the parameters of the champion, version {champion_version}"
            return Decision(False, f"{reason}; {same}")
        # The challenger serves already if a crash came between the promotion and its record.
        if serving_version == challenger.version:
            return decision
        if "ray_app.rolled_back_at" in challenger.tags:
            because = f"were rolled back: {challenger.tags.get('ray_app.rolled_back_because', '')}"
            return Decision(False, f"{reason}; but these parameters, version {challenger.version}, {because}")
        if serving_version != champion_version:
            other = f"version {serving_version} has become the champion, but was not compared"
            return Decision(False, f"{reason}; but meanwhile {other}")
        return decision

    @cached_property
    def _config(self) -> Config:
        """The configuration of the round's run."""
        situation = self._situation
        if situation.winner is not None:
            return situation.winner.config
        fields: dict[str, Any] = {
            "run__name": situation.paths.run_name(situation.inputs.training_key),
            "tracking__registered_model": None,
        }
        if situation.section.gate_path is None:
            # The gate has the other half.
            fields["evaluate__half"] = "selection"
        if situation.section.start == "champion" and situation.champion is not None:
            fields["train__init_from"] = str(situation.champion.write_parameters())
        return situation.config.replace(**fields)


OutcomeKind = Literal["nothing", "would train", "promoted", "gate refused", "data refused", "interrupted"]
EXIT_CODES: dict[OutcomeKind, int] = {
    "nothing": 0,
    "would train": 0,
    "promoted": 0,
    "gate refused": 0,
    "data refused": 2,
    "interrupted": 75,
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a start.

    Args:
        kind: `nothing` (no reason to train), `would train` (of a dry run), `promoted`, `gate refused`, `data refused`,
            or `interrupted`.
    """

    kind: OutcomeKind
    reason: str
    version: str | None = None


def retrain(
    config: Config,
    section: RetrainSection,
    console: Console | None = None,
    at: Callable[[str], None] = lambda stage: None,
    winner: StudyWinner | None = None,
) -> Outcome:
    """Decides whether to train, and if so trains, compares and promotes or refuses.

    A start after a crash continues the round.

    Args:
        console: Shows the progress; by default on standard output.
        at: For fault tests: called with the name of each stage when its effects are done and not yet recorded, and
            with `training` a few times a second while the run trains.
        winner: The winner of a study with this configuration, which has trained already.

    Raises:
        ConfigError: The configuration is refused.
        RunHeldError: Another scheduler retrains this model.
        DataError: There is no data.
        StorageError: The data cannot be read now; the next start continues the round.
        RayAppError: The training failed, or MLflow refused a request; the next start continues the round.
    """
    check_section(config, section)
    check_available(config)
    register_secrets(config.to_dict())
    paths = RetrainPaths.of(config)
    with ExitStack() as stack:
        lease = None if section.dry_run else stack.enter_context(acquire_lease(RunPaths(paths.root)))
        if lease is not None:
            remove_old_fences(RunPaths(paths.root), lease.fence)
        return _RetrainingStart(config, section, paths, console or TextConsole(), at, lease, stack, winner).run()


class _RetrainingStart:
    """One start of a retraining: it finds a stopped round or decides whether to begin one, and takes it to its end."""

    def __init__(
        self,
        config: Config,
        section: RetrainSection,
        paths: RetrainPaths,
        console: Console,
        at: Callable[[str], None],
        lease: Lease | None,
        stack: ExitStack,
        winner: StudyWinner | None,
    ) -> None:
        self._section = section
        self._paths = paths
        self._console = console
        self._at = at
        self._lease = lease
        uri, self._name = default_tracking_uri(config), str(config.tracking.registered_model)
        self._client = connect(uri)
        delivery = read_delivery(config, paths.contents if lease is not None else None, section.gate_path)
        champion = load_champion(paths, self._client, self._name, uri, champion_of(self._client, self._name))
        self._situation = Situation(config, section, paths, self._client, delivery, champion, stack, winner)

    def run(self) -> Outcome:
        """Continues a stopped round, or decides and begins one; returns the outcome."""
        champion = self._situation.champion
        serving = f" version {champion.version.version}" if champion is not None else ": none yet"
        self._say("champion", f"{self._name}{serving}")
        if self._lease is not None:
            record_rollbacks(self._paths, self._client, self._name)
        stopped_round = self._find_stopped_round() if self._lease is not None else None
        if stopped_round is not None:
            reason = (stopped_round.read("decided") or {})["decision"]["reason"]
            self._say("decided", f"continuing the stopped round: {reason}")
            return self._finish(stopped_round)
        decision = self._decide()
        if isinstance(decision, Outcome):
            self._say(decision.kind, decision.reason)
            return decision
        return self._dry_run(decision) if self._lease is None else self._finish(self._begin(decision))

    @property
    def _winner_run(self) -> str | None:
        """The run directory of the study's winner; None for a round that trains."""
        winner = self._situation.winner
        return f"{winner.config.run.storage_path}/{winner.config.run.name}" if winner is not None else None

    def _find_stopped_round(self) -> Round | None:
        """Returns the round that was stopped, if its inputs are today's; closes stopped rounds with other inputs.

        If such a round has promoted its challenger already, the promotion is recorded before the round is closed.
        """
        matching_round = None
        for round in open_rounds(self._paths):
            decided = round.read("decided") or {}
            situation = self._situation.at_champion(decided["champion"])
            is_same_run = decided.get("run") == self._winner_run
            if matching_round is None and is_same_run and situation.inputs == round.inputs:
                matching_round = round
            elif round.read("concluded") is not None or self._has_promoted(round, decided):
                self._stage(round, "concluded", Stages(situation, round, self._console, self._at).conclude)
                self._record(round)
            else:
                self._supersede(round, decided)
        return matching_round

    def _has_promoted(self, round: Round, decided: dict[str, Any]) -> bool:
        """Returns whether the challenger of a round serves, but its promotion is not recorded."""
        champion = self._situation.champion
        if champion is None or round.read("judged") is None:
            return False
        return champion.version.tags.get(KEY_TAG) == round.key and champion.version.version != decided["champion"]

    def _supersede(self, round: Round, decided: dict[str, Any]) -> None:
        reason = "data, configuration or code changed before it was complete"
        details = {"key": round.key, "inputs": decided["inputs"], "decision": decided["decision"]}
        add_audit_entry(self._paths, f"superseded {round.key} {decided['at']}", "superseded", reason, details)
        # A version with this key may come to serve: then its data is looked up in the record of the round.
        if versions_with_tag(self._client, self._name, KEY_TAG, round.key):
            round.put("recorded", {"superseded": reason})
        else:
            remove_tree(self._paths.round(round.key))

    def _decide(self) -> TriggerDecision | Outcome:
        """Returns the decision to train, or the outcome if there is nothing to do."""
        round = Round(self._paths, self._situation.inputs.key)
        concluded = round.read("concluded") if round.is_done else None
        if concluded and self._is_overtaken(round, concluded):
            concluded = None
        earlier_result = f"{concluded['outcome']}: {concluded['reason']} ({concluded['at']})" if concluded else None
        if concluded and concluded["outcome"] == "data refused":
            refusal = f"the same data was refused before: {concluded['reason']} ({concluded['at']})"
            return Outcome("data refused", refusal)
        try:
            decision = self._situation.decide(earlier_result)
        except StorageError:
            raise
        except DataError as error:
            decision = TriggerDecision(True, "new data", f"the delivered data cannot be used: {error}")
        return decision if decision.retrain else Outcome("nothing", decision.reason)

    def _is_overtaken(self, round: Round, concluded: dict[str, Any]) -> bool:
        """Returns whether a round refused data or a model by a comparison with another champion than today's."""
        champion = self._situation.champion
        serves = champion.version.version if champion is not None else None
        if concluded["outcome"] == "data refused":
            return (round.read("decided") or {}).get("champion") != serves
        return concluded["outcome"] == "gate refused" and serves not in (concluded["before"], concluded["version"])

    def _begin(self, decision: TriggerDecision) -> Round:
        """Records the decision as the first stage of a new round."""
        round = Round(self._paths, self._situation.inputs.key)
        # An overtaken or superseded round may have the same key. Its entry in the audit record stays.
        round.clear()
        champion = self._situation.champion
        value = {
            "inputs": asdict(self._situation.inputs),
            "champion": champion.version.version if champion is not None else None,
            "decision": asdict(decision),
            "run": self._winner_run,
        }
        self._stage(round, "decided", lambda: value)
        self._say("decided", decision.reason)
        return round

    def _dry_run(self, decision: TriggerDecision) -> Outcome:
        self._say("decided", decision.reason)
        round = Round(self._paths, self._situation.inputs.key)
        validated = Stages(self._situation, round, self._console, self._at).validate()
        self._say_data(validated)
        if not validated["accepted"]:
            return Outcome("data refused", "; ".join(validated["problems"]))
        return Outcome("would train", decision.reason)

    def _finish(self, round: Round) -> Outcome:
        """Runs the remaining stages of a round."""
        situation = self._situation.at_champion((round.read("decided") or {})["champion"])
        stages = Stages(situation, round, self._console, self._at)
        validated = self._stage(round, "validated", stages.validate)
        self._say_data(validated)
        if not validated["accepted"]:
            return self._refuse_data(round, validated["problems"])
        try:
            trained = self._stage(round, "trained", stages.train)
        except InterruptedRunError:
            return Outcome("interrupted", "the run was stopped with a checkpoint; starting again continues it")
        except StorageError:
            # The storage may answer later: the data is not refused.
            raise
        except DataError as error:
            return self._refuse_data(round, [str(error)])
        self._say("trained", f"run {trained['run']}: {trained['status']}, {trained['steps']:,} steps")
        registered = self._stage(round, "registered", stages.register)
        self._say("registered", f"version {registered['version']}, the challenger")
        self._stage(round, "judged", stages.judge)
        concluded = self._stage(round, "concluded", stages.conclude)
        self._record(round)
        self._say(concluded["outcome"], f"version {concluded['version']}: {concluded['reason']}")
        return Outcome(concluded["outcome"], concluded["reason"], concluded["version"])

    def _refuse_data(self, round: Round, messages: list[str]) -> Outcome:
        """Records that the data is refused; the champion stays."""
        reason = "; ".join(messages)

        def conclude() -> dict[str, Any]:
            message = f"{current_time()}: {reason}"
            tags = {"ray_app.data_refused": message, "ray_app.refused_data_digest": round.inputs.data}
            tag_model(self._client, self._name, tags)
            return {"outcome": "data refused", "reason": reason}

        concluded = self._stage(round, "concluded", conclude)
        self._record(round)
        return Outcome("data refused", concluded["reason"])

    def _stage(self, round: Round, name: str, run_stage: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the record of a stage; runs the stage if it is not recorded."""
        record = round.read(name)
        if record is None:
            assert self._lease is not None
            check_lease(RunPaths(self._paths.root), self._lease.fence)
            value = run_stage()
            self._at(name)
            check_lease(RunPaths(self._paths.root), self._lease.fence)
            record = round.put(name, value)
        return record

    def _record(self, round: Round) -> None:
        """Adds the conclusion to the audit record and closes the round."""

        def add_entry() -> dict[str, Any]:
            concluded, decided, validated = (round.read(name) or {} for name in ("concluded", "decided", "validated"))
            details = {
                "key": round.key,
                "inputs": decided["inputs"],
                "decision": decided["decision"],
                "version": concluded.get("version"),
                "champion_before": decided["champion"],
                "run": (round.read("trained") or {}).get("run"),
                "figures": (round.read("judged") or {}).get("figures"),
                "validation": {name: validated.get(name) for name in ("problems", "agreement", "drift", "because")},
            }
            id = f"{round.key} {decided['champion']} {decided['at']}"
            add_audit_entry(self._paths, id, concluded["outcome"], concluded["reason"], details)
            return {}

        self._stage(round, "recorded", add_entry)

    def _say_data(self, validated: dict[str, Any]) -> None:
        if validated["problems"]:
            verb = f"accepted ({validated.get('because')}) although" if validated["accepted"] else "refused:"
            self._say("data", f"{verb} " + "\n           ".join(validated["problems"]))
        else:
            train, evaluation = validated["train"], validated["evaluation"]
            self._say("data", f"sound: {train['rows']:,} training rows, {evaluation['rows']:,} evaluation rows")

    def _say(self, kind: str, text: str) -> None:
        self._console.print(redact(f"{kind:<10} {text}"), markup=False, highlight=False, soft_wrap=True)
