"""Random histories of a registered model: registrations, promotions and rollbacks, interrupted and repeated.

The champion changes only by the last call of a promotion or a rollback, and always has a reason. The same parameters of
a run are one version. No rollback returns to a version that was rolled back itself. An act that was interrupted and
repeated has the same result as one that was not interrupted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from ray_app.errors import RegistryError
from ray_app.models import registry
from ray_app.models.package import Package
from ray_app.models.registry import (
    CHALLENGER,
    PARAMS_DIGEST,
    RUN_UUID,
    champion_of,
    promote,
    register,
    rollback,
    rollbacks,
)
from tests.support.mlflow_memory import LostError, MemoryClient

NAME = "m"
CALLS = st.integers(0, 14)
"""Calls that succeed before one is lost; most acts need fewer."""


class RegistryMachine(RuleBasedStateMachine):
    """One user at a time, with a connection that breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.client = MemoryClient()
        self.complete: set[tuple[str, str]] = set()
        self.serves: str | None = None
        self.replaced: dict[str, str] = {}
        self.reasons = 0
        self.rolled_back: dict[str, bool] = {}
        """Versions that were rolled back, and whether that record is unchanged since."""

    def _is_interrupted(self, calls: int, after: bool, act: Callable[[], Any]) -> bool:
        """Runs an act with a connection that breaks; returns whether it was interrupted."""
        self.client.calls_left, self.client.fails_after_call = calls, after
        try:
            act()
        except LostError:
            return True
        finally:
            self.client.calls_left = -1
        return False

    def _champion(self) -> str | None:
        return self.client.models[NAME].aliases.get("champion") if NAME in self.client.models else None

    @rule(
        run=st.sampled_from("ab"), params=st.sampled_from("xyz"), calls=CALLS, after=st.booleans(), again=st.booleans()
    )
    def register(self, run: str, params: str, calls: int, after: bool, again: bool) -> None:
        def act() -> Any:
            return register(
                self.client, NAME, run, run, params, {}, lambda folder: Package(Path(folder), "f", "one", ()), "me"
            )

        before = self.serves
        is_new = registry.find(self.client, NAME, run, params) is None
        with patch.object(registry, "upload", lambda *_: "somewhere"):
            stopped = self._is_interrupted(calls, after, act)
            if stopped and again:
                act()
        if not stopped or again:
            model_version = act()
            if is_new:
                assert CHALLENGER in model_version.aliases
            self.complete.add((run, params))
        self.serves = self._champion()
        assert before is None or self.serves == before, "a registration has changed the champion"
        if before is None and self.serves is not None:
            self.replaced[self.serves] = "none"

    @property
    def versions(self) -> list[str]:
        return [v.version for v in self.client.versions.get(NAME, [])]

    @precondition(lambda self: self.versions)
    @rule(data=st.data(), calls=CALLS, after=st.booleans(), again=st.booleans())
    def promote(self, data: st.DataObject, calls: int, after: bool, again: bool) -> None:
        version, before = data.draw(st.sampled_from(self.versions)), self.serves
        stopped = self._is_interrupted(calls, after, lambda: promote(self.client, NAME, version, "better", "me"))
        if stopped and again:
            promote(self.client, NAME, version, "better", "me")
        self.serves = self._champion()
        assert self.serves in ((version,) if not stopped or again else (version, before))
        if self.serves == version != before:
            self.replaced[version] = before or "none"
            self.rolled_back.pop(version, None)
        elif version != before and version in self.rolled_back:
            self.rolled_back[version] = False

    @precondition(lambda self: self.serves is not None)
    @rule(calls=CALLS, after=st.booleans(), again=st.booleans())
    def rollback(self, calls: int, after: bool, again: bool) -> None:
        champion = self.serves
        assert champion is not None
        previous = self.replaced[champion]
        self.reasons += 1
        reason = f"worse, for the {self.reasons}. time"
        try:
            stopped = self._is_interrupted(calls, after, lambda: rollback(self.client, NAME, reason, "me"))
            if stopped and again:
                assert rollback(self.client, NAME, reason, "me").to == previous
        except RegistryError:
            assert previous == "none" or previous in self.rolled_back, (
                "the rollback was refused although the version before could be restored"
            )
            assert self._champion() == champion
            return
        self.serves = self._champion()
        assert self.serves in ((previous,) if not stopped or again else (previous, champion))
        if self.serves != champion:
            assert previous not in self.rolled_back or not self.rolled_back[previous], (
                "the restored version was rolled back itself"
            )
            self.rolled_back[champion] = True

    @invariant()
    def the_champion_has_a_reason(self) -> None:
        if self.serves is None:
            return
        assert champion_of(self.client, NAME) == self.serves
        tags = self.client.stored_version(NAME, self.serves).tags
        assert tags["ray_app.promoted_because"]
        assert tags["ray_app.replaces"] == self.replaced[self.serves]

    @invariant()
    def the_same_parameters_of_a_run_are_one_version(self) -> None:
        recorded = [(v.tags[RUN_UUID], v.tags[PARAMS_DIGEST]) for v in self.client.versions.get(NAME, [])]
        assert len(set(recorded)) == len(recorded)
        assert self.complete <= set(recorded)

    @invariant()
    def rollbacks_are_on_record(self) -> None:
        recorded = {record.version for record in rollbacks(self.client, NAME)} if NAME in self.client.models else set()
        assert (
            {version for version, is_unchanged in self.rolled_back.items() if is_unchanged}
            <= recorded
            <= self.rolled_back.keys()
        )


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each act its own second."""
    seconds = itertools.count()
    monkeypatch.setattr(registry, "_now", lambda: f"2026-01-01T{next(seconds):012d}")


SOME = settings(max_examples=12, stateful_step_count=20, deadline=None)
MANY = settings(max_examples=400, stateful_step_count=40, deadline=None)


def test_a_few_random_histories_of_the_registry() -> None:
    run_state_machine_as_test(RegistryMachine, settings=SOME)


def register_run(client: MemoryClient, run: str) -> str | None:
    """Registers a run's parameters; returns the champion after that."""
    with patch.object(registry, "upload", lambda *_: "somewhere"):
        register(client, NAME, run, run, run, {}, lambda folder: Package(Path(folder), "f", "one", ()), "me")
    return champion_of(client, NAME)


