"""What a worker makes of replies that come late; `test_rendezvous_search.py` has the rest of its protocol."""

from __future__ import annotations

import pytest

from ray_app.cluster.rendezvous.worker_protocol import WorkerProtocol
from ray_app.train.membership import Flags, GenerationInfo, HeartbeatReply
from tests.support.worker_set import make_heartbeat


def join(number: int) -> WorkerProtocol:
    worker = WorkerProtocol(make_heartbeat("a"))
    worker.begin_wait(was_broken=True)
    worker.apply(HeartbeatReply(formed=GenerationInfo(number, 1, 2, "host", 1)))
    return worker


def test_a_generation_that_an_earlier_wait_got_does_not_end_a_later_one() -> None:
    worker = join(2)
    assert (worker.generation_number, worker.rank, worker.wait_number, worker.was_broken) == (2, 1, 0, False)
    worker.begin_wait(was_broken=False)
    worker.apply(HeartbeatReply(formed=GenerationInfo(2, 0, 1, "host", 1)))
    assert (worker.rank, worker.heartbeat().wait_number) == (1, 2)


@pytest.mark.parametrize(("generation", "flags"), [(1, Flags.STOP), (2, Flags.STOP | Flags.REFORM)])
def test_only_a_reply_to_the_present_generation_ends_it(generation: int, flags: Flags) -> None:
    worker = join(2)
    worker.apply(HeartbeatReply(generation=generation, flags=Flags.STOP | Flags.REFORM, abort=True))
    assert (worker.flags(), worker.has_to_abort) == (flags, generation == 2)
