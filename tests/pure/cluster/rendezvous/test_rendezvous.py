"""How generations form, driven without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from ray_app.cluster.rendezvous import rendezvous as module
from ray_app.cluster.rendezvous.rendezvous import Rendezvous
from ray_app.train.membership import Flags, GenerationInfo, Heartbeat

SILENCE_S = 5.0


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture
def clock() -> Clock:
    return CLOCK


def worker(name: str, **fields: Any) -> Heartbeat:
    return replace(Heartbeat(name, f"node-{name}", "host", ord(name)), **fields)


def in_generation(beat: Heartbeat, formed: GenerationInfo, step: int) -> Heartbeat:
    return replace(beat, generation=formed.number, rank=formed.rank, step=step, phase="compute", wait_number=0)


class Group:
    """Workers that join and beat."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self.beats: dict[str, Heartbeat] = {}
        self.tickets = 1
        self.waiting: list[str] = []

    async def join(self, names: str, lost: bool = False) -> None:
        for name in names:
            beat = self.beats.setdefault(name, worker(name))
            self.beats[name] = replace(beat, wait_number=self.tickets, lost=lost)
            self.tickets += 1
            await self.beat(name)
            self.waiting = [*(other for other in self.waiting if other != name), name]

    def formed(self, step: int = 0) -> dict[str, tuple[int, int, int]]:
        """(generation, rank, size) of those who are through."""
        found = {}
        for name in list(self.waiting):
            result = self.rendezvous.reply_for(name).formed
            if result is not None:
                self.beats[name] = in_generation(self.beats[name], result, step)
                found[name] = (result.number, result.rank, result.size)
                self.waiting.remove(name)
        return found

    async def beat(self, name: str) -> module.Orders:
        return self.rendezvous.handle_heartbeat(self.beats[name])


def play(story: Callable[[Group], Coroutine[Any, Any, None]], step_timeout_s: float | None = None) -> None:
    async def run() -> None:
        await story(Group(Rendezvous(SILENCE_S, step_timeout_s, CLOCK.monotonic)))

    asyncio.run(run())


async def start(group: Group, names: str, clock: Clock, step: int = 0) -> None:
    await group.rendezvous.set_expected(len(names))
    await group.join(names)
    assert len(group.formed(step)) == len(names)
    clock.now += 2 * SILENCE_S
    for name in names:
        await group.beat(name)


def test_the_first_generation_waits_for_everybody(clock: Clock) -> None:
    async def story(group: Group) -> None:
        await group.rendezvous.set_expected(3)
        await group.join("ab")
        clock.now += 100
        assert group.formed() == {}
        await group.join("c")
        assert group.formed() == {"a": (1, 0, 3), "b": (1, 1, 3), "c": (1, 2, 3)}

    play(story)


def test_fewer_than_the_least_number_wait_unless_the_run_stops(clock: Clock) -> None:
    async def story(group: Group) -> None:
        group.rendezvous = Rendezvous(SILENCE_S, None, CLOCK.monotonic, min_workers=2)
        await start(group, "ab", clock)
        await group.rendezvous.evict({"b"})
        await group.rendezvous.set_expected(1)
        await group.join("a", lost=True)
        clock.now += 10 * SILENCE_S
        group.rendezvous.check_liveness(clock.now - 10 * SILENCE_S)
        assert group.formed() == {}
        await group.join("c")
        await group.rendezvous.set_expected(2)
        assert group.formed() == {"a": (2, 0, 2), "c": (2, 1, 2)}
        await group.rendezvous.evict({"c"})
        await group.rendezvous.raise_flags(Flags.STOP)
        await group.join("a", lost=True)
        assert group.formed() == {"a": (3, 0, 1)}, "who is left saves"

    play(story)


