"""The cost of a heartbeat and of a generation to the rendezvous, in operations of Python, and the interval between
heartbeats.
"""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from typing import Any

import pytest

from ray_app.cluster.rendezvous.server import decode_heartbeat, decode_reply, encode
from ray_app.runlog.journal import StepRecord
from ray_app.train.membership import HEARTBEAT_S, Flags, GenerationInfo, Heartbeat, HeartbeatReply
from tests.support.operations import count_operations
from tests.support.worker_set import WorkerSet


def start_workers(number: int) -> WorkerSet:
    """Returns workers that have sent no heartbeat yet, eight per node."""
    workers = WorkerSet()
    workers.rendezvous.set_expected(number)
    workers.heartbeats = {f"w{i}": Heartbeat(f"w{i}", f"n{i // 8}", f"10.0.0.{i // 8}", 1) for i in range(number)}
    return workers


def form(workers: WorkerSet, was_broken: bool = False) -> None:
    """Lets all workers wait and receive their generation."""
    workers.join(workers.heartbeats, was_broken)
    assert len(workers.formed(step=1)) == len(workers.heartbeats)


def heartbeat_cost(number: int, drained: int) -> int:
    """Returns the number of operations of one heartbeat of a worker on a node that is not drained."""
    workers = start_workers(number)
    form(workers)
    workers.rendezvous.drain({f"n{i}" for i in range(drained)})
    for name in workers.heartbeats:
        workers.beat(name)
    return count_operations(lambda: workers.beat(f"w{number - 1}"))


@pytest.mark.exact_versions
@pytest.mark.parametrize("drained", [0, 1])
def test_a_heartbeat_costs_the_same_with_ten_and_with_a_thousand_workers(drained: int) -> None:
    assert heartbeat_cost(10, drained) == heartbeat_cost(1000, drained)


@pytest.mark.rest
def test_the_cost_of_a_generation_per_worker_is_independent_of_its_size() -> None:
    costs = []
    for workers in (100, 1000):
        pool = start_workers(workers)
        form(pool)
        costs.append(count_operations(partial(form, pool, was_broken=True)) / workers)
    assert costs[1] < 1.05 * costs[0]


def test_observers_are_called_once_when_a_generation_breaks_and_when_one_forms() -> None:
    pool = start_workers(1000)
    form(pool)
    for name in pool.heartbeats:
        pool.beat(name)
    pool.num_changes = 0
    for worker in ("w7", "w8", "w9"):
        pool.rendezvous.on_disconnect(worker)
        del pool.heartbeats[worker]
    assert pool.num_changes == 1
    pool.now_s += 10
    pool.rendezvous.set_expected(997)
    form(pool, was_broken=True)
    assert pool.num_changes == 2


@pytest.mark.parametrize(
    ("workers", "period_s"),
    [(1, HEARTBEAT_S), (100, HEARTBEAT_S), (250, HEARTBEAT_S), (500, 0.5), (1000, 1.0), (10_000, 10.0)],
)
def test_the_heartbeat_interval_grows_with_the_number_of_workers(workers: int, period_s: float) -> None:
    """All workers together send a thousand heartbeats per second; expected and unexpected workers both count."""
    pool = start_workers(workers)
    assert pool.beat("w0").period_s == pool.rendezvous.reply_for("w0").period_s == period_s
    pool.rendezvous.set_expected(1)
    assert pool.beat("w0").period_s == HEARTBEAT_S
    for name in pool.heartbeats:
        pool.beat(name)
    assert pool.beat("w0").period_s == period_s


def test_silence_is_measured_against_the_longest_announced_interval() -> None:
    """The worker may not have received a shorter interval yet; its next heartbeat confirms that it has."""
    pool = start_workers(10)
    pool.beat("w0")
    for expected, period_s in ((10_000, 10.0), (10, HEARTBEAT_S)):
        pool.rendezvous.set_expected(expected)
        assert pool.rendezvous.reply_for("w0").period_s == period_s, (
            "the rendezvous announces the interval without a heartbeat"
        )
    pool.now_s += 5.0 + 10.0 - HEARTBEAT_S
    pool.rendezvous.check_liveness(pool.now_s)
    assert pool.lost == []
    pool.beat("w0")
    pool.now_s += 5.0
    pool.rendezvous.check_liveness(pool.now_s)
    assert pool.lost == []
    pool.now_s += 0.01
    pool.rendezvous.check_liveness(pool.now_s)
    assert pool.lost == ["w0"]


def test_a_worker_with_a_longer_heartbeat_interval_is_declared_lost_later() -> None:
    pool = start_workers(10_000)
    period_s = pool.beat("w0").period_s
    pool.now_s += 5.0 + period_s - HEARTBEAT_S
    pool.rendezvous.check_liveness(pool.now_s)
    assert pool.lost == []
    pool.now_s += 0.01
    pool.rendezvous.check_liveness(pool.now_s)
    assert pool.lost == ["w0"]


def test_the_worker_that_reports_step_records_keeps_the_short_interval() -> None:
    pool = start_workers(10_000)
    record = StepRecord(1, 0, 0.0, 0.5, 0.1, 1.0, 3.0, 0.1, 2, [3, 4], [5, 2**63], "1.1")
    assert pool.beat("w0", record=record).period_s == HEARTBEAT_S


@pytest.mark.parametrize("name", [field.name for field in fields(Heartbeat)])
@pytest.mark.parametrize("text", ["Infinity", "1.0", "[{}]"])
def test_a_value_of_another_type_is_no_heartbeat(name: str, text: str) -> None:
    values = json.loads(encode(Heartbeat("w", "n", "10.0.0.1", 1)))
    values[name] = json.loads(text)
    with pytest.raises(ValueError, match="is not of type"):
        decode_heartbeat(json.dumps(values).encode())


@pytest.mark.parametrize("changed", [{"pid": None}, {"more": 1}])
def test_a_message_of_another_version_is_refused(changed: dict[str, int | None]) -> None:
    values = json.loads(encode(Heartbeat("w", "n", "10.0.0.1", 1))) | changed
    data = {name: value for name, value in values.items() if value is not None or name == "record"}
    with pytest.raises(ValueError, match="a Heartbeat has the fields worker, node"):
        decode_heartbeat(json.dumps(data).encode())


def test_messages_survive_encoding_and_decoding() -> None:
    record = StepRecord(
        1, 0, 0.0, float("inf"), 0.1, 1.0, 3.0, 0.1, 2, [3, 4], [5, 2**63], "1.1", 1, 2.5, {"accuracy": 0.5}
    )
    numbers: Any = {"pid": 2, "generation": 3, "rank": 4, "step": 5, "stored_step": 6, "progress_reports": 7}
    beat = Heartbeat("w", "n", "10.0.0.1", 1, phase="saving", record=record, wait_number=8, was_broken=True, **numbers)
    formed = GenerationInfo(3, 1, 2, "10.0.0.1", 5, ("10.0.0.1", "10.0.0.2"))
    reply = HeartbeatReply(
        generation=3, flags=Flags.STOP | Flags.SAVE, drain=True, dump=True, stored_step=9, formed=formed, period_s=2.5
    )
    assert decode_heartbeat(encode(beat)) == beat
    assert decode_reply(encode(reply)) == reply
    assert decode_reply(encode(HeartbeatReply())) == HeartbeatReply()
