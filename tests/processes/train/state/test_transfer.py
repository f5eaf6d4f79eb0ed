"""How a state gets to newcomers: whole, to nobody else, and so that signs of life go on meanwhile."""

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
from torch.optim import Optimizer

from ray_app.checkpoint.format import Snapshot, pack
from ray_app.config.config import Config
from ray_app.reduction.base import World
from ray_app.testing import WorkerPool, digest_tensors
from ray_app.train.state import transfer as transfer_module
from ray_app.train.state.state import TrainingState
from ray_app.train.state.transfer import transfer_snapshot
from tests.support.device_group import BACKEND
from tests.support.local_world import CPU, LocalMembership

_MB = 1 << 20


def everything() -> Snapshot:
    """Tensors of all kinds, some larger than a piece."""
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


def passed_on(rank: int, store: Path, size: int, source: int, to: list[int], backend: str) -> Any:
    given = everything() if rank == source else None
    with LocalMembership(World(rank, size, size), store, backend=backend).generation(0, False):
        got = transfer_snapshot(given, rank, source, to)
    if rank == source:
        assert got is given
    return got and digest_tensors(got)


@pytest.mark.parametrize(
    ("size", "source", "to", "backend"), [(4, 0, [1, 2, 3], "gloo"), (4, 2, [3], "gloo"), (3, 1, [2, 0], BACKEND)]
)
def test_those_who_lack_a_state_get_it_and_nobody_else_does_anything(
    pool: WorkerPool, size: int, source: int, to: list[int], backend: str
) -> None:
    expected = digest_tensors(everything())
    found = pool.run(size, passed_on, size, source, to, backend)
    assert found == [expected if rank in [source, *to] else None for rank in range(size)]


class Wide:
    """A task whose model has so many megabytes of parameters, one of them half of all."""

    def __init__(self, megabytes: int) -> None:
        self.megabytes = megabytes

    def build_model(self) -> nn.Module:
        sizes = [self.megabytes // 2] + [self.megabytes // 16] * 8
        return nn.ParameterList([nn.Parameter(torch.zeros(size * _MB // 4)) for size in sizes])

    def apply_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        raise AssertionError


@contextmanager
def longest_silence(found: list[float]) -> Iterator[None]:
    """Puts the longest time for which another thread of this process did not get to run into `found`."""
    over = threading.Event()

    def beat() -> None:
        last = time.monotonic()
        while not over.is_set():
            time.sleep(0.005)
            now = time.monotonic()
            found[0], last = max(found[0], now - last), now

    thread = threading.Thread(target=beat)
    thread.start()
    yield
    over.set()
    thread.join()


def joined(rank: int, store: Path, megabytes: int) -> float:
    """Rank 1 joins rank 0, which has a state; returns the longest silence."""
    config = Config().replace(optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}})
    state = TrainingState(config, Wide(megabytes), CPU, 10)
    if rank == 0:
        state.initialize(None)
        with torch.no_grad():
            for number, p in enumerate(state.model.parameters()):
                p.fill_(number + 0.5)
    silence = [0.0]
    world = World(rank, 2, 2)
    with LocalMembership(world, store).generation(0, False), longest_silence(silence):
        state.sync.share(world, lambda: None)
    assert state.step == 0
    for number, p in enumerate(state.model.parameters()):
        assert bool((p == number + 0.5).all())
    return silence[0]


@pytest.mark.rest
def test_signs_of_life_go_on_while_a_gigabyte_is_shared(pool: WorkerPool) -> None:
    """Nothing depends on how many tensors there are, so four times as many take four times as long, with the same
    silences.
    """
    silences = pool.run(2, joined, 1024)
    assert max(silences) < 0.5, "pickled as a whole it is above a second"


def four_gigabytes(rank: int, store: Path) -> tuple[float, int]:
    """Rank 1 gets tensors of 4 GB that take no memory on either side; returns the longest silence and how many bytes it
    was sent.
    """
    megabytes = [2048] + [256] * 8
    model = {
        str(number): torch.full((1,), number + 0.5).expand(size * _MB // 4) for number, size in enumerate(megabytes)
    }
    got: list[torch.Tensor] = []

    def without_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        got.append(torch.zeros((1,), dtype=dtype).expand(shape))  # what arrives for it goes through a copy of a piece
        return got[-1]

    silence, received = [0.0], [0]
    with (
        LocalMembership(World(rank, 2, 2), store).generation(0, False),
        longest_silence(silence),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(transfer_module.torch, "empty", without_memory)
        real = transfer_module.receive

        def counted(piece: torch.Tensor, source: int) -> None:
            real(piece, source)
            received[0] += piece.nbytes

        patch.setattr(transfer_module, "receive", counted)
        transfer_snapshot(Snapshot(1, model, {}, None) if rank == 0 else None, rank, 0, [1])
    return silence[0], received[0]


@pytest.mark.rest
def test_signs_of_life_go_on_while_four_gigabytes_are_sent(pool: WorkerPool) -> None:
    """The sizes are faked, so no machine needs the memory: all bytes are sent."""
    (one, _), (other, received) = pool.run(2, four_gigabytes)
    assert received >= 4 << 30
    assert max(one, other) < 1.0


@pytest.mark.rest
def test_signs_of_life_go_on_while_a_snapshot_is_packed() -> None:
    """For the keepers of snapshots in memory."""
    silence = [0.0]
    snapshot = Snapshot(1, {"p": torch.zeros(64 * _MB)}, {"state": {0: torch.zeros(64 * _MB)}}, None)
    with longest_silence(silence):
        files = pack(snapshot)
    assert sum(map(len, files.values())) > 512 * _MB
    assert silence[0] < 0.4, "copied under Python's lock it is 0.9 s"