def test_it_says_that_too_few_are_there_and_forms_what_is_left_once_one_has_ended(clock: Clock) -> None:
    async def story(group: Group) -> None:
        group.rendezvous = Rendezvous(SILENCE_S, None, CLOCK.monotonic, min_workers=2)
        assert (await group.rendezvous.status()).waiting is None
        await start(group, "ab", clock)
        assert (await group.rendezvous.status()).waiting is None
        await group.rendezvous.evict({"b"})
        assert (await group.rendezvous.status()).waiting == "1 of at least 2 workers; waiting for others"
        group.rendezvous = Rendezvous(
            SILENCE_S, None, CLOCK.monotonic, min_workers=2
        )  # started anew, after b has ended as it should
        await group.join("a", lost=True)
        clock.now += 10 * SILENCE_S
        await group.rendezvous.set_expected(2)
        assert group.formed() == {}
        await group.rendezvous.set_expected(2, over=True)
        assert [size for _, _, size in group.formed().values()] == [1]

    play(story)


def test_it_tells_who_steps_now_by_rank(clock: Clock) -> None:
    async def story(group: Group) -> None:
        await start(group, "abc", clock)
        assert [beat.worker for beat in await group.rendezvous.workers()] == ["a", "b", "c"]
        await group.rendezvous.evict({"a"})
        assert [(beat.worker, beat.rank) for beat in await group.rendezvous.workers()] == [("b", 1), ("c", 2)]
        await group.join("cb", lost=True)
        group.formed()
        assert [(beat.worker, beat.rank) for beat in await group.rendezvous.workers()] == [("b", 0), ("c", 1)]

    play(story)


def test_survivors_form_the_next_at_once_and_keep_their_order(clock: Clock) -> None:
    async def story(group: Group) -> None:
        await start(group, "abc", clock)
        await group.rendezvous.evict({"a"})
        assert (await group.beat("b")).abort
        assert (await group.beat("a")).exit
        await group.join("c", lost=True)
        assert group.formed() == {}
        await group.join("b", lost=True)
        assert group.formed() == {"b": (2, 0, 2), "c": (2, 1, 2)}
        assert not (await group.beat("b")).abort

    play(story)


def test_a_newcomer_joins_at_a_step_boundary_with_the_flag(clock: Clock) -> None:
    async def story(group: Group) -> None:
        await start(group, "ab", clock, step=7)
        await group.rendezvous.set_expected(3)
        assert (await group.beat("a")).flags == Flags(0)
        await group.join("c")
        orders = await group.beat("a")
        assert (orders.flags, orders.abort, orders.generation) == (Flags.REFORM, False, 1)
        await group.join("ba")
        assert group.formed() == {"a": (2, 0, 3), "b": (2, 1, 3), "c": (2, 2, 3)}
        assert (await group.beat("a")).flags == Flags(0)

    play(story)


def test_a_newcomer_does_not_wait_for_those_who_have_finished_the_run(clock: Clock) -> None:
    """It finds nothing left to do, and the run can end."""

    async def story(group: Group) -> None:
        await start(group, "ab", clock, step=7)
        await group.rendezvous.set_expected(3)
        await group.join("c")
        await group.rendezvous.leave(group.beats["a"], over=True)
        assert group.formed() == {}, "another one has not finished yet"
        await group.rendezvous.leave(group.beats["b"], over=True)
        assert group.formed() == {"c": (2, 0, 1)}

    play(story)


def test_newcomers_are_waited_for_together_but_not_long(clock: Clock) -> None:
    async def story(group: Group) -> None:
        await start(group, "a", clock)
        await group.rendezvous.set_expected(3)
        await group.join("b")
        assert (await group.beat("a")).flags == Flags(0)
        clock.now += 3
        assert (await group.beat("a")).flags == Flags.REFORM

    play(story)


