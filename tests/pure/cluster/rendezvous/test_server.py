"""The cost of a heartbeat and of a generation to the rendezvous, in operations of Python, and the interval between
heartbeats.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields, replace

import pytest

from ray_app.cluster.rendezvous.rendezvous import Rendezvous
from ray_app.cluster.rendezvous.server import decode_heartbeat, decode_reply, encode
from ray_app.runlog.journal import StepRecord
from ray_app.train.membership import HEARTBEAT_S, Flags, GenerationInfo, Heartbeat, HeartbeatReply
from tests.support.operations import count_operations


class WorkerPool:
    """A rendezvous and its workers, eight per node."""

    def __init__(self, workers: int) -> None:
        self.now_s, self.notifications = 1000.0, 0
        self.rendezvous = Rendezvous(5.0, None, lambda: self.now_s)
        self.rendezvous.on_change = self._count
        asyncio.run(self.rendezvous.set_expected(workers))
        self.beats = [Heartbeat(f"w{i}", f"n{i // 8}", f"10.0.0.{i // 8}", 1) for i in range(workers)]

    def _count(self) -> None:
        self.notifications += 1

    def join(self, ticket: int, lost: bool = False) -> None:
        """Lets all workers wait and receive their generation."""
        for beat in self.beats:
            self.rendezvous.handle_heartbeat(replace(beat, wait_number=ticket, lost=lost))
        for i, beat in enumerate(self.beats):
            formed = self.rendezvous.reply_for(beat.worker).formed
            assert formed is not None
            self.beats[i] = replace(beat, generation=formed.number, rank=formed.rank, step=ticket, phase="compute")

    def beat(self, worker: int) -> HeartbeatReply:
        return self.rendezvous.handle_heartbeat(self.beats[worker])


def heartbeat_cost(workers: int, drained: int) -> int:
    """Returns the number of operations of one heartbeat of a worker on a node that is not drained."""
    pool = WorkerPool(workers)
    pool.join(1)
    asyncio.run(pool.rendezvous.drain({f"n{i}" for i in range(drained)}))
    for i in range(workers):
        pool.beat(i)
    return count_operations(lambda: pool.beat(workers - 1))


@pytest.mark.exact_versions
@pytest.mark.parametrize("drained", [0, 1])
def test_a_heartbeat_costs_the_same_with_ten_and_with_a_thousand_workers(drained: int) -> None:
    assert heartbeat_cost(10, drained) == heartbeat_cost(1000, drained)


@pytest.mark.rest
def test_the_cost_of_a_generation_per_worker_is_independent_of_its_size() -> None:
    costs = []
    for workers in (100, 1000):
        pool = WorkerPool(workers)
        pool.join(1)
        costs.append(count_operations(lambda pool=pool: pool.join(2, lost=True)) / workers)
    assert costs[1] < 1.05 * costs[0]


def test_observers_are_called_once_when_a_generation_breaks_and_when_one_forms() -> None:
    pool = WorkerPool(1000)
    pool.join(1)
    for i in range(1000):
        pool.beat(i)
    pool.notifications = 0
    for worker in ("w7", "w8", "w9"):
        pool.rendezvous.on_disconnect(worker)
    assert pool.notifications == 1
    pool.beats = [beat for beat in pool.beats if beat.worker not in ("w7", "w8", "w9")]
    pool.now_s += 10
    asyncio.run(pool.rendezvous.set_expected(997))
    pool.join(2, lost=True)
    assert pool.notifications == 2


@pytest.mark.parametrize(
    ("workers", "period_s"),
    [(1, HEARTBEAT_S), (100, HEARTBEAT_S), (250, HEARTBEAT_S), (500, 0.5), (1000, 1.0), (10_000, 10.0)],
)
def test_the_heartbeat_interval_grows_with_the_number_of_workers(workers: int, period_s: float) -> None:
    """All workers together send a thousand heartbeats per second; expected and unexpected workers both count."""
    pool = WorkerPool(workers)
    assert pool.beat(0).period_s == pool.rendezvous.reply_for("w0").period_s == period_s
    asyncio.run(pool.rendezvous.set_expected(1))
    assert pool.beat(0).period_s == HEARTBEAT_S
    for i in range(workers):
        pool.beat(i)
    assert pool.beat(0).period_s == period_s


def test_silence_is_measured_against_the_longest_announced_interval() -> None:
    """The worker may not have received a shorter interval yet; its next heartbeat confirms that it has."""
    pool = WorkerPool(10)
    pool.beat(0)
    for expected, period_s in ((10_000, 10.0), (10, HEARTBEAT_S)):
        asyncio.run(pool.rendezvous.set_expected(expected))
        assert pool.rendezvous.reply_for("w0").period_s == period_s, (
            "the rendezvous announces the interval without a heartbeat"
        )
    pool.now_s += 5.0 + 10.0 - HEARTBEAT_S
    pool.rendezvous.check_liveness(pool.now_s)
    assert pool.rendezvous._lost == {}
    pool.beat(0)
    pool.now_s += 5.0
    pool.rendezvous.check_liveness(pool.now_s)
    assert pool.rendezvous._lost == {}
    pool.now_s += 0.01
    pool.rendezvous.check_liveness(pool.now_s)
    assert set(pool.rendezvous._lost) == {"w0"}


def test_a_worker_with_a_longer_heartbeat_interval_is_declared_lost_later() -> None:
    pool = WorkerPool(10_000)
    period_s = pool.beat(0).period_s
    pool.now_s += 5.0 + period_s - HEARTBEAT_S
    pool.rendezvous.check_liveness(pool.now_s)
    assert pool.rendezvous._lost == {}
    pool.now_s += 0.01
    pool.rendezvous.check_liveness(pool.now_s)
    assert set(pool.rendezvous._lost) == {"w0"}


def test_the_worker_that_reports_step_records_keeps_the_short_interval() -> None:
    pool = WorkerPool(10_000)
    record = StepRecord(1, 0, 0.0, 0.5, 0.1, 1.0, 3.0, 0.1, 2, [3, 4], [5, 2**63], "1.1")
    assert pool.rendezvous.handle_heartbeat(replace(pool.beats[0], record=record)).period_s == HEARTBEAT_S


@pytest.mark.parametrize("index", range(len(fields(Heartbeat))), ids=[field.name for field in fields(Heartbeat)])
@pytest.mark.parametrize("text", ["Infinity", "1.0", "{}"])
def test_a_value_of_another_type_is_no_heartbeat(index: int, text: str) -> None:
    values = json.loads(encode(Heartbeat("w", "n", "10.0.0.1", 1)))
    values[index] = json.loads(text)
    with pytest.raises(ValueError, match="has another type"):
        decode_heartbeat(json.dumps(values).encode())


def test_messages_survive_encoding_and_decoding() -> None:
    record = StepRecord(
        1, 0, 0.0, float("inf"), 0.1, 1.0, 3.0, 0.1, 2, [3, 4], [5, 2**63], "1.1", 1, 2.5, {"accuracy": 0.5}
    )
    beat = Heartbeat("w", "n", "10.0.0.1", 1, 2, 3, 4, 5, "saving", record, 6, 7, 8, True)
    formed = GenerationInfo(3, 1, 2, "10.0.0.1", 5, ("10.0.0.1", "10.0.0.2"))
    orders = HeartbeatReply(3, Flags.STOP | Flags.SAVE, True, True, True, True, 9, True, formed, 2.5)
    assert decode_heartbeat(encode(beat)) == beat
    assert decode_reply(encode(orders)) == orders
    assert decode_reply(encode(HeartbeatReply())) == HeartbeatReply()
