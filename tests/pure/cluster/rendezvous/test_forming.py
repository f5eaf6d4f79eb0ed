"""In which order members rank when a generation forms."""

from __future__ import annotations

from ray_app.cluster.rendezvous.members import Members
from ray_app.cluster.rendezvous.rendezvous import sort_by_rank
from ray_app.train.membership import Heartbeat


def test_workers_of_one_host_rank_side_by_side_behind_the_first_who_has_the_state() -> None:
    members = Members()
    steps = {"a": ("one", -1), "b": ("two", 7), "c": ("one", 7), "d": ("two", -1)}
    for place, (worker, (host, step)) in enumerate(steps.items()):
        member = members.add(
            Heartbeat(worker, f"node of {host}", host, 1, 1, generation=3 if step >= 0 else 0, rank=place, step=step)
        )
        member.waiting_since_s = float(place)
    assert [m.heartbeat.worker for m in sort_by_rank(list(members))] == ["b", "d", "c", "a"]
