"""Workers that join a rendezvous and send heartbeats to it, in the process of the test and by its clock."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ray_app.cluster.rendezvous.rendezvous import Rendezvous
from ray_app.train.membership import Heartbeat, HeartbeatReply

SILENCE_S = 5.0


def make_heartbeat(name: str, **fields: Any) -> Heartbeat:
    """Returns a heartbeat of a worker on a node of its own."""
    return replace(Heartbeat(name, f"node-{name}", "host", 1), **fields)


class WorkerSet:
    """A rendezvous and the newest heartbeats of its workers, by name.

    Args:
        step_timeout_s: See `Rendezvous`.
    """

    def __init__(self, step_timeout_s: float | None = None) -> None:
        self.now_s, self.num_changes = 1000.0, 0
        self._step_timeout_s = step_timeout_s
        self.heartbeats: dict[str, Heartbeat] = {}
        self._num_waits = 0
        # The workers that wait, in their order, as keys.
        self._waiting: dict[str, None] = {}
        self.restart()

    def restart(self, min_workers: int = 1) -> None:
        """Replaces the rendezvous by one that knows no worker."""
        self.rendezvous = Rendezvous(SILENCE_S, self._step_timeout_s, lambda: self.now_s, min_workers=min_workers)
        self.rendezvous.on_change = self._count_change

    def _count_change(self) -> None:
        self.num_changes += 1

    def beat(self, name: str, **fields: Any) -> HeartbeatReply:
        """Sends the heartbeat of a worker, with other values of some fields from now on, and returns the reply."""
        self.heartbeats[name] = replace(self.heartbeats.get(name) or make_heartbeat(name), **fields)
        return self.rendezvous.handle_heartbeat(self.heartbeats[name])

    def join(self, names: Iterable[str], was_broken: bool = False) -> None:
        """Lets workers wait for a generation."""
        for name in names:
            self._num_waits += 1
            self.beat(name, wait_number=self._num_waits, was_broken=was_broken)
            self._waiting.pop(name, None)
            self._waiting[name] = None

    def formed(self, step: int = 0) -> dict[str, tuple[int, int, int]]:
        """Returns generation, rank and size for each worker that a generation has formed with."""
        placements = {}
        for name in list(self._waiting):
            info = self.rendezvous.reply_for(name).formed
            if info is not None:
                placement: Any = {"generation": info.number, "rank": info.rank, "step": step, "phase": "compute"}
                self.heartbeats[name] = replace(self.heartbeats[name], wait_number=0, was_broken=False, **placement)
                placements[name] = (info.number, info.rank, info.size)
                del self._waiting[name]
        return placements

    def start(self, names: str, step: int = 0) -> None:
        """Forms the first generation with workers, long enough ago for the rendezvous to know all of them."""
        self.rendezvous.set_expected(len(names))
        self.join(names)
        assert len(self.formed(step)) == len(names)
        self.now_s += 2 * SILENCE_S
        for name in names:
            self.beat(name)

    @property
    def lost(self) -> list[str]:
        """The workers that the rendezvous has declared lost."""
        return list(self.rendezvous.status().lost_for_s)
