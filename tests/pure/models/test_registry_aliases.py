"""Random histories of a registered model: versions that are registered, promoted and rolled back, each stopped anywhere
and done again.

What serves changes only by the last call of a promotion or a rollback, and always says why it serves; the same
parameters of a run are one version; nothing that was rolled back is gone back to; what was stopped and is done again
ends as if it had not been stopped.
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
"""Calls that go through before one is lost; most acts need fewer."""


class Aliases(RuleBasedStateMachine):
    """One person at a time, whose connection breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.client = MemoryClient()
        self.complete: set[tuple[str, str]] = set()
        self.serves: str | None = None
        self.replaced: dict[str, str] = {}
        self.reasons = 0
        self.left: dict[str, bool] = {}
        """Versions that were rolled back, and whether nothing has touched that record since."""

    def _stopped(self, calls: int, after: bool, act: Callable[[], Any]) -> bool:
        """Does something with a connection that breaks; returns whether it was stopped."""
        self.client.left, self.client.after = calls, after
        try:
            act()
        except LostError:
            return True
        finally:
            self.client.left = -1
        return False

    def _now(self) -> str | None:
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
            stopped = self._stopped(calls, after, act)
            if stopped and again:
                act()
        if not stopped or again:
            made = act()
            if is_new:
                assert CHALLENGER in made.aliases
            self.complete.add((run, params))
        self.serves = self._now()
        assert before is None or self.serves == before, "a registration has changed what serves"
        if before is None and self.serves is not None:
            self.replaced[self.serves] = "none"

    @property
    def versions(self) -> list[str]:
        return [v.version for v in self.client.versions.get(NAME, [])]

    @precondition(lambda self: self.versions)
    @rule(data=st.data(), calls=CALLS, after=st.booleans(), again=st.booleans())
    def promote(self, data: st.DataObject, calls: int, after: bool, again: bool) -> None:
        version, before = data.draw(st.sampled_from(self.versions)), self.serves
        stopped = self._stopped(calls, after, lambda: promote(self.client, NAME, version, "better", "me"))
        if stopped and again:
            promote(self.client, NAME, version, "better", "me")
        self.serves = self._now()
        assert self.serves in ((version,) if not stopped or again else (version, before))
        if self.serves == version != before:
            self.replaced[version] = before or "none"
            self.left.pop(version, None)
        elif version != before and version in self.left:
            self.left[version] = False

    @precondition(lambda self: self.serves is not None)
    @rule(calls=CALLS, after=st.booleans(), again=st.booleans())
    def rollback(self, calls: int, after: bool, again: bool) -> None:
        now = self.serves
        assert now is not None
        to = self.replaced[now]
        self.reasons += 1
        reason = f"worse, for the {self.reasons}. time"
        try:
            stopped = self._stopped(calls, after, lambda: rollback(self.client, NAME, reason, "me"))
            if stopped and again:
                assert rollback(self.client, NAME, reason, "me").to == to
        except RegistryError:
            assert to == "none" or to in self.left, "what could be gone back to"
            assert self._now() == now
            return
        self.serves = self._now()
        assert self.serves in ((to,) if not stopped or again else (to, now))
        if self.serves != now:
            assert to not in self.left or not self.left[to], "it was rolled back itself"
            self.left[now] = True

    @invariant()
    def what_serves_says_why(self) -> None:
        if self.serves is None:
            return
        assert champion_of(self.client, NAME) == self.serves
        tags = self.client._one(NAME, self.serves).tags
        assert tags["ray_app.promoted_because"]
        assert tags["ray_app.replaces"] == self.replaced[self.serves]

    @invariant()
    def the_same_parameters_of_a_run_are_one_version(self) -> None:
        found = [(v.tags[RUN_UUID], v.tags[PARAMS_DIGEST]) for v in self.client.versions.get(NAME, [])]
        assert len(set(found)) == len(found)
        assert self.complete <= set(found)

    @invariant()
    def rollbacks_are_on_record(self) -> None:
        found = {one.version for one in rollbacks(self.client, NAME)} if NAME in self.client.models else set()
        assert {version for version, whole in self.left.items() if whole} <= found <= self.left.keys()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """One person does nothing twice in a second."""
    seconds = itertools.count()
    monkeypatch.setattr(registry, "_now", lambda: f"2026-01-01T{next(seconds):012d}")


SOME = settings(max_examples=12, stateful_step_count=20, deadline=None)
MANY = settings(max_examples=400, stateful_step_count=40, deadline=None)


def test_some_histories() -> None:
    run_state_machine_as_test(Aliases, settings=SOME)


def made(client: MemoryClient, run: str) -> str | None:
    """Registers a run's parameters; returns what serves then."""
    with patch.object(registry, "upload", lambda *_: "somewhere"):
        register(client, NAME, run, run, run, {}, lambda folder: Package(Path(folder), "f", "one", ()), "me")
    return champion_of(client, NAME)


@pytest.mark.parametrize("versions", [1, 2])
def test_where_the_champion_was_taken_away_no_other_version_serves_by_itself(versions: int) -> None:
    client = MemoryClient()
    assert [made(client, run) for run in "ab"[:versions]] == ["1"] * versions
    del client.models[NAME].aliases["champion"]
    assert made(client, "c") is None
    assert "ray_app.promoted_at" not in client._one(NAME, str(versions + 1)).tags


@pytest.mark.parametrize("after", [False, True])
def test_the_first_version_serves_wherever_its_registration_was_stopped(after: bool) -> None:
    for calls in range(30):
        client = MemoryClient()
        client.left, client.after = calls, after
        try:
            made(client, "a")
        except LostError:
            client.left = -1
            assert made(client, "a") == "1"
        else:
            assert calls > 5
            break


@pytest.mark.search
def test_many_histories() -> None:
    run_state_machine_as_test(Aliases, settings=MANY)


@pytest.mark.search
def test_a_promotion_that_moves_the_alias_first_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(client: Any, name: str, version: str, reason: str, by: str) -> bool:
        client.set_registered_model_alias(name, "champion", version)
        return registry.promote(client, name, version, reason, by)

    monkeypatch.setitem(globals(), "promote", hasty)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Aliases, settings=settings(MANY, phases=(Phase.generate,)))
