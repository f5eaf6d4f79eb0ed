"""The default process group: torch's options, the errors of collectives, and the streams that the host waits for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ray_app.devices import kind_of
from ray_app.errors import PeerLostError, TaskError
from ray_app.reduction.overlap import SideStream
from ray_app.reduction.peer_errors import clear_group, collective, set_group, translate_peer_errors
from ray_app.reduction.sharded import DeterministicShardedReducer
from ray_app.reduction.tree import TreeSum, add_lists, tree_parents
from ray_app.task import metric_states
from ray_app.task.user_code import user_code
from ray_app.train import process_group
from ray_app.train.process_group import (
    ProcessGroup,
    backend_name,
    destroy_default_group,
    init_default_group,
    use_interface_of_host,
)
from tests.support.device_group import OUT_OF_MEMORY
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


def test_a_group_that_is_destroyed_gives_each_module_its_functions_back() -> None:
    names = ("is_initialized", "get_rank", "get_world_size")
    init_default_group("gloo", torch.device("cpu"), HashStore(), 0, 1)
    hidden = {name: getattr(dist, name) for name in names}
    destroy_default_group()
    originals = {name: getattr(dist.distributed_c10d, name) for name in names}
    assert {name: getattr(dist, name) for name in names} == originals != hidden
    assert metric_states.return_false not in originals.values(), "metrics would ask for the group"


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


LOCAL_ERRORS = [
    torch.OutOfMemoryError(OUT_OF_MEMORY),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error. Cuda failure 2 'out of memory'"
    ),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0"),
    RuntimeError("Expected tensor on cuda:0 but found tensor on cuda:1"),
    RuntimeError("Unsupported tensor data type for NCCL"),
    RuntimeError("NCCL AllReduce failed: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
    RuntimeError("Failed to initialize NCCL communicator: invalid usage (run with NCCL_DEBUG=WARN for details)"),
    torch.AcceleratorError("a broken pipe of this device"),
    torch.OutOfMemoryError("no memory for a buffer of gloo"),
    dist.DistBackendError("NCCL error, invalid usage (run with NCCL_DEBUG=WARN for details): Duplicate GPU detected"),
]
PEER_ERRORS = [
    RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711"
    ),
    RuntimeError("Application timeout caused pair closure"),
    RuntimeError("Gloo connectFullMesh failed with [...] no error"),
    dist.DistNetworkError("The client socket has timed out after 60000ms"),
    dist.DistStoreError("wait timeout after 1000ms, keys: /out of memory"),
    dist.DistBackendError("NCCL communicator was aborted on rank 1"),
    dist.DistBackendError("NCCL operation failed"),
    RuntimeError("NCCL communicator was aborted after a previous error"),
    RuntimeError("NCCL Async Error: remote process exited or there was a network error"),
    RuntimeError("failed to get async error: remote process exited or there was a network error"),
    RuntimeError("NCCL operation timed out"),
    RuntimeError("ProcessGroupNCCL not initialized"),
    RuntimeError("ProcessGroupNCCL has been finalized"),
    RuntimeError("NCCL GroupEnd failed: unhandled system error (run with NCCL_DEBUG=INFO for details)"),
    RuntimeError("NCCL User Rank failed: remote process exited or there was a network error"),
    RuntimeError(
        "Failed to initialize NCCL communicator: unhandled system error (run with NCCL_DEBUG=INFO for details)"
    ),
    RuntimeError("Failed to get NCCL unique ID: internal error - please report this issue to the NCCL developers"),
]


@pytest.mark.parametrize("error", LOCAL_ERRORS, ids=lambda error: str(error)[:20])
def test_an_error_unrelated_to_peers_is_raised_unchanged(error: RuntimeError) -> None:
    with pytest.raises(RuntimeError) as caught, collective():
        raise error
    assert caught.value is error


@pytest.mark.parametrize("error", PEER_ERRORS, ids=lambda error: str(error)[:20])
def test_an_error_caused_by_a_peer_becomes_peer_lost_error(error: RuntimeError) -> None:
    with pytest.raises(PeerLostError, match="a collective failed"), collective():
        raise error


@dataclasses.dataclass
class StubGroup:
    """A process group with a fixed state."""

    is_aborted: bool = False
    failed: bool = False

    def has_failed(self) -> bool:
        return self.failed

    def check_device_errors(self) -> None:
        """Raises nothing: the device has no error."""


@contextmanager
def current_group(group: StubGroup) -> Iterator[None]:
    """Makes a group the process group of this process within a context."""
    set_group(group)
    try:
        yield
    finally:
        clear_group(group)


def error_of_collective(error: Exception) -> Exception:
    """Returns the error that `collective` raises for an error of its body."""
    with pytest.raises((PeerLostError, type(error))) as caught, collective():
        raise error
    return caught.value


def error_of_user_code(error: Exception) -> Exception:
    """Returns the error that a generation raises for an error of user code."""
    with pytest.raises((PeerLostError, TaskError)) as caught, translate_peer_errors(), user_code(lambda: "the update"):
        raise error
    return caught.value


UNKNOWN_ERROR = RuntimeError("words of no version that is known")


def test_any_error_of_a_collective_after_a_backend_failure_is_a_lost_peer() -> None:
    with current_group(StubGroup()):
        assert error_of_collective(UNKNOWN_ERROR) is UNKNOWN_ERROR
    with current_group(StubGroup(failed=True)):
        assert isinstance(error_of_collective(UNKNOWN_ERROR), PeerLostError)
    assert error_of_collective(UNKNOWN_ERROR) is UNKNOWN_ERROR, "there is no current group any more"


def test_an_aborted_group_starts_no_collective() -> None:
    launches = []
    with (
        current_group(StubGroup(is_aborted=True)),
        pytest.raises(PeerLostError, match="process group is aborted"),
        collective(),
    ):
        launches.append("a launch on a communicator that another thread aborts")
    assert not launches


@pytest.mark.parametrize("error", [UNKNOWN_ERROR, ValueError("not in range")], ids=["RuntimeError", "ValueError"])
def test_an_error_of_user_code_is_a_lost_peer_only_in_a_broken_group(error: Exception) -> None:
    with current_group(StubGroup()):
        assert isinstance(error_of_user_code(error), TaskError)
    with current_group(StubGroup(failed=True)):
        assert isinstance(error_of_user_code(error), PeerLostError)
    with current_group(StubGroup(is_aborted=True)):
        assert isinstance(error_of_user_code(error), PeerLostError)


@pytest.mark.parametrize("error", PEER_ERRORS, ids=lambda error: str(error)[:20])
def test_user_code_that_raises_the_text_of_a_peer_error_gets_a_task_error(error: RuntimeError) -> None:
    assert isinstance(error_of_user_code(error), TaskError)


def test_a_group_is_stuck_long_after_an_abort_that_did_not_end_its_forming(monkeypatch: pytest.MonkeyPatch) -> None:
    group = ProcessGroup()
    group.is_forming = True
    states = [group.is_stuck]
    group.abort()
    states.append(group.is_stuck)
    monkeypatch.setattr(process_group, "_STUCK_S", -1.0)
    states.append(group.is_stuck)
    group.is_forming = False
    assert [*states, group.is_stuck] == [False, False, True, False]
