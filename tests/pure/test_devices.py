"""The kinds of devices: no other module names one; the device of a process, its kernels and its description."""

from __future__ import annotations

import ast
import ctypes
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_app import devices
from ray_app.cluster.resources import cluster
from ray_app.config.config import Config
from ray_app.devices import HOST, KINDS, DeviceKind, accelerator, assigned_device, kind_of
from ray_app.errors import ConfigError
from ray_app.reduction.overlap import ThreadExecutor
from ray_app.task import environment
from ray_app.task.environment import set_threads_and_kernels
from tests.support.library_names import Names
from tests.support.paths import ROOT

PACKAGE = ROOT / "ray_app"


@pytest.mark.parametrize(
    ("ids", "visible", "count", "index"),
    [
        # Ray hides the GPUs of the other workers of the node, or does not.
        ([3], "3", 1, 0),
        ([3], "0,1,2,3", 4, 3),
        ([2], "2,3", 2, 0),
        # Ray gives the ids of a worker that joins later as strings.
        (["3"], "2,3", 2, 1),
        # Ray does not set the variable.
        ([3], None, 4, 3),
        # The process sees one device; which variable hides the others does not matter.
        (["3"], None, 1, 0),
        (["MIG-b"], "MIG-a", 1, 0),
        (["MIG-b"], "MIG-a,MIG-b", 2, 1),
        # The process has no driver, and nothing computes on the device.
        ([0], "", 0, 0),
        ([3], "3", 0, 0),
        (["MIG-b"], None, 0, 0),
        # The worker has two GPUs and uses the first.
        ([2, 3], "0,1,2,3", 4, 2),
        ([2, 3], None, 2, 0),
        (["GPU-b2"], "GPU-a1,GPU-b2", 2, 1),
        # The process is not a Ray worker.
        ([], None, 4, 0),
    ],
)
def test_a_worker_computes_on_the_gpu_that_ray_gave_it(
    monkeypatch: pytest.MonkeyPatch, ids: list[int | str], visible: str | None, count: int, index: int
) -> None:
    see_devices(monkeypatch, "CUDA_VISIBLE_DEVICES", visible, count)
    assert assigned_device(ids) == torch.device("cuda", index)


