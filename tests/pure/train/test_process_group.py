"""The options of torch's default process group, and the streams that the host waits for."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ray_app.devices import kind_of
from ray_app.reduction.overlap import SideStream
from ray_app.reduction.sharded import DeterministicShardedReducer
from ray_app.reduction.tree import TreeSum, add_lists, tree_parents
from ray_app.train.process_group import ProcessGroup, backend_name, init_default_group, use_interface_of_host
from tests.support.fake_cuda import DEVICE, RecordingCuda

GPU = torch.device("cuda", 1)


class RecordedInit:
    """Replaces `dist.init_process_group`, and records its arguments and the environment."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.options: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        for name in kind_of(GPU).group_settings:
            patch.delenv(name, raising=False)
        patch.setattr(dist, "init_process_group", self)

    def __call__(self, name: str, **options: Any) -> None:
        self.options = {"name": name, **options}
        self.environment = {name: os.environ[name] for name in kind_of(GPU).group_settings if name in os.environ}


def test_nccl_is_bound_to_the_device_and_does_not_wait_for_dumps(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedInit(monkeypatch)
    init_default_group(backend_name(GPU, "auto"), GPU, HashStore(), 0, 1)
    assert (recorded.options["name"], recorded.options["device_id"]) == ("cpu:gloo,cuda:nccl", GPU)
    assert recorded.environment == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",
        "NCCL_DEBUG": "WARN",
    }
    assert recorded.options["pg_options"].config.blocking == 0


def test_nccl_settings_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedInit(monkeypatch)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    init_default_group(backend_name(GPU, "auto"), GPU, HashStore(), 0, 1)
    assert recorded.environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


@pytest.mark.parametrize(("device", "backend"), [(GPU, "gloo"), (torch.device("cpu"), "auto")])
def test_gloo_is_bound_to_no_device_and_sets_no_nccl_variables(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, backend: str
) -> None:
    recorded = RecordedInit(monkeypatch)
    init_default_group(backend_name(device, backend), device, HashStore(), 0, 1)
    assert (recorded.options["name"], recorded.options["device_id"], recorded.environment) == ("gloo", None, {})
    assert recorded.options["pg_options"] is None


def test_nccl_gets_the_whole_name_of_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the sign `eth1` stands for `eth10`, too."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    use_interface_of_host("127.0.0.1")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


def test_check_device_errors_waits_for_the_computing_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, group = RecordingCuda(monkeypatch), ProcessGroup()
    group.has_device_collectives, group.device = True, DEVICE
    group.check_device_errors()
    assert streams.calls == ["computing: wait for all"]


def test_the_reduction_stream_has_priority_unlike_the_upload_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = RecordingCuda(monkeypatch)
    with SideStream(DEVICE, "reduction", -1).entered(), SideStream(DEVICE, "upload").entered():
        assert streams.active_streams == ["computing", "side, first", "side"]


def test_a_sum_of_shards_keeps_memory_until_the_adding_stream_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shards are received on a stream of their own, and added on the computing stream after a pass."""
    streams = RecordingCuda(monkeypatch)
    scatter = SimpleNamespace(nodes=[(0, 1)])
    reducer: Any = SimpleNamespace(_tree=TreeSum(tree_parents(2), add=add_lists), _scatter=scatter)
    for nodes in ([(0, 1)], [(1, 2)]):
        assert streams.calls == []
        scatter.nodes = nodes
        with SideStream(DEVICE, "reduce-scatter").entered():
            shard = torch.ones(3, device=DEVICE)
        DeterministicShardedReducer._push(reducer, [[shard]])
    assert streams.calls == ["computing: used by computing"]
