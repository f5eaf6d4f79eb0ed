"""What a sign of life and a generation cost the rendezvous: operations of Python, counted one by one, whatever the
number of workers.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ray_app.cluster.rendezvous.rendezvous import Rendezvous
from ray_app.cluster.rendezvous.server import decode_heartbeat, decode_reply, encode
from ray_app.runlog.journal import StepRecord
from ray_app.train.membership import HEARTBEAT_S, Flags, GenerationInfo, Heartbeat, HeartbeatReply
from tests.support.operations import operations


class Crowd:
    """A rendezvous with workers, eight on a node."""

    def __init__(self, workers: int) -> None:
        self.now_s, self.called = 1000.0, 0
        self.rendezvous = Rendezvous(5.0, None, lambda: self.now_s)
        self.rendezvous.on_change = self._count
        asyncio.run(self.rendezvous.set_expected(workers))
        self.beats = [Heartbeat(f"w{i}", f"n{i // 8}", f"10.0.0.{i // 8}", 1) for i in range(workers)]

    def _count(self) -> None:
        self.called += 1

    def join(self, ticket: int, lost: bool = False) -> None:
        """All wait, and hear of the generation."""
        for beat in self.beats:
            self.rendezvous.handle_heartbeat(replace(beat, wait_number=ticket, lost=lost))
        for i, beat in enumerate(self.beats):
            formed = self.rendezvous.reply_for(beat.worker).formed
            assert formed is not None
            self.beats[i] = replace(beat, generation=formed.number, rank=formed.rank, step=ticket, phase="compute")

    def beat(self, worker: int) -> HeartbeatReply:
        return self.rendezvous.handle_heartbeat(self.beats[worker])


def beating(workers: int, drained: int) -> int:
    """Operations of a sign of life of a worker that stays."""
    crowd = Crowd(workers)
    crowd.join(1)
    asyncio.run(crowd.rendezvous.drain({f"n{i}" for i in range(drained)}))
    for i in range(workers):
        crowd.beat(i)
    return operations(lambda: crowd.beat(workers - 1))


@pytest.mark.parametrize("drained", [0, 1])
def test_a_sign_of_life_costs_the_same_among_ten_and_among_a_thousand(drained: int) -> None:
    assert beating(10, drained) == beating(1000, drained)


def test_a_generation_costs_each_worker_the_same() -> None:
    costs = []
    for workers in (100, 1000):
        crowd = Crowd(workers)
        crowd.join(1)
        costs.append(operations(lambda crowd=crowd: crowd.join(2, lost=True)) / workers)  # type: ignore[misc]
    assert costs[1] < 1.05 * costs[0]


def test_observers_are_called_once_when_a_generation_breaks_and_when_one_forms() -> None:
    crowd = Crowd(1000)
    crowd.join(1)
    for i in range(1000):
        crowd.beat(i)
    crowd.called = 0
    for worker in ("w7", "w8", "w9"):
        crowd.rendezvous.on_disconnect(worker)
    assert crowd.called == 1
    crowd.beats = [beat for beat in crowd.beats if beat.worker not in ("w7", "w8", "w9")]
    crowd.now_s += 10
    asyncio.run(crowd.rendezvous.set_expected(997))
    crowd.join(2, lost=True)
    assert crowd.called == 2


@pytest.mark.parametrize(
    ("workers", "period_s"),
    [(1, HEARTBEAT_S), (100, HEARTBEAT_S), (250, HEARTBEAT_S), (500, 0.5), (1000, 1.0), (10_000, 10.0)],
)
def test_the_more_there_are_the_rarer_is_a_sign_of_life_of_each(workers: int, period_s: float) -> None:
    """A thousand per second of all together; those who are still to come count, and those who were not expected."""
    crowd = Crowd(workers)
    assert crowd.beat(0).period_s == crowd.rendezvous.reply_for("w0").period_s == period_s
    asyncio.run(crowd.rendezvous.set_expected(1))
    assert crowd.beat(0).period_s == HEARTBEAT_S
    for i in range(workers):
        crowd.beat(i)
    assert crowd.beat(0).period_s == period_s


def test_the_longest_interval_between_two_heartbeats_counts() -> None:
    """It may not have heard of a shorter one; from its next sign of life on that counts."""
    crowd = Crowd(10)
    crowd.beat(0)
    for expected, period_s in ((10_000, 10.0), (10, HEARTBEAT_S)):
        asyncio.run(crowd.rendezvous.set_expected(expected))
        assert crowd.rendezvous.reply_for("w0").period_s == period_s, "it is told so unasked"
    crowd.now_s += 5.0 + 10.0 - HEARTBEAT_S
    crowd.rendezvous.check_liveness(crowd.now_s)
    assert crowd.rendezvous._lost == {}
    crowd.beat(0)
    crowd.now_s += 5.0
    crowd.rendezvous.check_liveness(crowd.now_s)
    assert crowd.rendezvous._lost == {}
    crowd.now_s += 0.01
    crowd.rendezvous.check_liveness(crowd.now_s)
    assert set(crowd.rendezvous._lost) == {"w0"}


def test_who_gives_signs_of_life_more_rarely_counts_as_silent_later() -> None:
    crowd = Crowd(10_000)
    period_s = crowd.beat(0).period_s
    crowd.now_s += 5.0 + period_s - HEARTBEAT_S
    crowd.rendezvous.check_liveness(crowd.now_s)
    assert crowd.rendezvous._lost == {}
    crowd.now_s += 0.01
    crowd.rendezvous.check_liveness(crowd.now_s)
    assert set(crowd.rendezvous._lost) == {"w0"}


def test_who_tells_how_far_all_are_does_so_as_often_as_ever() -> None:
    crowd = Crowd(10_000)
    record = StepRecord(1, 0, 0.0, 0.5, 0.1, 1.0, 3.0, 0.1, 2, [3, 4], [5, 2**63], "1.1")
    assert crowd.rendezvous.handle_heartbeat(replace(crowd.beats[0], record=record)).period_s == HEARTBEAT_S


def test_messages_come_as_they_were_sent() -> None:
    record = StepRecord(
        1, 0, 0.0, float("inf"), 0.1, 1.0, 3.0, 0.1, 2, [3, 4], [5, 2**63], "1.1", 1, 2.5, {"accuracy": 0.5}
    )
    beat = Heartbeat("w", "n", "10.0.0.1", 1, 2, 3, 4, 5, "saving", record, 6, 7, 8, True)
    formed = GenerationInfo(3, 1, 2, "10.0.0.1", 5, ("10.0.0.1", "10.0.0.2"))
    orders = HeartbeatReply(3, Flags.STOP | Flags.SAVE, True, True, True, True, 9, True, formed, 2.5)
    assert decode_heartbeat(encode(beat)) == beat
    assert decode_reply(encode(orders)) == orders
    assert decode_reply(encode(HeartbeatReply())) == HeartbeatReply()