def see_devices(patch: pytest.MonkeyPatch, variable: str, visible: str | None, count: int) -> None:
    """Lets this process see some GPUs, as a variable says."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        patch.delenv(name, raising=False)
    if visible is not None:
        patch.setenv(variable, visible)
    patch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(("hip", "index"), [(None, 3), ("6.4", 1)])
def test_the_visible_devices_of_rocm_have_a_variable_of_their_own(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, index: int
) -> None:
    see_devices(monkeypatch, "HIP_VISIBLE_DEVICES", "0,3,5,6", 4)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert assigned_device(["3"]) == torch.device("cuda", index)
    assert ({"cuda", "hip"} & KINDS["cuda"].versions().keys()) == {"hip" if hip else "cuda"}


@pytest.mark.parametrize("assigned", ["MIG-c", "GPU-c3", "7"])
def test_a_gpu_that_the_process_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch, assigned: str) -> None:
    see_devices(monkeypatch, "CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b", 2)
    with pytest.raises(ConfigError, match=f"the GPU {assigned}, but the process sees 2 .*VISIBLE_DEVICES is MIG-a,MIG"):
        assigned_device([assigned])


@pytest.mark.parametrize(
    ("visible", "name", "index", "is_slice"),
    [
        ("MIG-a", "NVIDIA H100", 0, True),
        ("GPU-a1,MIG-b", "NVIDIA H100", 1, True),
        ("GPU-a1,MIG-b", "NVIDIA H100", 0, False),
        # In a container the variable need not be set.
        (None, "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 0, True),
        (None, "NVIDIA H100", 3, False),
    ],
)
def test_slices_of_a_gpu_are_recognized(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, name: str, index: int, is_slice: bool
) -> None:
    see_devices(monkeypatch, "CUDA_VISIBLE_DEVICES", visible, 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert KINDS["cuda"].is_slice(torch.device("cuda", index)) == is_slice


@pytest.mark.parametrize(("share", "strategy", "limits"), [(0.25, "ddp", [0.25]), (1, "ddp", []), (0.25, "single", [])])
def test_a_worker_with_a_share_of_a_gpu_gets_that_share_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, share: float, strategy: str, limits: list[float]
) -> None:
    set_limits = list[float]()
    for name in ("use", "set_up_kernels"):
        monkeypatch.setattr(KINDS["cuda"], name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: set_limits.append(share))
    config = Config().replace(scaling__gpus_per_worker=share, train__strategy=strategy)
    with environment.restore_process_state():
        environment.set_up_torch(config, torch.device("cuda", 0))
    assert set_limits == limits


def test_a_helper_thread_uses_the_device_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    used = list[tuple[str, torch.device]]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append((threading.current_thread().name, device)))
    executor = ThreadExecutor(torch.device("cuda", 2))
    executor.start(iter([None]), is_last=False)
    executor.drain()
    assert used == [("reduction", torch.device("cuda", 2))]


def test_ray_client_is_refused() -> None:
    config = Config().replace(run__ray_address="ray://head:10001")
    with pytest.raises(ConfigError, match=r"Ray Client.*ray-app submit"), cluster(config):
        pass


@pytest.mark.parametrize(("deterministic", "refuses", "mode"), [(True, True, 2), (True, False, 1), (False, True, 0)])
def test_the_deterministic_mode_follows_the_settings(deterministic: bool, refuses: bool, mode: int) -> None:
    torch.set_deterministic_debug_mode("default")
    set_threads_and_kernels(1, deterministic, refuses)
    assert torch.get_deterministic_debug_mode() == mode


@pytest.mark.parametrize(
    ("error_text", "kind", "message"),
    [
        (
            "set CUBLAS_WORKSPACE_CONFIG=:4096:8 before",
            ConfigError,
            "Restart the kernel and set CUBLAS_WORKSPACE_CONFIG=:4096:8",
        ),
        ("CUDA error: out of memory", RuntimeError, "out of memory"),
    ],
)
def test_a_process_that_set_the_cublas_workspace_too_late_is_refused(
    monkeypatch: pytest.MonkeyPatch, error_text: str, kind: type[Exception], message: str
) -> None:
    """PyTorch reads the variable once, at the first matrix product, and ignores later values."""

    def refuse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(error_text)

    devices.check_cublas_workspace(HOST)
    monkeypatch.setattr(torch, "mm", refuse)
    with pytest.raises(kind, match=message):
        devices.check_cublas_workspace(HOST)


_NEWER = """
import torch
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.backends.cudnn.rnn.fp32_precision = "ieee"
try:
    print(torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision())
except RuntimeError:
    print("refused")