def test_who_is_on_a_draining_node_leaves_and_the_others_go_on(clock: Clock) -> None:
    async def story(group: Group) -> None:
        await start(group, "ab", clock)
        await group.rendezvous.drain({"node-a"})
        first, second = await group.beat("a"), await group.beat("b")
        assert (first.flags, first.leave) == (Flags.REFORM, True)
        assert (second.flags, second.leave) == (Flags.REFORM, False)
        status = await group.rendezvous.status()
        assert (status.live, status.leaving) == ({"b"}, {"a"})
        await group.rendezvous.leave(group.beats["a"])
        await group.join("b")
        assert group.formed() == {"b": (2, 0, 1)}
        await group.rendezvous.drain({"node-a", "node-b"})
        assert (await group.beat("b")).flags == Flags.REFORM | Flags.SAVE, "the state has to be saved, nobody stays"

    play(story)


def test_a_newcomer_without_a_state_is_nobody_who_keeps_it(clock: Clock) -> None:
    """The only workers with one have to leave: they save it, and the newcomer begins when they have."""

    async def story(group: Group) -> None:
        await start(group, "ab", clock, step=7)
        await group.rendezvous.set_expected(3)
        await group.join("c")
        await group.rendezvous.drain({"node-a", "node-b"})
        assert (await group.beat("a")).flags == Flags.REFORM | Flags.SAVE
        await group.rendezvous.leave(group.beats["b"])
        await group.rendezvous.set_expected(1)
        assert group.formed() == {}, "a has not saved it yet"
        await group.rendezvous.leave(group.beats["a"])
        assert group.formed() == {"c": (2, 0, 1)}

    play(story)


def test_who_leaves_brings_a_step_that_nobody_else_has_finished_first(clock: Clock) -> None:
    """It finished the step in which another died, the others did not; found by the search (seed 18503)."""

    async def story(group: Group) -> None:
        await start(group, "abcd", clock, step=6)
        await group.rendezvous.drain({"node-b"})
        assert (await group.beat("b")).leave
        await group.rendezvous.evict({"d"})
        await group.join("ac", lost=True)
        assert group.formed() == {}, "b may have finished the step"
        group.beats["b"] = replace(group.beats["b"], step=7)
        await group.join("b", lost=True)
        assert group.formed(step=7) == {"a": (2, 0, 3), "b": (2, 1, 3), "c": (2, 2, 3)}
        orders = await group.beat("b")
        assert (orders.leave, orders.flags) == (True, Flags.REFORM), "it leaves after the next step"

    play(story)


def test_who_leaves_with_what_the_others_have_leaves_at_once(clock: Clock) -> None:
    async def story(group: Group) -> None:
        await start(group, "abc", clock, step=6)
        await group.rendezvous.drain({"node-b"})
        await group.rendezvous.evict({"c"})
        await group.join("b", lost=True)
        orders = await group.beat("b")
        assert (orders.leave, orders.is_for_waiting) == (True, True)
        await group.join("a", lost=True)
        assert group.formed() == {"a": (2, 0, 1)}

    play(story)


def test_a_sign_of_life_from_before_its_generation_takes_nobody_out_of_it(clock: Clock) -> None:
    """It is sent by another thread than the one that hears of the generation."""

    async def story(group: Group) -> None:
        await group.rendezvous.set_expected(1)
        await group.join("a")
        await group.beat("a")
        await group.join("b")
        assert group.formed() == {"a": (1, 0, 1)}

    play(story)


def test_a_new_instance_gives_no_number_again() -> None:
    rendezvous = Rendezvous(SILENCE_S, None, CLOCK.monotonic, first_generation=5000)
    asyncio.run(rendezvous.set_expected(1))
    formed = rendezvous.handle_heartbeat(worker("a", wait_number=1)).formed
    assert formed is not None
    assert formed.number == 5000


def test_below_the_minimum_all_wait_until_told_otherwise(clock: Clock) -> None:
    async def story(group: Group) -> None:
        await start(group, "ab", clock)
        await group.rendezvous.evict({"b"})
        await group.rendezvous.set_expected(1, "1 of at least 2 workers")
        await group.join("a", lost=True)
        assert group.formed() == {}
        assert (await group.rendezvous.status()).waiting == "1 of at least 2 workers"
        await group.rendezvous.raise_flags(Flags.STOP)
        await group.rendezvous.set_expected(1, "1 of at least 2 workers")
        assert group.formed() == {"a": (2, 0, 1)}, "a stop needs no minimum"

    play(story)


