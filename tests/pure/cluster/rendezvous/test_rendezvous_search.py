"""Random schedules of all events of workers around the real rendezvous: see `tests/support/rendezvous_world.py`."""

import random
import time

import pytest

from ray_app.cluster.rendezvous import members
from tests.support.rendezvous_world import KINDS, KINDS_WITH_PARTITION, InvariantViolationError, RendezvousWorld
from tests.support.worker_set import WorkerSet


def search(first: int, schedules: int, limit_s: float, kinds: tuple[str, ...] = KINDS) -> int:
    """Runs schedules until all are done or the time is up; returns how many ran."""
    until_s = time.monotonic() + limit_s
    for seed in range(first, first + schedules):
        shape = random.Random(seed)
        RendezvousWorld(seed, shape.randint(1, 5), shape.randint(4, 12), shape.randint(1, 6), kinds).run()
        if time.monotonic() > until_s:
            return seed + 1 - first
    return schedules


@pytest.mark.parametrize("kinds", [KINDS, KINDS_WITH_PARTITION], ids=["", "partition"])
def test_no_random_schedule_violates_an_invariant(kinds: tuple[str, ...]) -> None:
    """Each case takes 0.3 s of one core."""
    assert search(0, 500, 120, kinds) == 500


def test_a_draining_worker_does_not_take_the_only_copy_of_a_step() -> None:
    """Seed 18503: the only worker that has finished a step is on a draining node when another worker dies."""
    RendezvousWorld(18503, 5, 12, 2).run()


def test_a_partitioned_worker_may_start_an_outdated_generation_behind_the_newest() -> None:
    """Seed 29057: w1, alone and cut off, starts generation 1 at step 0 after w2 has done 2 steps in generation 2001.

    That is correct: without the rendezvous w1 cannot know, and it does no harm. Its steps are bit-identical to those of
    the others, its writes replace nothing, and the rendezvous aborts the generation when w1 is reachable again. The
    newest generation may never start behind, even if some of its workers are cut off.
    """
    world = RendezvousWorld(29057, 1, 6, 6)
    world.run()
    starts = [line.split("  ")[-1] for line in world.log if "begins at step" in line]
    assert starts[:2] == ["generation 2001 of w2, w3 begins at step 0", "generation 1 of w1 begins at step 0"]


def test_workers_that_cannot_reach_each_other_abandon_the_generation_and_re_form() -> None:
    world = RendezvousWorld(1, 2, 6, 0)
    world.live[0].partitioned_until_s = world.now + 12
    world.run()
    lost = [line for line in world.log if "lost a peer" in line]
    assert len(lost) == 2, "\n".join(world.log)
    assert world.finished_steps == 6


@pytest.mark.search
@pytest.mark.parametrize("part", range(10))
def test_no_schedule_of_the_long_search_violates_an_invariant(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of the ten parts runs 20,000 schedules and takes 12 s of one core."""
    schedules = search(10_000 + 20_000 * part, 20_000, 600, (KINDS, KINDS_WITH_PARTITION)[part % 2])
    with capsys.disabled():
        print(f" {schedules} schedules of the rendezvous")
    assert schedules == 20_000, "the part did not finish within ten minutes"


@pytest.mark.rest
@pytest.mark.parametrize("workers", [100, 1000])
def test_schedules_of_many_workers_violate_no_invariant(workers: int) -> None:
    for seed in range(5):
        RendezvousWorld(seed, workers, 4, 4).run()


def test_the_search_detects_a_pending_worker_that_counts_as_a_holder_of_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This puts back the bug that the search was written for."""
    monkeypatch.setattr(members, "_has_state", lambda beat: True)
    with pytest.raises(InvariantViolationError, match=r"(?s)drain.*no other worker has it|begins with step"):
        search(0, 2000, 120)


def test_a_thousand_workers_form_their_next_generation_in_linear_time() -> None:
    """A comparison of each joining worker with all others once left heartbeats unanswered for minutes."""
    workers, names = WorkerSet(), [f"w{i}" for i in range(1000)]
    workers.rendezvous.set_expected(len(names))
    start_s = time.process_time()
    for generation in (1, 2):
        workers.join(names, was_broken=generation > 1)
        assert {number for number, _, _ in workers.formed(generation).values()} == {generation}
    assert time.process_time() - start_s < 5