@pytest.mark.parametrize("versions", [1, 2])
def test_no_version_becomes_champion_after_the_alias_was_removed(versions: int) -> None:
    client = MemoryClient()
    assert [register_run(client, run) for run in "ab"[:versions]] == ["1"] * versions
    del client.models[NAME].aliases["champion"]
    assert register_run(client, "c") is None
    assert "ray_app.promoted_at" not in client.stored_version(NAME, str(versions + 1)).tags


@pytest.mark.parametrize("after", [False, True])
def test_the_first_version_becomes_champion_despite_an_interruption(after: bool) -> None:
    for calls in range(30):
        client = MemoryClient()
        client.calls_left, client.fails_after_call = calls, after
        try:
            register_run(client, "a")
        except LostError:
            client.calls_left = -1
            assert register_run(client, "a") == "1"
        else:
            assert calls > 5
            break


@pytest.mark.search
def test_many_random_histories_of_the_registry() -> None:
    run_state_machine_as_test(RegistryMachine, settings=MANY)


@pytest.mark.search
def test_the_histories_detect_a_promotion_that_moves_the_alias_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(client: Any, name: str, version: str, reason: str, by: str) -> bool:
        client.set_registered_model_alias(name, "champion", version)
        return registry.promote(client, name, version, reason, by)

    monkeypatch.setitem(globals(), "promote", hasty)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(RegistryMachine, settings=settings(MANY, phases=(Phase.generate,)))