def test_silence_is_a_loss_and_the_silent_one_may_come_back(clock: Clock) -> None:
    async def story(group: Group) -> None:
        await start(group, "ab", clock)
        clock.now += SILENCE_S / 2
        await group.beat("a")
        clock.now += SILENCE_S
        await group.beat("a")
        group.rendezvous.check_liveness(clock.now)
        assert list((await group.rendezvous.status()).lost_for_s) == ["b"]
        await group.join("a", lost=True)
        assert group.formed() == {"a": (2, 0, 1)}
        assert (await group.beat("b")).abort, "its generation is over"
        await group.join("b", lost=True)
        assert (await group.beat("a")).flags == Flags.REFORM
        await group.join("a")
        assert group.formed() == {"a": (3, 0, 2), "b": (3, 1, 2)}

    play(story)


def test_a_new_instance_learns_from_heartbeats_who_is_there(clock: Clock) -> None:
    async def story(group: Group) -> None:
        await start(group, "ab", clock)
        group.rendezvous = Rendezvous(SILENCE_S, None, CLOCK.monotonic)
        await group.rendezvous.set_expected(2)
        assert not (await group.beat("a")).abort
        await group.join("b", lost=True)
        assert (await group.beat("a")).abort
        await group.join("a", lost=True)
        assert group.formed() == {"a": (2, 0, 2), "b": (2, 1, 2)}

    play(story)


def test_a_standstill_ends_who_holds_the_others_up(clock: Clock) -> None:
    async def story(group: Group) -> None:
        await start(group, "ab", clock, step=3)
        for step in (4, 5):
            for name in "ab":
                group.beats[name] = replace(group.beats[name], step=step)
                await group.beat(name)
        group.beats["a"] = replace(group.beats["a"], phase="reduction")
        group.beats["b"] = replace(group.beats["b"], phase="data")
        clock.now += 4
        assert not (await group.beat("a")).dump
        assert not (await group.beat("b")).exit
        clock.now += 4.5
        await group.beat("a")
        await group.beat("b")
        group.rendezvous.check_liveness(clock.now)
        orders = [await group.beat(name) for name in "bab"]
        assert [(order.dump, order.exit) for order in orders] == [(True, False), (True, False), (False, True)], (
            "a has not shown its stacks"
        )

    play(story, step_timeout_s=8.0)


@pytest.mark.parametrize("who", ["a worker", "a coordinator"])
def test_nobody_is_ended_for_a_slow_storage(clock: Clock, who: str) -> None:
    """With parameter servers all workers are in an exchange while the coordinator waits for it."""

    async def story(group: Group) -> None:
        await start(group, "ab", clock, step=3)
        for step in (4, 5):
            for name, phase in (("a", "saving" if who == "a worker" else "reduction"), ("b", "reduction")):
                group.beats[name] = replace(group.beats[name], step=step, phase=phase)
                await group.beat(name)
        for _ in range(20):
            clock.now += 4
            if who == "a coordinator":
                await group.rendezvous.pause_watchdog()
            orders = [await group.beat(name) for name in "ab"]
            group.rendezvous.check_liveness(clock.now)
            assert not any(order.abort or order.exit or order.dump for order in orders)
        group.beats["a"] = replace(group.beats["a"], phase="data")
        for _ in range(3):
            clock.now += 4
            for name in "ab":
                await group.beat(name)
            group.rendezvous.check_liveness(clock.now)
        assert (await group.beat("a")).exit, "it is a standstill all the same once nobody waits for the storage"

    play(story, step_timeout_s=8.0)