from ray_app.devices import TF32_SETTINGS
print({name: kernels.fp32_precision for name, kernels in TF32_SETTINGS.items()})
"""


@pytest.mark.rest
def test_the_rounding_of_products_is_read_from_the_newer_settings() -> None:
    """PyTorch refuses its older settings after a process has used the newer ones."""
    completed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _NEWER],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=ROOT,
    )
    refused, precisions = completed.stdout.splitlines()
    assert refused == "refused"
    assert precisions == "{'matmul': 'tf32', 'convolution': 'tf32', 'recurrent': 'ieee'}"


def _raise(*arguments: object) -> None:
    raise AttributeError(arguments)


class _Driver:
    """A fake of libcuda.so.1.

    Args:
        version: The version that `cuDriverGetVersion` returns, such as 13020; with None the call fails.
    """

    def __init__(self, version: int | None) -> None:
        self._version = version

    def cuDriverGetVersion(self, version_pointer: Any) -> int:
        if self._version is None:
            return 999
        version_pointer._obj.value = self._version
        return 0


@pytest.mark.parametrize(("version", "expected"), [(13020, "13.2"), (12090, "12.9"), (None, "unknown")])
def test_the_cuda_version_is_read_from_the_driver(
    monkeypatch: pytest.MonkeyPatch, version: int | None, expected: str
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": _Driver(version)}[name])
    assert devices.driver_version() == expected


def test_the_version_of_a_missing_driver_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert devices.driver_version() == "unknown"


def test_a_gpu_is_described_without_private_functions_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: _Driver(13020))
    described = environment.describe(torch.device("cuda", 0))
    assert (described["device"], described["cuda"]) == ("cuda NVIDIA H100", f"{torch.version.cuda}, driver for 13.2")
    assert set(described) == {"torch", "device", "cpu_capability", "threads", "cuda", "cudnn", "nccl", "tf32"}
    assert "unknown" not in described.values()


def test_the_description_of_a_gpu_tolerates_failing_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in (
        (torch.cuda, "get_device_name"),
        (torch.backends.cudnn, "version"),
        (torch.cuda.nccl, "version"),
    ):
        monkeypatch.setattr(owner, name, _raise)
    described = environment.describe(torch.device("cuda", 0))
    assert (described["device"], described["cudnn"], described["nccl"]) == ("cuda unknown", "unknown", "unknown")


def test_a_device_is_made_current_where_it_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for device in (torch.device("cpu"), torch.device("cuda", 1)):
        kind_of(device).use(device)
    assert current == [torch.device("cuda", 1)]


@pytest.mark.parametrize(
    ("compilers", "variable", "header", "missing"),
    [
        (("gcc",), None, True, None),
        (("clang",), None, True, None),
        ((), "/opt/cc", True, None),
        ((), None, True, "train.compile needs a C compiler such as gcc on every node"),
        (("gcc",), None, False, "train.compile needs the header Python.h of Python"),
    ],
)
def test_the_compiler_that_triton_needs_is_checked_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    compilers: tuple[str, ...],
    variable: str | None,
    header: bool,
    missing: str | None,
) -> None:
    (tmp_path / "Python.h").write_text("") if header else None
    monkeypatch.setattr(shutil, "which", lambda name: name if name in compilers else None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.delenv("CC", raising=False) if variable is None else monkeypatch.setenv("CC", variable)
    if missing is None:
        environment.check_compiler(torch.device("cuda", 0))
        return
    with pytest.raises(ConfigError, match=missing):
        environment.check_compiler(torch.device("cuda", 0))


KIND_NAMES = {"cpu", "cuda", "xpu", "mps", "hpu", "npu", "tpu", "privateuseone"}


def device_kinds(code: str) -> list[str]:
    """Returns where code names a kind of device: a string that is one, or a part of torch for one kind.

    Keys of dictionaries are names of records, and `Tensor.cpu` copies to the host from any kind.
    """
    # A module that has none of these words names no kind.
    if not re.search(rf"\b(is_)?({'|'.join(KIND_NAMES)}|cudnn)\b", code):
        return []
    tree = ast.parse(code)
    keys = {key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys}
    named = [
        f"line {node.lineno}: {node.value!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.partition(":")[0] in KIND_NAMES
        and node not in keys
    ]
    for name, line in Names(tree).first_lines.items():
        parts = name.split(".")
        is_of_a_kind = KIND_NAMES & {*parts} - {"cpu"} or parts[-1] in ("is_cuda", "cudnn") or "cudnn" in parts
        if parts[0] == "torch" and is_of_a_kind:
            named.append(f"line {line}: {name}")
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return named + [f"line {node.lineno}: .{node.attr}" for node in attributes if node.attr in ("is_cuda", "is_cpu")]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('x = device.type == "cuda"', ["line 1: 'cuda'"]),
        ('torch.zeros(1, device="cuda:1")', ["line 1: 'cuda:1'"]),
        ("import torch\ntorch.cuda.synchronize()", ["line 2: torch.cuda.synchronize"]),
        ("from torch import cuda\ncuda.Stream()", ["line 1: torch.cuda", "line 2: torch.cuda.Stream"]),
        ("import torch\ntorch.backends.cudnn.benchmark = False", ["line 2: torch.backends.cudnn.benchmark"]),
        ("loss.is_cuda", ["line 1: .is_cuda"]),
        ("import torch\ntorch.backends.cpu.get_cpu_capability()\nvalues.cpu()\nrecord = {'cpu': 1}", []),
    ],
)
def test_names_of_kinds_are_recognized(code: str, expected: list[str]) -> None:
    assert device_kinds(code) == expected


def test_only_the_table_names_kinds_of_devices() -> None:
    """So a new kind is an entry of the table, and no branch elsewhere waits for hardware to be tried."""
    files = {file.relative_to(ROOT).as_posix(): device_kinds(file.read_text()) for file in PACKAGE.rglob("*.py")}
    assert {file for file, kinds in files.items() if kinds} == {"ray_app/devices.py"}, files


def test_a_kind_without_an_entry_is_an_accelerator_with_a_module_of_torch() -> None:
    kind = kind_of(torch.device("mtia", 0))
    assert (type(kind), kind.name, kind.is_host) == (DeviceKind, "mtia", False)
    assert kind.module is torch.mtia
    assert kind_of(torch.device("mtia", 1)) is kind


def test_the_accelerator_of_workers_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for current, name in ((torch.device("mtia"), "mtia"), (torch.device("cuda"), "cuda"), (None, "cuda")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda current=current: current)
        assert accelerator() is KINDS[name]
