"""Time in which a process group forms again without a lost rank: gloo's own `reconfigure`, and the new group of this
application.

python benchmarks/reforming.py              # needs a quiet machine; half a minute

Plain processes on one machine. One of them is killed while all reduce; the time is measured from the error of the
others to the end of their first reduction in the group without it. `ours` is `train.process_group`, which opens a group
at a new prefix of the store; `reconfigure` is an experiment of PyTorch 2.15 (pytorch/pytorch#187381). Determining the
surviving ranks is the same for both and is not counted.
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
from ray_app.train.membership import KEY_BYTES, GenerationInfo
from ray_app.train.process_group import ProcessGroup

LOCALHOST = "127.0.0.1"
KEY = "ab" * KEY_BYTES
SIZES, ROUNDS = (3, 5), 5
_TIMEOUT = timedelta(seconds=20)


def reduce_until_lost(rank: int, size: int) -> float:
    """Reduces until the last rank, which kills itself, is lost; returns the monotonic time of the error."""
    values = torch.ones(1 << 16)
    dist.all_reduce(values)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.all_reduce(values)
    except RuntimeError:
        return time.perf_counter()


def first_reduction(since_s: float, size: int) -> float:
    """Returns the seconds until the end of the first reduction of the new group."""
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == size
    return time.perf_counter() - since_s


def ours(rank: int, store: Path, size: int, port: int) -> float:
    """Opens a group of this application, then one without the last rank."""
    del store
    first, second = ProcessGroup(), ProcessGroup()
    first.open(GenerationInfo(1, rank, size, LOCALHOST, port, key=KEY), torch.device("cpu"), "gloo")
    since_s = reduce_until_lost(rank, size)
    first.close(True)
    second.open(GenerationInfo(2, rank, size - 1, LOCALHOST, port, key=KEY), torch.device("cpu"), "gloo")
    try:
        return first_reduction(since_s, size - 1)
    finally:
        second.close(False)


def reconfigured(rank: int, store: Path, size: int, port: int) -> float:
    """Opens one group and reconfigures it to the surviving ranks."""
    del store
    store_client = TCPStore(LOCALHOST, port, is_master=False)
    options: dict[str, Any] = {"enable_reconfigure": True}
    prefixed = dist.PrefixStore("group", store_client)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=_TIMEOUT, **options)
    try:
        _reconfigure(store_client, 1, rank, size)
        since_s = reduce_until_lost(rank, size)
        _reconfigure(store_client, 2, rank, size - 1)
        return first_reduction(since_s, size - 1)
    finally:
        dist.destroy_process_group()


def _reconfigure(store_client: Any, number: int, rank: int, size: int) -> None:
    # These functions of torch are new in 2.15.
    get_handle, reconfigure = getattr(dist, "_get_reconfigure_handle", None), getattr(dist, "_reconfigure", None)
    assert get_handle is not None, "it needs torch 2.15"
    assert reconfigure is not None, "it needs torch 2.15"
    store_client.set(f"{number}/{rank}", get_handle())
    handles = [store_client.get(f"{number}/{other_rank}").decode() for other_rank in range(size)]
    reconfigure(uuid=number, handles=handles, timeout=_TIMEOUT).wait()


def measure(pool: WorkerPool, side: Any, size: int) -> float:
    """Returns the seconds of the slowest surviving rank."""
    store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
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
                seconds: dict[str, list[float]] = {name: [] for name in sides}
                for _ in range(options.rounds + 1):
                    for name, side in sides.items():
                        seconds[name].append(measure(pool, side, size))
                text = ", ".join(
                    f"{name} {median(s[1:]) * 1e3:.0f} ms ({min(s[1:]) * 1e3:.0f}-{max(s[1:]) * 1e3:.0f})"
                    for name, s in seconds.items()
                )
                print(f"{size} ranks, one lost: {text}", flush=True)
        finally:
            pool.close()


if __name__ == "__main__":
    main()