def test_a_stuck_collective_is_broken_and_if_that_does_not_help_all_are_ended(clock: Clock) -> None:
    async def story(group: Group) -> None:
        await start(group, "ab", clock, step=3)
        for step in (4, 5):
            for name in "ab":
                group.beats[name] = replace(group.beats[name], step=step, phase="reduction")
                await group.beat(name)
        for expected in ((True, False), (True, True)):
            clock.now += 4.5
            for name in "ab":
                await group.beat(name)
            clock.now += 4.5
            for name in "ab":
                await group.beat(name)
            group.rendezvous.check_liveness(clock.now)
            await group.beat("b")
            orders = await group.beat("a")
            assert (orders.abort, orders.exit) == expected

    play(story, step_timeout_s=8.0)


def test_who_begins_on_its_own_has_time_to(clock: Clock) -> None:
    """With parameter servers there are no generations to form; waiting for room, or for a new worker's first rows, is
    no standstill.
    """

    async def beat(group: Group, name: str, **fields: Any) -> bool:
        """Whether the worker is ended, after a look."""
        group.beats[name] = replace(group.beats.get(name, worker(name)), generation=1, **fields)
        await group.beat(name)
        group.rendezvous.check_liveness(clock.now)
        return (await group.beat(name)).exit

    async def story(group: Group) -> None:
        clock.now += 600  # there was no room
        assert not await beat(group, "a", phase="data")
        for step in (0, 1, 2):
            clock.now += 4
            assert not await beat(group, "a", phase="reduction", step=step)
        assert not await beat(group, "b", phase="data")
        for _ in range(9):
            clock.now += 4
            assert not await beat(group, "a")
            assert not await beat(group, "b")
        clock.now += 4.5
        assert not await beat(group, "a")
        assert await beat(group, "b"), "it hangs"

    play(story, step_timeout_s=8.0)


def test_flags_reach_all_workers_without_a_heartbeat(clock: Clock) -> None:
    async def story(group: Group) -> None:
        await start(group, "ab", clock)
        calls: list[Flags] = []
        group.rendezvous.on_change = lambda: calls.append(group.rendezvous.reply_for("a").flags)
        await group.rendezvous.raise_flags(Flags.STOP)
        assert calls == [Flags.STOP]
        await group.rendezvous.raise_flags(Flags.STOP)
        assert calls == [Flags.STOP], "nothing has changed"

    play(story)


def test_the_status_counts_steps_from_zero(clock: Clock) -> None:
    async def story(group: Group) -> None:
        assert (await group.rendezvous.status()).step == 0
        await start(group, "ab", clock, step=3)
        assert (await group.rendezvous.status()).step == 3

    play(story)


def test_a_worker_that_leaves_without_knowing_its_generation_breaks_it(clock: Clock) -> None:
    """It had to leave while it waited, and a generation formed with it before it said so."""

    async def story(group: Group) -> None:
        await start(group, "ab", clock)
        await group.rendezvous.set_expected(3)
        await group.join("c")
        waiting = group.beats["c"]
        await group.join("ab")
        assert sorted(group.formed()) == ["a", "b", "c"]
        await group.beat("a")
        assert not group.rendezvous.reply_for("a").abort
        await group.rendezvous.leave(waiting)
        assert group.rendezvous.reply_for("a").abort

    play(story)


def test_a_worker_that_leaves_at_the_end_of_its_generation_breaks_nothing(clock: Clock) -> None:
    async def story(group: Group) -> None:
        await start(group, "abc", clock)
        await group.rendezvous.leave(group.beats["c"])
        assert not group.rendezvous.reply_for("a").abort

    play(story)


def test_a_worker_that_comes_back_from_an_old_generation_keeps_no_watchdog_waiting(clock: Clock) -> None:
    async def story(group: Group) -> None:
        await start(group, "abc", clock)
        stale = group.beats["c"]
        group.rendezvous.on_disconnect("c")
        await group.join("ab", lost=True)
        assert sorted(group.formed(1)) == ["a", "b"]
        for name in "ab":
            await group.beat(name)
        group.beats["a"] = replace(group.beats["a"], step=2)
        await group.beat("a")
        limit_s = (await group.rendezvous.status()).limit_s
        group.rendezvous.handle_heartbeat(stale)
        assert (await group.rendezvous.status()).limit_s == limit_s

    play(story)
