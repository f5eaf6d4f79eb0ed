"""Random schedules of everything that happens to workers, around the real rendezvous: see
`tests/support/rendezvous_world.py`.
"""

from __future__ import annotations

import random
import time

import pytest

from ray_app.cluster.rendezvous import members, rendezvous
from ray_app.train.membership import Heartbeat
from tests.support.rendezvous_world import KINDS, PARTED, BrokenPromiseError, World


def search(first: int, schedules: int, limit_s: float, kinds: tuple[str, ...] = KINDS) -> int:
    """Plays schedules until they or the time are up; returns how many."""
    until_s = time.monotonic() + limit_s
    for seed in range(first, first + schedules):
        shape = random.Random(seed)
        World(seed, shape.randint(1, 5), shape.randint(4, 12), shape.randint(1, 6), kinds).run()
        if time.monotonic() > until_s:
            return seed + 1 - first
    return schedules


@pytest.mark.parametrize("kinds", [KINDS, PARTED], ids=["", "parted"])
def test_no_schedule_breaks_a_promise(kinds: tuple[str, ...]) -> None:
    """1.2 s of one core each."""
    assert search(0, 2000, 120, kinds) == 2000


def test_who_leaves_takes_no_step_along() -> None:
    """Found at seed 18503: the only one that has finished a step is on a node that goes away when another dies."""
    World(18503, 5, 12, 2).run()


def test_who_cannot_hear_that_its_generation_is_over_may_begin_it_behind() -> None:
    """Found at seed 29057: w1, alone and cut off, begins generation 1 at step 0 when w2 has made 2 steps in generation
    2001.

    That is right: without the rendezvous it cannot know, and it harms nobody. Its steps have the bits that others gave
    theirs, what it writes replaces nothing, and when it is heard again it is told to give the generation up. A
    generation that is the newest has no such excuse, whoever of it is cut off.
    """
    world = World(29057, 1, 6, 6)
    world.run()
    begun = [line.split("  ")[-1] for line in world.story if "begins at step" in line]
    assert begun[:2] == ["generation 2001 of w2, w3 begins at step 0", "generation 1 of w1 begins at step 0"]


def test_workers_that_cannot_reach_each_other_abandon_the_generation_and_re_form() -> None:
    world = World(1, 2, 6, 0)
    world.live[0].apart_until_s = world.now + 12
    world.run()
    lost = [line for line in world.story if "lost a peer" in line]
    assert len(lost) == 2, "\n".join(world.story)
    assert world.made == 6


@pytest.mark.search
@pytest.mark.parametrize("part", range(10))
def test_no_schedule_of_many_breaks_a_promise(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    """20,000 each, 200,000 in all: 12 s of one core each."""
    played = search(10_000 + 20_000 * part, 20_000, 600, (KINDS, PARTED)[part % 2])
    with capsys.disabled():
        print(f" {played} schedules of the rendezvous")
    assert played == 20_000, "ten minutes were not enough"


@pytest.mark.rest
@pytest.mark.parametrize("workers", [100, 1000])
def test_many_workers(workers: int) -> None:
    for seed in range(5):
        World(seed, workers, 4, 4).run()


def test_a_newcomer_that_counted_as_one_who_keeps_the_state_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that this search was made for, put back."""
    monkeypatch.setattr(members, "_has_state", lambda beat: True)
    with pytest.raises(BrokenPromiseError, match=r"(?s)drain.*nobody else has it|begins with step"):
        search(0, 2000, 120)


def test_a_thousand_workers_form_their_next_generation_at_once() -> None:
    """Each that came was compared with all, for minutes in which nobody's sign of life was answered."""
    meeting, workers = rendezvous.Rendezvous(60.0, 60.0), range(1000)
    meeting._expected = len(workers)
    began_s = time.process_time()
    for generation in (0, 1):
        beats = [
            Heartbeat(
                f"w{i}",
                "node",
                "host",
                1,
                generation=generation,
                rank=i,
                step=generation,
                wait_number=1 + generation,
                lost=bool(generation),
            )
            for i in workers
        ]
        for beat in beats:
            meeting.handle_heartbeat(beat)
        formed = [meeting.reply_for(beat.worker).formed for beat in beats]
        assert {each.number for each in formed if each} == {generation + 1}
        assert None not in formed
    assert time.process_time() - began_s < 5
