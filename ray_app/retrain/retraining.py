"""One start of a retraining, from the decision to the audit record.

A round is a chain of stages, each recorded once after its effects, and every effect can be repeated: the run has a name made of its key and
is continued, the version is found again, the alias moves to where it is already. So a start after a crash at any point goes on and comes to
the same outcome. One scheduler at a time: all of it happens under a lease.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console

from ray_app.config.config import Config, default_tracking_uri
from ray_app.errors import DataError, StorageError
from ray_app.models.versions import tag_model, tagged
from ray_app.record.files import remove_tree
from ray_app.record.lease import Lease, acquire, forget_older, refuse_if_lost
from ray_app.record.paths import RunPaths
from ray_app.record.redact import guard, redact
from ray_app.retrain.champion import KEY_TAG
from ray_app.retrain.key import delivered
from ray_app.retrain.paths import RetrainPaths
from ray_app.retrain.rollback import record_rollbacks
from ray_app.retrain.rounds import Round, audit, now, open_rounds
from ray_app.retrain.section import RetrainSection, check_section
from ray_app.retrain.situation import Situation, champion_now
from ray_app.retrain.stages import InterruptedRunError, Stages
from ray_app.retrain.triggers import Triggered
from ray_app.track.client import connect
from ray_app.track.runs import check_available

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
        what: `nothing` was to be done, `would train` (of a dry run), `promoted`, `gate refused`, `data refused`, or `interrupted`.
        reason: Why, with figures.
        version: The version that was made.
    """

    what: What
    reason: str
    version: str | None = None


def retrain(
    config: Config, section: RetrainSection, console: Console | None = None, at: Callable[[str], None] = lambda stage: None
) -> Outcome:
    """Decides whether to train, and if so trains, compares and promotes or refuses; starting again after a crash goes on.

    Args:
        config: The configuration of the runs.
        section: How to retrain.
        console: Where to say how it gets on; not given: standard output.
        at: For fault tests: called with the name of each stage when its effects are done and not recorded, and with `training` a few times
            a second while that goes on.

    Raises:
        ConfigError: The configuration is refused.
        RunHeldError: Another scheduler retrains this model.
        DataError: There is no data.
        StorageError: The data cannot be read now; starting again goes on.
        RayAppError: The training failed, or MLflow refused something; starting again goes on.
    """
    check_section(config, section)
    check_available(config)
    guard(config.to_dict())
    paths = RetrainPaths.of(config)
    with ExitStack() as stack:
        lease = None if section.dry_run else stack.enter_context(acquire(RunPaths(paths.root)))
        if lease is not None:
            forget_older(RunPaths(paths.root), lease.fence)
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
        self._say("champion", f"{self._name} version {champion.version.version}" if champion is not None else f"{self._name}: none yet")
        if self._lease is not None:
            record_rollbacks(self._paths, self._client, self._name)
        opened = self._continued() if self._lease is not None else None
        if opened is not None:
            self._say("decided", f"going on with what was stopped: {(opened.read('decided') or {})['decision']['reason']}")
            return self._finish(opened)
        made = self._decided()
        if isinstance(made, Outcome):
            self._say("nothing" if made.what == "nothing" else made.what, made.reason)
            return made
        return self._dry_run(made) if self._lease is None else self._finish(self._begun(made))

    def _continued(self) -> Round | None:
        """The round that was stopped, if it is about the same; others are closed, since what they were about is no more.

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
        if tagged(self._client, self._name, KEY_TAG, round.key):  # a version says by it what data it is of, and may come to serve
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
            tag_model(self._client, self._name, {"ray_app.data_refused": told, "ray_app.refused_data_digest": round.inputs.data})
            return {"outcome": "data refused", "reason": reason}

        concluded = self._stage(round, "concluded", conclude)
        self._record(round)
        return Outcome("data refused", concluded["reason"])

    def _stage(self, round: Round, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What a stage came to, now or before."""
        found = round.read(name)
        if found is None:
            assert self._lease is not None
            refuse_if_lost(RunPaths(self._paths.root), self._lease.fence)
            made = make()
            self._at(name)
            refuse_if_lost(RunPaths(self._paths.root), self._lease.fence)
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
                "validation": {name: (round.read("validated") or {}).get(name) for name in ("problems", "agreement", "drift", "because")},
            }
            audit(self._paths, f"{round.key} {decided['champion']} {decided['at']}", concluded["outcome"], concluded["reason"], details)
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
