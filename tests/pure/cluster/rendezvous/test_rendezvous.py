"""How the rendezvous forms generations, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from ray_app.cluster.rendezvous.rendezvous import Rendezvous
from ray_app.train.membership import Flags, GenerationInfo, Heartbeat, HeartbeatReply

SILENCE_S = 5.0


class Clock:
    """A clock that the test moves."""

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
    fields: Any = {"generation": formed.number, "rank": formed.rank, "step": step, "phase": "compute"}
    return replace(beat, wait_number=0, lost=False, **fields)


class Group:
    """Workers that join the rendezvous and send heartbeats."""

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
        """Returns generation, rank and size for each worker that a generation has formed with."""
        placements = {}
        for name in list(self.waiting):
            result = self.rendezvous.reply_for(name).formed
            if result is not None:
                self.beats[name] = in_generation(self.beats[name], result, step)
                placements[name] = (result.number, result.rank, result.size)
                self.waiting.remove(name)
        return placements

    async def beat(self, name: str) -> HeartbeatReply:
        return self.rendezvous.handle_heartbeat(self.beats[name])


def run_scenario(scenario: Callable[[Group], Coroutine[Any, Any, None]], step_timeout_s: float | None = None) -> None:
    async def run() -> None:
        await scenario(Group(Rendezvous(SILENCE_S, step_timeout_s, CLOCK.monotonic)))

    asyncio.run(run())


async def start(group: Group, names: str, clock: Clock, step: int = 0) -> None:
    await group.rendezvous.set_expected(len(names))
    await group.join(names)
    assert len(group.formed(step)) == len(names)
    clock.now += 2 * SILENCE_S
    for name in names:
        await group.beat(name)


def test_the_first_generation_waits_for_all_expected_workers(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
        await group.rendezvous.set_expected(3)
        await group.join("ab")
        clock.now += 100
        assert group.formed() == {}
        await group.join("c")
        assert group.formed() == {"a": (1, 0, 3), "b": (1, 1, 3), "c": (1, 2, 3)}

    run_scenario(scenario)


def test_fewer_workers_than_the_minimum_wait_unless_the_run_stops(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
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
        assert group.formed() == {"a": (3, 0, 1)}, "the last worker forms a generation to save the state"

    run_scenario(scenario)


def test_the_status_reports_too_few_workers_and_the_rest_forms_at_the_end_of_the_run(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
        group.rendezvous = Rendezvous(SILENCE_S, None, CLOCK.monotonic, min_workers=2)
        assert (await group.rendezvous.status()).waiting is None
        await start(group, "ab", clock)
        assert (await group.rendezvous.status()).waiting is None
        await group.rendezvous.evict({"b"})
        assert (await group.rendezvous.status()).waiting == "1 of at least 2 workers; waiting for others"
        # The rendezvous restarts after b has finished normally.
        group.rendezvous = Rendezvous(SILENCE_S, None, CLOCK.monotonic, min_workers=2)
        await group.join("a", lost=True)
        clock.now += 10 * SILENCE_S
        await group.rendezvous.set_expected(2)
        assert group.formed() == {}
        await group.rendezvous.set_expected(2, over=True)
        assert [size for _, _, size in group.formed().values()] == [1]

    run_scenario(scenario)


def test_the_stepping_workers_are_listed_by_rank(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
        await start(group, "abc", clock)
        assert [beat.worker for beat in await group.rendezvous.workers()] == ["a", "b", "c"]
        await group.rendezvous.evict({"a"})
        assert [(beat.worker, beat.rank) for beat in await group.rendezvous.workers()] == [("b", 1), ("c", 2)]
        await group.join("cb", lost=True)
        group.formed()
        assert [(beat.worker, beat.rank) for beat in await group.rendezvous.workers()] == [("b", 0), ("c", 1)]

    run_scenario(scenario)


def test_survivors_form_the_next_generation_at_once_and_keep_their_order(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
        await start(group, "abc", clock)
        await group.rendezvous.evict({"a"})
        assert (await group.beat("b")).abort
        assert (await group.beat("a")).exit
        await group.join("c", lost=True)
        assert group.formed() == {}
        await group.join("b", lost=True)
        assert group.formed() == {"b": (2, 0, 2), "c": (2, 1, 2)}
        assert not (await group.beat("b")).abort

    run_scenario(scenario)


def test_a_pending_worker_joins_at_the_step_boundary_that_the_reform_flag_sets(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
        await start(group, "ab", clock, step=7)
        await group.rendezvous.set_expected(3)
        assert (await group.beat("a")).flags == Flags(0)
        await group.join("c")
        orders = await group.beat("a")
        assert (orders.flags, orders.abort, orders.generation) == (Flags.REFORM, False, 1)
        await group.join("ba")
        assert group.formed() == {"a": (2, 0, 3), "b": (2, 1, 3), "c": (2, 2, 3)}
        assert (await group.beat("a")).flags == Flags(0)

    run_scenario(scenario)


def test_a_pending_worker_does_not_wait_for_workers_that_have_finished_the_run(clock: Clock) -> None:
    """The pending worker finds no step left, and the run can end."""

    async def scenario(group: Group) -> None:
        await start(group, "ab", clock, step=7)
        await group.rendezvous.set_expected(3)
        await group.join("c")
        await group.rendezvous.leave(group.beats["a"], over=True)
        assert group.formed() == {}, "b has not finished yet"
        await group.rendezvous.leave(group.beats["b"], over=True)
        assert group.formed() == {"c": (2, 0, 1)}

    run_scenario(scenario)


def test_pending_workers_join_together_after_a_short_wait(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
        await start(group, "a", clock)
        await group.rendezvous.set_expected(3)
        await group.join("b")
        assert (await group.beat("a")).flags == Flags(0)
        clock.now += 3
        assert (await group.beat("a")).flags == Flags.REFORM

    run_scenario(scenario)


def test_a_worker_on_a_draining_node_leaves_and_the_others_continue(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
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
        assert (await group.beat("b")).flags == Flags.REFORM | Flags.SAVE, (
            "no worker stays, so the state has to be saved"
        )

    run_scenario(scenario)


def test_a_pending_worker_without_a_state_does_not_preserve_the_state(clock: Clock) -> None:
    """The only workers with the state have to leave: they save it, and then the pending worker starts."""

    async def scenario(group: Group) -> None:
        await start(group, "ab", clock, step=7)
        await group.rendezvous.set_expected(3)
        await group.join("c")
        await group.rendezvous.drain({"node-a", "node-b"})
        assert (await group.beat("a")).flags == Flags.REFORM | Flags.SAVE
        await group.rendezvous.leave(group.beats["b"])
        await group.rendezvous.set_expected(1)
        assert group.formed() == {}, "a has not saved the state yet"
        await group.rendezvous.leave(group.beats["a"])
        assert group.formed() == {"c": (2, 0, 1)}

    run_scenario(scenario)


def test_a_leaving_worker_with_the_newest_step_joins_one_more_generation(clock: Clock) -> None:
    """It alone finished the step in which another worker died; the search found this case (seed 18503)."""

    async def scenario(group: Group) -> None:
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
        assert (orders.leave, orders.flags) == (True, Flags.REFORM), "b leaves after the next step"

    run_scenario(scenario)


def test_a_leaving_worker_at_the_step_of_the_others_leaves_at_once(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
        await start(group, "abc", clock, step=6)
        await group.rendezvous.drain({"node-b"})
        await group.rendezvous.evict({"c"})
        await group.join("b", lost=True)
        orders = await group.beat("b")
        assert (orders.leave, orders.is_for_waiting) == (True, True)
        await group.join("a", lost=True)
        assert group.formed() == {"a": (2, 0, 1)}

    run_scenario(scenario)


def test_a_heartbeat_from_before_its_generation_does_not_break_the_generation(clock: Clock) -> None:
    """One thread of the worker sends it while another thread receives the generation."""

    async def scenario(group: Group) -> None:
        await group.rendezvous.set_expected(1)
        await group.join("a")
        await group.beat("a")
        await group.join("b")
        assert group.formed() == {"a": (1, 0, 1)}

    run_scenario(scenario)


def test_a_restarted_rendezvous_reuses_no_generation_number() -> None:
    rendezvous = Rendezvous(SILENCE_S, None, CLOCK.monotonic, first_generation=5000)
    asyncio.run(rendezvous.set_expected(1))
    formed = rendezvous.handle_heartbeat(worker("a", wait_number=1)).formed
    assert formed is not None
    assert formed.number == 5000


def test_below_the_minimum_all_workers_wait_until_a_stop(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
        await start(group, "ab", clock)
        await group.rendezvous.evict({"b"})
        await group.rendezvous.set_expected(1, "1 of at least 2 workers")
        await group.join("a", lost=True)
        assert group.formed() == {}
        assert (await group.rendezvous.status()).waiting == "1 of at least 2 workers"
        await group.rendezvous.raise_flags(Flags.STOP)
        await group.rendezvous.set_expected(1, "1 of at least 2 workers")
        assert group.formed() == {"a": (2, 0, 1)}, "a stop needs no minimum"

    run_scenario(scenario)


def test_a_worker_without_heartbeats_is_lost_and_may_join_again(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
        await start(group, "ab", clock)
        clock.now += SILENCE_S / 2
        await group.beat("a")
        clock.now += SILENCE_S
        await group.beat("a")
        group.rendezvous.check_liveness(clock.now)
        assert list((await group.rendezvous.status()).lost_for_s) == ["b"]
        await group.join("a", lost=True)
        assert group.formed() == {"a": (2, 0, 1)}
        assert (await group.beat("b")).abort, "the generation of b is over"
        await group.join("b", lost=True)
        assert (await group.beat("a")).flags == Flags.REFORM
        await group.join("a")
        assert group.formed() == {"a": (3, 0, 2), "b": (3, 1, 2)}

    run_scenario(scenario)


def test_a_restarted_rendezvous_learns_the_members_from_heartbeats(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
        await start(group, "ab", clock)
        group.rendezvous = Rendezvous(SILENCE_S, None, CLOCK.monotonic)
        await group.rendezvous.set_expected(2)
        assert not (await group.beat("a")).abort
        await group.join("b", lost=True)
        assert (await group.beat("a")).abort
        await group.join("a", lost=True)
        assert group.formed() == {"a": (2, 0, 2), "b": (2, 1, 2)}

    run_scenario(scenario)


def test_a_stalled_step_ends_the_worker_that_is_outside_the_reduction(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
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
            "b exits only after a has dumped its stacks"
        )

    run_scenario(scenario, step_timeout_s=8.0)


@pytest.mark.parametrize("saving_process", ["a worker", "a coordinator"])
def test_the_step_watchdog_ends_no_worker_during_a_slow_save(clock: Clock, saving_process: str) -> None:
    """With parameter servers all workers are in a reduction while the coordinator waits for the storage."""

    async def scenario(group: Group) -> None:
        await start(group, "ab", clock, step=3)
        for step in (4, 5):
            for name, phase in (("a", "saving" if saving_process == "a worker" else "reduction"), ("b", "reduction")):
                group.beats[name] = replace(group.beats[name], step=step, phase=phase)
                await group.beat(name)
        for _ in range(20):
            clock.now += 4
            if saving_process == "a coordinator":
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
        assert (await group.beat("a")).exit, "a stall ends the worker once no process waits for the storage"

    run_scenario(scenario, step_timeout_s=8.0)


def test_a_stuck_collective_is_aborted_first_and_its_workers_end_at_the_next_stall(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
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

    run_scenario(scenario, step_timeout_s=8.0)


def test_the_step_watchdog_waits_for_the_first_steps_of_each_worker(clock: Clock) -> None:
    """With parameter servers no generations form; waiting for capacity or for first rows is not a stall."""

    async def beat(group: Group, name: str, **fields: Any) -> bool:
        """Sends a heartbeat and returns whether the worker has to exit after a liveness check."""
        group.beats[name] = replace(group.beats.get(name, worker(name)), generation=1, **fields)
        await group.beat(name)
        group.rendezvous.check_liveness(clock.now)
        return (await group.beat(name)).exit

    async def scenario(group: Group) -> None:
        # The cluster had no capacity for this time.
        clock.now += 600
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
        assert await beat(group, "b"), "b is stalled in its first step"

    run_scenario(scenario, step_timeout_s=8.0)


def test_a_raised_flag_notifies_the_observers_without_a_heartbeat(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
        await start(group, "ab", clock)
        calls: list[Flags] = []
        group.rendezvous.on_change = lambda: calls.append(group.rendezvous.reply_for("a").flags)
        await group.rendezvous.raise_flags(Flags.STOP)
        assert calls == [Flags.STOP]
        await group.rendezvous.raise_flags(Flags.STOP)
        assert calls == [Flags.STOP], "a flag that is set already changes nothing"

    run_scenario(scenario)


def test_the_status_counts_steps_from_zero(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
        assert (await group.rendezvous.status()).step == 0
        await start(group, "ab", clock, step=3)
        assert (await group.rendezvous.status()).step == 3

    run_scenario(scenario)


def test_a_worker_that_leaves_without_knowing_its_new_generation_breaks_it(clock: Clock) -> None:
    """It had to leave while it waited, and a generation formed with it before the rendezvous knew."""

    async def scenario(group: Group) -> None:
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

    run_scenario(scenario)


def test_a_worker_that_leaves_at_the_end_of_its_generation_breaks_nothing(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
        await start(group, "abc", clock)
        await group.rendezvous.leave(group.beats["c"])
        assert not group.rendezvous.reply_for("a").abort

    run_scenario(scenario)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_worker_that_fails_in_the_middle_of_its_generation_breaks_it_at_once(clock: Clock, leaves: bool) -> None:
    """It does not wait yet, since it still has to close its group, or it leaves for good."""

    async def scenario(group: Group) -> None:
        await start(group, "abc", clock)
        failed = replace(group.beats["c"], lost=True)
        if leaves:
            await group.rendezvous.leave(failed)
        else:
            group.rendezvous.handle_heartbeat(failed)
        assert group.rendezvous.reply_for("a").abort
        await group.join("ab", lost=True)
        assert sorted(group.formed()) == (["a", "b"] if leaves else []), "the next generation waits for who comes back"
        await group.join("" if leaves else "c", lost=True)
        assert sorted(group.formed()) == ([] if leaves else ["a", "b", "c"])
        assert not (await group.beat("a")).abort, "the loss was that of the last generation"

    run_scenario(scenario)


def test_failed_forms_count_while_no_member_is_lost_and_none_has_formed(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
        async def form(names: str, lost: str, phase: str = "forming") -> int:
            await group.join(names, lost=True)
            info = group.rendezvous.reply_for("a").formed
            assert sorted(group.formed()) == sorted(names)
            for name in names:
                group.beats[name] = replace(group.beats[name], phase=phase, lost=name == lost)
                await group.beat(name)
            return info.failed_forms

        await group.rendezvous.set_expected(3)
        assert [await form("abc", "a") for _ in range(3)] == [0, 1, 2]
        assert await form("abc", "a", "compute") == 3
        assert [await form("abc", "b"), await form("abc", "")] == [0, 1]
        group.rendezvous.on_disconnect("c")
        clock.now += 2 * SILENCE_S
        assert await form("ab", "") == 0

    run_scenario(scenario)


def test_a_stall_while_several_compute_ends_only_those_that_do_not_return(clock: Clock) -> None:
    """With NCCL a worker waits for the others in its backward, too, since a device queues only so much work."""

    async def scenario(group: Group) -> None:
        await start(group, "abc", clock, step=3)
        clock.now += 15
        for name in "abc":
            await group.beat(name)
        group.rendezvous.check_liveness(clock.now)
        replies = [group.rendezvous.reply_for(name) for name in "abc"]
        assert [(reply.abort, reply.exit) for reply in replies] == [(True, False)] * 3
        await group.join("ab", lost=True)
        clock.now += 15
        for name in "abc":
            await group.beat(name)
        group.rendezvous.check_liveness(clock.now)
        for name in "abc":
            group.rendezvous.reply_for(name)
        assert [group.rendezvous.reply_for(name).exit for name in "abc"] == [False, False, True]

    run_scenario(scenario, step_timeout_s=2.0)


def test_a_heartbeat_of_an_old_generation_does_not_change_the_watchdog_limit(clock: Clock) -> None:
    async def scenario(group: Group) -> None:
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

    run_scenario(scenario)


@pytest.mark.parametrize("uses_gloo", [False, True])
def test_all_workers_use_gloo_if_one_cannot_use_another_backend(clock: Clock, uses_gloo: bool) -> None:
    async def scenario(group: Group) -> None:
        group.beats["b"] = worker("b", uses_gloo=uses_gloo)
        await group.rendezvous.set_expected(3)
        await group.join("abc")
        formed = [group.rendezvous.reply_for(name).formed for name in "abc"]
        assert [info.uses_gloo for info in formed if info is not None] == [uses_gloo] * 3

    run_scenario(scenario)
