"""The states of members and generations, and in which order members rank when a generation forms."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from ray_app.cluster.rendezvous.members import MEMBER_TRANSITIONS, Member, MemberProfile, Members, MemberState
from ray_app.cluster.rendezvous.rendezvous import FORMING_CONDITIONS, GenerationState, Rendezvous, sort_by_rank
from ray_app.train.membership import Flags, Heartbeat
from tests.support.paths import ROOT
from tests.support.rendezvous_world import KINDS_WITH_PARTITION, RendezvousWorld
from tests.support.worker_set import WorkerSet

PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_workers_of_one_host_have_adjacent_ranks_and_rank_0_has_the_state() -> None:
    members = Members()
    steps = {"a": ("one", -1), "b": ("two", 7), "c": ("one", 7), "d": ("two", -1)}
    for index, (worker, (host, step)) in enumerate(steps.items()):
        member = members.add(
            Heartbeat(worker, f"node of {host}", host, 1, 1, generation=3 if step >= 0 else 0, rank=index, step=step)
        )
        member.waiting_since_s = float(index)
    assert [m.heartbeat.worker for m in sort_by_rank(list(members))] == ["b", "d", "c", "a"]


def rows(head: str) -> dict[str, list[str]]:
    """Returns the states in the third column of a table of the page, by the state in its first column."""
    lines = PAGE.split(f"| {head} | when | ")[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    parts = {name: [part.split(":")[0] for part in then.split("; ")] for name, _, then in cells}
    states = {name: re.findall(r"\w+", " ".join(p for p in then if p != "none")) for name, then in parts.items()}
    return {name: [word for word in then if word in parts] for name, then in states.items()}


def test_the_page_has_the_transitions_of_the_code() -> None:
    code = {state.name.lower(): [then.name.lower() for then in to] for state, to in MEMBER_TRANSITIONS.items()}
    page = rows("a member is")
    assert list(page) == list(code)
    assert {name: sorted(then) for name, then in page.items()} == {name: sorted(then) for name, then in code.items()}


def test_the_page_has_the_states_of_a_generation_and_the_conditions_of_the_code() -> None:
    assert list(rows("a generation is")) == [state.value for state in GenerationState]
    conditions = PAGE.split("The conditions for the next generation")[1].split("The rendezvous raises REFORM")[0]
    assert re.findall(r"^\d\. `(\w+)`", conditions, re.MULTILINE) == [holds.__name__ for holds in FORMING_CONDITIONS]


@pytest.fixture
def observed_transitions(monkeypatch: pytest.MonkeyPatch) -> set[tuple[MemberState, MemberState]]:
    """Records the transitions of members that occur."""
    transitions = set[tuple[MemberState, MemberState]]()
    lost, exiting = set[str](), set[str]()
    change, start = Members.change_profile, Rendezvous.__init__
    report_exit, remove = Rendezvous.report_exit, Rendezvous.remove

    def watched_change(self: Members, member: Member, profile: MemberProfile) -> None:
        worker = member.heartbeat.worker
        before, after = member.profile.state, profile.state
        if after is MemberState.LOST:
            transitions.add((before, MemberState.EXITED if worker in exiting else MemberState.LOST))
            lost.add(worker)
        elif before is not after and (before is not MemberState.LOST or worker in lost):
            transitions.add((before, after))
            lost.discard(worker)
        change(self, member, profile)

    def watched_exit(self: Rendezvous, heartbeat: Heartbeat, over: bool = False) -> None:
        exiting.add(heartbeat.worker)
        report_exit(self, heartbeat, over)
        lost.discard(heartbeat.worker)

    def watched_remove(self: Rendezvous, workers: set[str]) -> None:
        remove(self, workers)
        transitions.update((MemberState.LOST, MemberState.REMOVED) for worker in workers if worker in lost)

    def watched_start(self: Rendezvous, *arguments: Any, **options: Any) -> None:
        lost.clear()
        exiting.clear()
        start(self, *arguments, **options)

    monkeypatch.setattr(Members, "change_profile", watched_change)
    monkeypatch.setattr(Rendezvous, "report_exit", watched_exit)
    monkeypatch.setattr(Rendezvous, "remove", watched_remove)
    monkeypatch.setattr(Rendezvous, "__init__", watched_start)
    return transitions


def test_members_make_exactly_the_transitions_of_the_table(
    observed_transitions: set[tuple[MemberState, MemberState]],
) -> None:
    """The test runs random schedules, and then the cases that these seldom or never contain."""
    for seed in range(600):
        shape = random.Random(seed)
        RendezvousWorld(
            seed, shape.randint(2, 5), shape.randint(4, 12), shape.randint(1, 6), KINDS_WITH_PARTITION
        ).run()
    server_worker = Rendezvous(5.0, None, lambda: 0.0)
    for generation in (0, 1):
        server_worker.handle_heartbeat(Heartbeat("a", "node", "host", 1, generation=generation))
    late = Rendezvous(5.0, None, lambda: 0.0)
    for heartbeat in (
        Heartbeat("a", "node", "host", 1, generation=1, step=1),
        Heartbeat("b", "node", "host", 1, generation=2, step=1),
    ):
        late.handle_heartbeat(heartbeat)
        late.on_disconnect(heartbeat.worker)
    late.handle_heartbeat(Heartbeat("a", "node", "host", 1, generation=1, step=1))
    late.on_disconnect("a")
    assert observed_transitions == {(state, then) for state, to in MEMBER_TRANSITIONS.items() for then in to}


def test_a_generation_passes_through_its_states() -> None:
    workers = WorkerSet()
    rendezvous = workers.rendezvous
    states = [rendezvous.generation_state]
    rendezvous.set_expected(2, "1 of at least 2 workers")
    states.append(rendezvous.generation_state)
    rendezvous.set_expected(2)
    for name in "ab":
        workers.join(name)
        states.append(rendezvous.generation_state)
    workers.formed(step=0)
    for phase in ("forming", "compute"):
        for name in "ab":
            workers.beat(name, phase=phase)
        states.append(rendezvous.generation_state)
    rendezvous.on_disconnect("b")
    states.append(rendezvous.generation_state)
    rendezvous.report_exit(workers.heartbeats["a"], over=True)
    rendezvous.raise_flags(Flags.STOP)
    states.append(rendezvous.generation_state)
    assert [state.value for state in states] == [
        *("gathering", "paused", "gathering", "stepping", "forming", "stepping", "broken", "broken")
    ]
