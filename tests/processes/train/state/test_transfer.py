"""The transfer of a state to joining workers: it is complete, reaches no other rank, and does not delay heartbeats."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ray_app.checkpoint.format import Snapshot, pack
from ray_app.config.config import Config
from ray_app.reduction.transport import receive
from ray_app.reduction.world import World
from ray_app.testing import WorkerPool, digest_tensors
from ray_app.train.state import transfer as transfer_module
from ray_app.train.state.state import TrainingState
from ray_app.train.state.transfer import transfer_snapshot
from tests.support.device_group import BACKEND
from tests.support.local_world import CPU, LocalMembership, TinyImages

_MB = 1 << 20


def make_snapshot() -> Snapshot:
    """Returns a snapshot with tensors of all kinds, some of them larger than a chunk of the transfer."""
    torch.manual_seed(0)
    values = torch.randn(3000, 2000)
    model = {
        "large": values,
        "another way around": values[:1500].t(),
        "channels last": torch.randn(64, 8, 9, 9).contiguous(memory_format=torch.channels_last),
        "half": values[:2000].bfloat16(),
        "a view": values[7],
        "whole numbers": torch.arange(10_000),
        "truth": values[:100] > 0,
        "nothing": torch.empty(0, 4),
        "one": torch.tensor(3.0),
        "repeated": torch.ones(1).expand(5000),
    }
    optimizer = {
        "state": {0: {"step": torch.tensor(7.0), "exp_avg": values * 2}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
    }
    return Snapshot(5, model, optimizer, {"last_epoch": 4, "milestones": {3: 1}}, {"scale": [1.0, 2.0]})


def transfer_and_digest(
    rank: int, store: Path, size: int, source: int, to: list[int], backend: str, by_device: bool
) -> Any:
    snapshot = make_snapshot() if rank == source else None
    with LocalMembership(World(rank, size, size), store, backend=backend).generation(0, False) as (world, _):
        received = transfer_snapshot(snapshot, world, source, to, CPU if by_device else None)
    if rank == source:
        assert received is snapshot
    return received and digest_tensors(received)


@pytest.mark.parametrize(
    ("size", "source", "to", "backend", "by_device"),
    [
        (4, 0, [1, 2, 3], "gloo", False),
        (4, 2, [3], "gloo", False),
        (3, 1, [2, 0], BACKEND, False),
        (4, 2, [3], BACKEND, True),
    ],
)
def test_only_ranks_without_a_state_receive_it(
    worker_pool: WorkerPool, size: int, source: int, to: list[int], backend: str, by_device: bool
) -> None:
    expected = digest_tensors(make_snapshot())
    digests = worker_pool.run(size, transfer_and_digest, size, source, to, backend, by_device)
    assert digests == [expected if rank in [source, *to] else None for rank in range(size)]


class LargeModel(TinyImages):
    """A task with `megabytes` MB of parameters, half of them in one tensor."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.megabytes = megabytes

    def build_model(self) -> nn.Module:
        sizes = [self.megabytes // 2] + [self.megabytes // 16] * 8
        return nn.ParameterList([nn.Parameter(torch.zeros(size * _MB // 4)) for size in sizes])


@contextmanager
def longest_silence(silence: list[float]) -> Iterator[None]:
    """Stores in `silence[0]` the longest time in seconds for which another thread of this process did not run."""
    is_over = threading.Event()

    def measure() -> None:
        last_s = time.monotonic()
        while not is_over.is_set():
            time.sleep(0.005)
            now_s = time.monotonic()
            silence[0], last_s = max(silence[0], now_s - last_s), now_s

    thread = threading.Thread(target=measure)
    thread.start()
    yield
    is_over.set()
    thread.join()


def share_with_joining_rank(rank: int, store: Path, megabytes: int) -> float:
    """Shares the state of rank 0 with rank 1, which joins; returns the longest silence in seconds."""
    config = Config().replace(optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}})
    state = TrainingState(config, LargeModel(megabytes), CPU, 10)
    if rank == 0:
        state.initialize(None)
        with torch.no_grad():
            for number, p in enumerate(state.model.parameters()):
                p.fill_(number + 0.5)
    silence = [0.0]
    world = World(rank, 2, 2)
    with LocalMembership(world, store).generation(0, False), longest_silence(silence):
        state.backend.share(world, lambda: None)
    assert state.step == 0
    for number, p in enumerate(state.model.parameters()):
        assert bool((p == number + 0.5).all())
    return silence[0]


@pytest.mark.rest
def test_heartbeats_continue_while_a_gigabyte_is_shared(worker_pool: WorkerPool) -> None:
    """A silence does not depend on the number of tensors: four times as many take longer, with the same silences."""
    silences = worker_pool.run(2, share_with_joining_rank, 1024)
    assert max(silences) < 0.5, "a thread was blocked, as when a state is pickled as a whole"


def transfer_four_gigabytes(rank: int, store: Path) -> tuple[float, int]:
    """Sends rank 1 tensors of 4 GB that take no memory; returns the longest silence and the received bytes."""
    megabytes = [2048] + [256] * 8
    model = {
        str(number): torch.full((1,), number + 0.5).expand(size * _MB // 4) for number, size in enumerate(megabytes)
    }
    allocated: list[torch.Tensor] = []

    def allocate_one_element(shape: tuple[int, ...], dtype: torch.dtype, device: object) -> torch.Tensor:
        del device
        # Received chunks are copied into this tensor from their own memory.
        allocated.append(torch.zeros((1,), dtype=dtype).expand(shape))
        return allocated[-1]

    silence, received = [0.0], [0]
    with (
        LocalMembership(World(rank, 2, 2), store).generation(0, False),
        longest_silence(silence),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(torch, "empty", allocate_one_element)

        def receive_and_count(chunk: torch.Tensor, source: int) -> None:
            receive(chunk, source)
            received[0] += chunk.nbytes

        patch.setattr(transfer_module, "receive", receive_and_count)
        transfer_snapshot(Snapshot(1, model, {}, None) if rank == 0 else None, World(rank, 2, 2), 0, [1])
    return silence[0], received[0]


@pytest.mark.rest
def test_heartbeats_continue_while_four_gigabytes_are_sent(worker_pool: WorkerPool) -> None:
    """All bytes are sent, but the tensors are expanded views, so that they need no memory."""
    (sender_silence, _), (receiver_silence, received) = worker_pool.run(2, transfer_four_gigabytes)
    assert received >= 4 << 30
    assert max(sender_silence, receiver_silence) < 1.0


@pytest.mark.rest
def test_heartbeats_continue_while_a_snapshot_is_packed() -> None:
    """Snapshot actors pack snapshots while their workers train."""
    silence = [0.0]
    snapshot = Snapshot(1, {"p": torch.zeros(64 * _MB)}, {"state": {0: torch.zeros(64 * _MB)}}, None)
    with longest_silence(silence):
        files = pack(snapshot)
    assert sum(map(len, files.values())) > 512 * _MB
    assert silence[0] < 0.4, "a thread was blocked for most of the copy, as under Python's lock (0.9 s)"
