"""With what torch's default process group is made, and what is waited for when one is settled."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_app.reduction.overlap import SideStream
from ray_app.reduction.sharded import DeterministicShardedReducer
from ray_app.reduction.tree import TreeSum, tree_parents
from ray_app.train import process_group
from ray_app.train.process_group import ProcessGroup, backend_name, init_default_group
from tests.support.fake_cuda import DEVICE, Streams

GPU = torch.device("cuda", 1)


class Formation:
    """What `dist.init_process_group` was called with, and the environment at that moment."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.options: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        for name in process_group._NCCL_SETTINGS:
            patch.delenv(name, raising=False)
        patch.setattr(dist, "init_process_group", self)

    def __call__(self, name: str, **options: Any) -> None:
        self.options = {"name": name, **options}
        self.environment = {name: value for name, value in os.environ.items() if name.startswith("TORCH_NCCL")}


def test_nccl_is_made_for_the_worker_s_device_and_told_not_to_wait_for_dumps(monkeypatch: pytest.MonkeyPatch) -> None:
    formation = Formation(monkeypatch)
    init_default_group(backend_name(GPU, "auto"), GPU, dist.HashStore(), 0, 1)
    assert (formation.options["name"], formation.options["device_id"]) == ("cpu:gloo,cuda:nccl", GPU)
    assert formation.environment == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }


def test_what_a_user_has_set_of_nccl_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    formation = Formation(monkeypatch)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    init_default_group(backend_name(GPU, "auto"), GPU, dist.HashStore(), 0, 1)
    assert formation.environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


@pytest.mark.parametrize(("device", "backend"), [(GPU, "gloo"), (torch.device("cpu"), "auto")])
def test_gloo_is_bound_to_no_device_and_needs_nothing_of_nccl(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, backend: str
) -> None:
    formation = Formation(monkeypatch)
    init_default_group(backend_name(device, backend), device, dist.HashStore(), 0, 1)
    assert (formation.options["name"], formation.options["device_id"], formation.environment) == ("gloo", None, {})


def test_settling_waits_for_what_computes_and_for_no_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, group = Streams(monkeypatch), ProcessGroup()
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current_stream)
    group.has_device_collectives, group._device = True, DEVICE
    group.check_device_errors()
    assert streams.calls == ["computing: wait for all"]


def test_the_exchange_has_a_stream_that_no_communicator_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    with SideStream(DEVICE, "reduction", -1).entered(), SideStream(DEVICE, "upload").entered():
        assert streams.at == ["computing", "side, first", "side"]


def test_a_sum_of_shards_drops_memory_only_when_the_stream_that_added_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Zeros of a pass in which nobody used a parameter are made by the stream that computes, and added by that of the
    exchange later.
    """
    streams = Streams(monkeypatch)
    scatter = SimpleNamespace(leaves=range(1))
    reducer: Any = SimpleNamespace(_sums=[TreeSum(tree_parents(2))], _scatter=scatter)
    DeterministicShardedReducer._push(reducer, 0, [torch.zeros(3, device=DEVICE)])
    assert streams.calls == []
    scatter.leaves = range(1, 2)
    with SideStream(DEVICE, "reduce-scatter").entered():
        DeterministicShardedReducer._push(reducer, 0, [torch.ones(3, device=DEVICE)])
    assert streams.calls == ["side: used by side"]
