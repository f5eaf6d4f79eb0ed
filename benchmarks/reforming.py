"""How long a process group takes to form again without a lost rank: gloo's own `reconfigure`, and the new group that
ours is.

python benchmarks/reforming.py              # needs a quiet machine; half a minute

Plain processes on one machine. One of them is killed while all exchange; from the error that the others get to the end
of their first exchange in the group without it. `ours` is `train.group.process_group`, which opens a group at a new
prefix of the store; `reconfigure` is an experiment of PyTorch 2.15 (pytorch/pytorch#187381). Ways to tell who is left
are the same for both and not counted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ray_app.testing import KilledError, WorkerPool
from ray_app.train.membership import GenerationInfo
from ray_app.train.process_group import ProcessGroup

HERE, SIZES, ROUNDS = "127.0.0.1", (3, 5), 5
_TIMEOUT = timedelta(seconds=20)


def exchange_until_lost(rank: int, size: int) -> float:
    """Exchanges until the last rank dies, which does it now; returns when the error came, by the monotonic clock."""
    values = torch.ones(1 << 16)
    dist.all_reduce(values)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.all_reduce(values)
    except RuntimeError:
        return time.perf_counter()


def first_exchange(since_s: float, size: int) -> float:
    """Seconds until the first exchange of the new group has ended."""
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == size
    return time.perf_counter() - since_s


def ours(rank: int, store: Path, size: int, port: int) -> float:
    """A group of ours, then one without the last rank."""
    del store
    first, second = ProcessGroup(), ProcessGroup()
    first.open(GenerationInfo(1, rank, size, HERE, port), torch.device("cpu"), "gloo")
    since_s = exchange_until_lost(rank, size)
    first.close(True)
    second.open(GenerationInfo(2, rank, size - 1, HERE, port), torch.device("cpu"), "gloo")
    try:
        return first_exchange(since_s, size - 1)
    finally:
        second.close(False)


def reconfigured(rank: int, store: Path, size: int, port: int) -> float:
    """One group that is told who is left."""
    del store
    meet = TCPStore(HERE, port, is_master=False)
    options: dict[str, Any] = {"enable_reconfigure": True}
    prefixed = dist.PrefixStore("group", meet)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=_TIMEOUT, **options)
    try:
        _reconfigure(meet, 1, rank, size)
        since_s = exchange_until_lost(rank, size)
        _reconfigure(meet, 2, rank, size - 1)
        return first_exchange(since_s, size - 1)
    finally:
        dist.destroy_process_group()


def _reconfigure(meet: Any, number: int, rank: int, size: int) -> None:
    meet.set(f"{number}/{rank}", dist._get_reconfigure_handle())  # type: ignore[attr-defined]
    handles = [meet.get(f"{number}/{each}").decode() for each in range(size)]
    dist._reconfigure(uuid=number, handles=handles, timeout=_TIMEOUT).wait()  # type: ignore[attr-defined]


def measure(pool: WorkerPool, side: Any, size: int) -> float:
    """Seconds of the slowest of those who are left."""
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    outcomes = pool.call(size, side, size, store.port)
    *left, lost = outcomes
    assert isinstance(lost.error, KilledError), lost
    for outcome in left:
        assert outcome.error is None, outcome.trace
    return max(outcome.value for outcome in left)


def main() -> None:
    """Measures both sides in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    sides = {"ours": ours, "reconfigure": reconfigured, "ours again": ours}
    with tempfile.TemporaryDirectory() as folder:
        pool = WorkerPool(max(SIZES), Path(folder))
        try:
            for size in SIZES:
                found: dict[str, list[float]] = {name: [] for name in sides}
                for _ in range(options.rounds + 1):
                    for name, side in sides.items():
                        found[name].append(measure(pool, side, size))
                told = ", ".join(
                    f"{name} {median(s[1:]) * 1e3:.0f} ms ({min(s[1:]) * 1e3:.0f}-{max(s[1:]) * 1e3:.0f})"
                    for name, s in found.items()
                )
                print(f"{size} ranks, one lost: {told}", flush=True)
        finally:
            pool.close()


if __name__ == "__main__":
    main()
