"""How the rendezvous forms generations, without Ray."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_app.cluster.rendezvous.rendezvous import Rendezvous
from ray_app.train.membership import Flags
from tests.support.worker_set import SILENCE_S, WorkerSet, make_heartbeat


@pytest.fixture
def workers() -> WorkerSet:
    return WorkerSet()


def test_the_first_generation_waits_for_all_expected_workers(workers: WorkerSet) -> None:
    workers.rendezvous.set_expected(3)
    workers.join("ab")
    workers.now_s += 100
    assert workers.formed() == {}
    workers.join("c")
    assert workers.formed() == {"a": (1, 0, 3), "b": (1, 1, 3), "c": (1, 2, 3)}
    assert workers.beat("a").formed is None, "a worker that does not wait needs no generation"


def test_fewer_workers_than_the_minimum_wait_unless_the_run_stops(workers: WorkerSet) -> None:
    workers.restart(min_workers=2)
    workers.start("ab")
    workers.rendezvous.remove({"b"})
    workers.rendezvous.set_expected(1)
    workers.join("a", was_broken=True)
    workers.now_s += 10 * SILENCE_S
    workers.rendezvous.check_liveness(workers.now_s - 10 * SILENCE_S)
    assert workers.formed() == {}
    workers.join("c")
    workers.rendezvous.set_expected(2)
    assert workers.formed() == {"a": (2, 0, 2), "c": (2, 1, 2)}
    workers.rendezvous.remove({"c"})
    workers.rendezvous.raise_flags(Flags.STOP)
    workers.join("a", was_broken=True)
    assert workers.formed() == {"a": (3, 0, 1)}, "the last worker forms a generation to save the state"


def test_the_status_reports_too_few_workers_and_the_rest_forms_at_the_end_of_the_run(workers: WorkerSet) -> None:
    workers.restart(min_workers=2)
    assert workers.rendezvous.status().wait_reason is None
    workers.start("ab")
    assert workers.rendezvous.status().wait_reason is None
    workers.rendezvous.remove({"b"})
    assert workers.rendezvous.status().wait_reason == "1 of at least 2 workers; waiting for others"
    # The rendezvous restarts after b has finished normally.
    workers.restart(min_workers=2)
    workers.join("a", was_broken=True)
    workers.now_s += 10 * SILENCE_S
    workers.rendezvous.set_expected(2)
    assert workers.formed() == {}
    workers.rendezvous.set_expected(2, over=True)
    assert [size for _, _, size in workers.formed().values()] == [1]


def test_the_stepping_workers_are_listed_by_rank(workers: WorkerSet) -> None:
    workers.start("abc")
    assert [heartbeat.worker for heartbeat in workers.rendezvous.workers()] == ["a", "b", "c"]
    workers.rendezvous.remove({"a"})
    assert [(h.worker, h.rank) for h in workers.rendezvous.workers()] == [("b", 1), ("c", 2)]
    workers.join("cb", was_broken=True)
    workers.formed()
    assert [(h.worker, h.rank) for h in workers.rendezvous.workers()] == [("b", 0), ("c", 1)]


def test_survivors_form_the_next_generation_at_once_and_keep_their_order(workers: WorkerSet) -> None:
    workers.start("abc")
    workers.rendezvous.remove({"a"})
    assert workers.beat("b").abort
    assert workers.beat("a").exit
    workers.join("c", was_broken=True)
    assert workers.formed() == {}
    workers.join("b", was_broken=True)
    assert workers.formed() == {"b": (2, 0, 2), "c": (2, 1, 2)}
    assert not workers.beat("b").abort


def test_a_pending_worker_joins_at_the_step_boundary_that_the_reform_flag_sets(workers: WorkerSet) -> None:
    workers.start("ab", step=7)
    workers.rendezvous.set_expected(3)
    assert workers.beat("a").flags == Flags(0)
    workers.join("c")
    replies = workers.beat("a")
    assert (replies.flags, replies.abort, replies.generation) == (Flags.REFORM, False, 1)
    workers.join("ba")
    assert workers.formed() == {"a": (2, 0, 3), "b": (2, 1, 3), "c": (2, 2, 3)}
    assert workers.beat("a").flags == Flags(0)


def test_a_pending_worker_does_not_wait_for_workers_that_have_finished_the_run(workers: WorkerSet) -> None:
    """The pending worker finds no step left, and the run can end."""
    workers.start("ab", step=7)
    workers.rendezvous.set_expected(3)
    workers.join("c")
    workers.rendezvous.report_exit(workers.heartbeats["a"], over=True)
    assert workers.formed() == {}, "b has not finished yet"
    workers.rendezvous.report_exit(workers.heartbeats["b"], over=True)
    assert workers.formed() == {"c": (2, 0, 1)}


def test_pending_workers_join_together_after_a_short_wait(workers: WorkerSet) -> None:
    workers.start("a")
    workers.rendezvous.set_expected(3)
    workers.join("b")
    assert workers.beat("a").flags == Flags(0)
    workers.now_s += 3
    assert workers.beat("a").flags == Flags.REFORM


def test_a_worker_on_a_draining_node_exits_and_the_others_continue(workers: WorkerSet) -> None:
    workers.start("ab")
    workers.rendezvous.drain({"node-a"})
    first, second = workers.beat("a"), workers.beat("b")
    assert (first.flags, first.drain) == (Flags.REFORM, True)
    assert (second.flags, second.drain) == (Flags.REFORM, False)
    status = workers.rendezvous.status()
    assert (status.live, status.draining) == ({"b"}, {"a"})
    workers.rendezvous.report_exit(workers.heartbeats["a"])
    workers.join("b")
    assert workers.formed() == {"b": (2, 0, 1)}
    workers.rendezvous.drain({"node-a", "node-b"})
    assert workers.beat("b").flags == Flags.REFORM | Flags.SAVE, "no worker stays, so the state has to be saved"


def test_a_pending_worker_without_a_state_does_not_preserve_the_state(workers: WorkerSet) -> None:
    """The only workers with the state are draining: they save it, and then the pending worker starts."""
    workers.start("ab", step=7)
    workers.rendezvous.set_expected(3)
    workers.join("c")
    workers.rendezvous.drain({"node-a", "node-b"})
    assert workers.beat("a").flags == Flags.REFORM | Flags.SAVE
    workers.rendezvous.report_exit(workers.heartbeats["b"])
    workers.rendezvous.set_expected(1)
    assert workers.formed() == {}, "a has not saved the state yet"
    workers.rendezvous.report_exit(workers.heartbeats["a"])
    assert workers.formed() == {"c": (2, 0, 1)}


def test_a_draining_worker_with_the_newest_step_joins_one_more_generation(workers: WorkerSet) -> None:
    """It alone finished the step in which another worker died; the search found this case (seed 18503)."""
    workers.start("abcd", step=6)
    workers.rendezvous.drain({"node-b"})
    assert workers.beat("b").drain
    workers.rendezvous.remove({"d"})
    workers.join("ac", was_broken=True)
    assert workers.formed() == {}, "b may have finished the step"
    workers.heartbeats["b"] = replace(workers.heartbeats["b"], step=7)
    workers.join("b", was_broken=True)
    assert workers.formed(step=7) == {"a": (2, 0, 3), "b": (2, 1, 3), "c": (2, 2, 3)}
    replies = workers.beat("b")
    assert (replies.drain, replies.flags) == (True, Flags.REFORM), "b exits after the next step"


def test_a_draining_worker_at_the_step_of_the_others_exits_at_once(workers: WorkerSet) -> None:
    workers.start("abc", step=6)
    workers.rendezvous.drain({"node-b"})
    workers.rendezvous.remove({"c"})
    workers.join("b", was_broken=True)
    replies = workers.beat("b")
    assert (replies.drain, replies.is_for_waiting) == (True, True)
    workers.join("a", was_broken=True)
    assert workers.formed() == {"a": (2, 0, 1)}


def test_a_heartbeat_from_before_its_generation_does_not_break_the_generation(workers: WorkerSet) -> None:
    """One thread of the worker sends it while another thread receives the generation."""
    workers.rendezvous.set_expected(1)
    workers.join("a")
    workers.beat("a")
    workers.join("b")
    assert workers.formed() == {"a": (1, 0, 1)}


def test_a_restarted_rendezvous_reuses_no_generation_number() -> None:
    rendezvous = Rendezvous(SILENCE_S, None, first_generation=5000)
    rendezvous.set_expected(1)
    formed = rendezvous.handle_heartbeat(make_heartbeat("a", wait_number=1)).formed
    assert formed is not None
    assert formed.number == 5000


def test_below_the_minimum_all_workers_wait_until_a_stop(workers: WorkerSet) -> None:
    workers.start("ab")
    workers.rendezvous.remove({"b"})
    workers.rendezvous.set_expected(1, "1 of at least 2 workers")
    workers.join("a", was_broken=True)
    assert workers.formed() == {}
    assert workers.rendezvous.status().wait_reason == "1 of at least 2 workers"
    workers.rendezvous.raise_flags(Flags.STOP)
    workers.rendezvous.set_expected(1, "1 of at least 2 workers")
    assert workers.formed() == {"a": (2, 0, 1)}, "a stop needs no minimum"


def test_a_worker_without_heartbeats_is_lost_and_may_join_again(workers: WorkerSet) -> None:
    workers.start("ab")
    workers.now_s += SILENCE_S / 2
    workers.beat("a")
    workers.now_s += SILENCE_S
    workers.beat("a")
    workers.rendezvous.check_liveness(workers.now_s)
    assert list(workers.rendezvous.status().lost_for_s) == ["b"]
    workers.join("a", was_broken=True)
    assert workers.formed() == {"a": (2, 0, 1)}
    assert workers.beat("b").abort, "the generation of b is over"
    workers.join("b", was_broken=True)
    assert workers.beat("a").flags == Flags.REFORM
    workers.join("a")
    assert workers.formed() == {"a": (3, 0, 2), "b": (3, 1, 2)}


def test_a_restarted_rendezvous_learns_the_members_from_heartbeats(workers: WorkerSet) -> None:
    workers.start("ab")
    workers.restart()
    workers.rendezvous.set_expected(2)
    assert not workers.beat("a").abort
    workers.join("b", was_broken=True)
    assert workers.beat("a").abort
    workers.join("a", was_broken=True)
    assert workers.formed() == {"a": (2, 0, 2), "b": (2, 1, 2)}


def test_a_stalled_step_ends_the_worker_that_is_outside_the_reduction() -> None:
    workers = WorkerSet(step_timeout_s=8.0)
    workers.start("ab", step=3)
    for step in (4, 5):
        for name in "ab":
            workers.beat(name, step=step)
    workers.heartbeats["a"] = replace(workers.heartbeats["a"], phase="reduction")
    workers.heartbeats["b"] = replace(workers.heartbeats["b"], phase="data")
    workers.now_s += 4
    assert not workers.beat("a").dump
    assert not workers.beat("b").exit
    workers.now_s += 4.5
    workers.beat("a")
    workers.beat("b")
    workers.rendezvous.check_liveness(workers.now_s)
    replies = [workers.beat(name) for name in "bab"]
    assert [(reply.dump, reply.exit) for reply in replies] == [(True, False), (True, False), (False, True)], (
        "b exits only after a has dumped its stacks"
    )


@pytest.mark.parametrize("saving_process", ["a worker", "a coordinator"])
def test_the_step_watchdog_ends_no_worker_during_a_slow_save(saving_process: str) -> None:
    """With parameter servers all workers are in a reduction while the coordinator waits for the storage."""
    workers = WorkerSet(step_timeout_s=8.0)
    workers.start("ab", step=3)
    for step in (4, 5):
        for name, phase in (("a", "saving" if saving_process == "a worker" else "reduction"), ("b", "reduction")):
            workers.beat(name, step=step, phase=phase)
    for _ in range(20):
        workers.now_s += 4
        if saving_process == "a coordinator":
            workers.rendezvous.pause_watchdog()
        replies = [workers.beat(name) for name in "ab"]
        workers.rendezvous.check_liveness(workers.now_s)
        assert not any(reply.abort or reply.exit or reply.dump for reply in replies)
    workers.heartbeats["a"] = replace(workers.heartbeats["a"], phase="data")
    for _ in range(3):
        workers.now_s += 4
        for name in "ab":
            workers.beat(name)
        workers.rendezvous.check_liveness(workers.now_s)
    assert workers.beat("a").exit, "a stall ends the worker once no process waits for the storage"


def test_a_stuck_collective_is_aborted_first_and_its_workers_end_at_the_next_stall() -> None:
    workers = WorkerSet(step_timeout_s=8.0)
    workers.start("ab", step=3)
    for step in (4, 5):
        for name in "ab":
            workers.beat(name, step=step, phase="reduction")
    for expected in ((True, False), (True, True)):
        workers.now_s += 4.5
        for name in "ab":
            workers.beat(name)
        workers.now_s += 4.5
        for name in "ab":
            workers.beat(name)
        workers.rendezvous.check_liveness(workers.now_s)
        workers.beat("b")
        replies = workers.beat("a")
        assert (replies.abort, replies.exit) == expected


def test_the_step_watchdog_waits_for_the_first_steps_of_each_worker() -> None:
    """With parameter servers no generations form; waiting for capacity or for first rows is not a stall."""

    workers = WorkerSet(step_timeout_s=8.0)

    def beat(name: str, **fields: Any) -> bool:
        """Sends a heartbeat and returns whether the worker has to exit after a liveness check."""
        workers.beat(name, generation=1, **fields)
        workers.rendezvous.check_liveness(workers.now_s)
        return workers.beat(name).exit

    # The cluster had no capacity for this time.
    workers.now_s += 600
    assert not beat("a", phase="data")
    for step in (0, 1, 2):
        workers.now_s += 4
        assert not beat("a", phase="reduction", step=step)
    assert not beat("b", phase="data")
    for _ in range(9):
        workers.now_s += 4
        assert not beat("a")
        assert not beat("b")
    workers.now_s += 4.5
    assert not beat("a")
    assert beat("b"), "b is stalled in its first step"


def test_a_raised_flag_notifies_the_observers_without_a_heartbeat(workers: WorkerSet) -> None:
    workers.start("ab")
    calls: list[Flags] = []
    workers.rendezvous.on_change = lambda: calls.append(workers.rendezvous.reply_for("a").flags)
    workers.rendezvous.raise_flags(Flags.STOP)
    assert calls == [Flags.STOP]
    workers.rendezvous.raise_flags(Flags.STOP)
    assert calls == [Flags.STOP], "a flag that is set already changes nothing"


def test_the_status_counts_steps_from_zero(workers: WorkerSet) -> None:
    assert workers.rendezvous.status().step == 0
    workers.start("ab", step=3)
    assert workers.rendezvous.status().step == 3


def test_a_worker_that_exits_without_knowing_its_new_generation_breaks_it(workers: WorkerSet) -> None:
    """It was drained while it waited, and a generation formed with it before the rendezvous knew."""
    workers.start("ab")
    workers.rendezvous.set_expected(3)
    workers.join("c")
    waiting = workers.heartbeats["c"]
    workers.join("ab")
    assert sorted(workers.formed()) == ["a", "b", "c"]
    workers.beat("a")
    assert not workers.rendezvous.reply_for("a").abort
    workers.rendezvous.report_exit(waiting)
    assert workers.rendezvous.reply_for("a").abort


def test_a_worker_that_exits_at_the_end_of_its_generation_breaks_nothing(workers: WorkerSet) -> None:
    workers.start("abc")
    workers.rendezvous.report_exit(workers.heartbeats["c"])
    assert not workers.rendezvous.reply_for("a").abort


@pytest.mark.parametrize("exits", [False, True])
def test_a_worker_that_fails_in_the_middle_of_its_generation_breaks_it_at_once(workers: WorkerSet, exits: bool) -> None:
    """It does not wait yet, since it still has to close its process group, or it exits."""
    workers.start("abc")
    failed = replace(workers.heartbeats["c"], was_broken=True)
    if exits:
        workers.rendezvous.report_exit(failed)
    else:
        workers.rendezvous.handle_heartbeat(failed)
    assert workers.rendezvous.reply_for("a").abort
    workers.join("ab", was_broken=True)
    assert sorted(workers.formed()) == (["a", "b"] if exits else []), "the next generation waits for who comes back"
    workers.join("" if exits else "c", was_broken=True)
    assert sorted(workers.formed()) == ([] if exits else ["a", "b", "c"])
    assert not workers.beat("a").abort, "the loss was that of the last generation"


def test_failed_forms_count_while_no_member_is_lost_and_none_has_formed(workers: WorkerSet) -> None:
    def form(names: str, broken: str, phase: str = "forming") -> int:
        workers.join(names, was_broken=True)
        info = workers.rendezvous.reply_for("a").formed
        assert sorted(workers.formed()) == sorted(names)
        for name in names:
            workers.beat(name, phase=phase, was_broken=name == broken)
        return info.failed_forms

    workers.rendezvous.set_expected(3)
    assert [form("abc", "a") for _ in range(3)] == [0, 1, 2]
    assert form("abc", "a", "compute") == 3
    assert [form("abc", "b"), form("abc", "")] == [0, 1]
    workers.rendezvous.on_disconnect("c")
    workers.now_s += 2 * SILENCE_S
    assert form("ab", "") == 0


def test_a_stall_while_several_compute_ends_only_those_that_do_not_return() -> None:
    """With NCCL a worker waits for the others in its backward, too, since a device queues only so much work."""
    workers = WorkerSet(step_timeout_s=2.0)
    workers.start("abc", step=3)
    workers.now_s += 15
    for name in "abc":
        workers.beat(name)
    workers.rendezvous.check_liveness(workers.now_s)
    replies = [workers.rendezvous.reply_for(name) for name in "abc"]
    assert [(reply.abort, reply.exit) for reply in replies] == [(True, False)] * 3
    workers.join("ab", was_broken=True)
    workers.now_s += 15
    for name in "abc":
        workers.beat(name)
    workers.rendezvous.check_liveness(workers.now_s)
    for name in "abc":
        workers.rendezvous.reply_for(name)
    assert [workers.rendezvous.reply_for(name).exit for name in "abc"] == [False, False, True]


def test_a_heartbeat_of_an_old_generation_does_not_change_the_watchdog_limit(workers: WorkerSet) -> None:
    workers.start("abc")
    workers.beat("a", step=1)
    stale = workers.heartbeats["c"]
    workers.rendezvous.on_disconnect("c")
    workers.join("ab", was_broken=True)
    assert sorted(workers.formed(1)) == ["a", "b"]
    first_limit_s = workers.rendezvous.status().limit_s
    for name in "ab":
        workers.beat(name)
    workers.beat("a", step=2)
    limit_s = workers.rendezvous.status().limit_s
    assert limit_s < first_limit_s, "the first step of a generation has a longer limit"
    workers.rendezvous.handle_heartbeat(stale)
    assert workers.rendezvous.status().limit_s == limit_s


@pytest.mark.parametrize("uses_gloo", [False, True])
def test_all_workers_use_gloo_if_one_cannot_use_another_backend(workers: WorkerSet, uses_gloo: bool) -> None:
    workers.heartbeats["b"] = make_heartbeat("b", uses_gloo=uses_gloo)
    workers.rendezvous.set_expected(3)
    workers.join("abc")
    formed = [workers.rendezvous.reply_for(name).formed for name in "abc"]
    assert [info.uses_gloo for info in formed if info is not None] == [uses_gloo] * 3
