"""The kinds of devices: what differs between the CPU, CUDA and other accelerators of torch.

`kind_of(device)` returns the kind of a device. Only this module names a kind; all other code asks for the attributes
and methods of `DeviceKind`. An accelerator that torch loads from another package (an entry point `torch.backends`, see
"Facilitating New Backend Integration by PrivateUse1" in PyTorch's tutorials) is a `DeviceKind` as it is. A kind that
differs from it is a subclass and an entry of `KINDS`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ray_app.errors import ConfigError
from ray_app.torch_private import has_cpp_compiler

HOST = torch.device("cpu")
"""The CPU, and the memory that it computes in."""
HOST_GROUP = "gloo"
"""torch's name of the backend of process groups that carries tensors of the host."""
UNKNOWN = "unknown"
"""The description of what a build of torch or a driver does not tell."""


class GraphBackend(Protocol):
    """Captures work of a device in graphs."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Runs work on the stream on which it will be captured, and waits for it."""

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """Captures what `work` launches on the device, without running it; returns a function that replays it."""


class DeviceKind:
    """A kind of device; this class has what torch's module of each accelerator has, such as `torch.xpu`.

    Args:
        name: The kind in `torch.device.type`.

    Attributes:
        is_host: Whether this is the CPU: tensors are in the memory of the host, and a call returns when its work is
            done. So there are neither streams nor copies to order. All other kinds have streams and events.
        has_graphs: Whether `make_graph_backend` returns a graph backend.
        rounds_by_position: Whether fused kernels may round a value by its position in memory, see `PiecewiseKernels`.
        group_settings: Environment variables for the backend of process groups that are set unless the user has set
            them.
        profiler_activities: What torch's profiler records of the device.
    """

    is_host: ClassVar[bool] = False
    has_graphs: ClassVar[bool] = False
    rounds_by_position: ClassVar[bool] = True
    group_settings: ClassVar[Mapping[str, str]] = {}
    profiler_activities: ClassVar[Sequence[torch.profiler.ProfilerActivity]] = ()

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def module(self) -> Any:
        """torch's module of these devices."""
        return torch.get_device_module(self.name)

    # --- devices of this process

    def device(self, index: int) -> torch.device:
        """Returns the device with an index among those that this process sees."""
        return torch.device(self.name, index)

    def count(self) -> int:
        """Returns the number of devices that this process sees."""
        return int(self.module.device_count())

    @property
    def visible_variable(self) -> str:
        """The environment variable with which Ray chooses the devices that a process sees."""
        return "ZE_AFFINITY_MASK" if self.name == "xpu" else "CUDA_VISIBLE_DEVICES"

    def device_name(self, device: torch.device) -> str:
        """Returns the name of a device's model."""
        return str(self.module.get_device_name(device))

    def uuid(self, device: torch.device) -> str:
        """Returns what tells a device from all others, as the tools of its vendor print it; "" if torch has none."""
        return str(getattr(self.module.get_device_properties(device), "uuid", ""))

    def is_slice(self, device: torch.device) -> bool:
        """Returns whether a device is a part of one, which the backend of process groups cannot use."""
        del device
        return False

    def check(self, device: torch.device) -> None:
        """Computes on a device and copies the result to the host, which raises the error of a device that has failed.

        A device without free memory has not failed. A stream of its own does not wait for work that hangs.
        """
        with suppress(torch.OutOfMemoryError), self.enter(get_stream(device, "check", -1)):
            (torch.ones(1, device=device) + 1).tolist()

    def versions(self) -> dict[str, str]:
        """Returns the versions and settings of the kind's libraries on which results depend."""
        return {}

    def use(self, device: torch.device) -> None:
        """Makes a device the current one of the calling thread.

        Every thread that computes has to call it: the current device belongs to a thread, and a new thread starts with
        the first one. Triton, torch's generators and user code that names a kind without an index use the current one.
        """
        self.module.set_device(device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restores the current device, its generator, and the settings of kernels at the end of the block."""
        devices = [self.module.current_device()] if self.module.is_initialized() else []
        with torch.random.fork_rng(devices, device_type=self.name):
            try:
                yield
            finally:
                for index in devices:
                    self.module.set_device(index)

    # --- random numbers

    def seed(self, value: int) -> None:
        """Seeds torch's generators of the host and of the current device."""
        torch.default_generator.manual_seed(value)
        self.module.manual_seed(value)

    def generator_states(self, device: torch.device) -> list[Tensor]:
        """Returns the states of torch's generators, the host's first."""
        return [torch.default_generator.get_state(), self.module.get_rng_state(device)]

    def set_generator_states(self, states: Sequence[Tensor], device: torch.device) -> None:
        """Sets the states that `generator_states` returned."""
        torch.default_generator.set_state(states[0])
        self.module.set_rng_state(states[1], device)

    # --- streams and events

    def make_stream(self, device: torch.device, priority: int) -> Any:
        """Returns a stream of torch's pool."""
        return self.module.Stream(device, priority=priority)

    def current_stream(self, device: torch.device) -> Any:
        """Returns the stream on which this thread queues work."""
        return self.module.current_stream(device)

    def enter(self, stream: Any) -> AbstractContextManager[Any]:
        """Returns a context in which a stream is the current one."""
        return self.module.stream(stream)

    def make_timers(self, count: int) -> list[Any] | None:
        """Returns events that record the time at which the device reaches them; None if the host's clock does that."""
        return [self.module.Event(enable_timing=True) for _ in range(count)]

    def synchronize_stream(self, device: torch.device) -> None:
        """Waits for the work on the current stream, and raises the errors of the device.

        Other streams may still have work afterwards, for example uploads for later steps.
        """
        self.current_stream(device).synchronize()

    def synchronize(self, device: torch.device) -> None:
        """Waits for all work of a device, and raises its errors."""
        self.module.synchronize(device)

    # --- memory of a device, and memory of the host that a device copies by itself

    def limit_memory(self, device: torch.device, share: float) -> None:
        """Limits what torch allocates on a device in this process to a share of its memory."""
        if hasattr(self.module, "set_per_process_memory_fraction"):
            self.module.set_per_process_memory_fraction(share, device)

    def free_cache(self) -> None:
        """Gives the memory that torch keeps for later allocations back to the devices."""
        torch.accelerator.empty_cache()

    def memory(self, device: torch.device) -> tuple[int, int] | None:
        """Returns the free bytes and all bytes of a device's memory; None for the host."""
        return torch.accelerator.get_memory_info(device)

    def lock_pages(self, address: int, size: int) -> str | None:
        """Asks the driver to page-lock a block of the host's memory; returns why it has not done so."""
        del address, size
        return "torch has no such function for this kind of device"

    def unlock_pages(self, address: int) -> None:
        """Gives back a block that `lock_pages` has locked."""
        raise NotImplementedError

    # --- kernels

    def set_up_kernels(self, device: torch.device, deterministic: bool) -> None:
        """Makes the kernels of a device deterministic, as far as torch's setting for all devices does not.

        Raises:
            ConfigError: This process has used the device before, in a way that does not allow it any more.
        """

    def missing_for_compilation(self) -> str | None:
        """Returns what `torch.compile` lacks on this machine for the device, or None."""
        return _missing_for_triton()

    def make_graph_backend(self, device: torch.device) -> GraphBackend:
        """Returns the graph backend of a device, if the kind `has_graphs`."""
        raise NotImplementedError

    # --- process groups

    @property
    def group_backend(self) -> str:
        """torch's name of the backend that sends tensors of these devices directly, and tensors of the host by gloo."""
        return f"{HOST.type}:{HOST_GROUP},{self.name}:{dist.get_default_backend_for_device(self.name)}"


class HostKind(DeviceKind):
    """The CPU."""

    is_host = True

    def device_name(self, device: torch.device) -> str:
        """Returns the instruction set, see `DeviceKind.device_name`."""
        del device
        return platform.machine()

    def uuid(self, device: torch.device) -> str:
        """Returns "": the node tells CPUs apart."""
        del device
        return ""

    def check(self, device: torch.device) -> None:
        """Does nothing: a CPU that has failed runs no check."""

    def free_cache(self) -> None:
        """Does nothing: memory of the host goes back by itself."""

    def memory(self, device: torch.device) -> tuple[int, int] | None:
        """Returns None: the memory of the host is not that of this process alone."""
        del device
        return None

    def use(self, device: torch.device) -> None:
        """Does nothing: a process has one CPU device."""

    def seed(self, value: int) -> None:
        """Seeds torch's generator."""
        torch.default_generator.manual_seed(value)

    def generator_states(self, device: torch.device) -> list[Tensor]:
        """Returns the state of torch's generator, see `DeviceKind.generator_states`."""
        del device
        return [torch.default_generator.get_state()]

    def set_generator_states(self, states: Sequence[Tensor], device: torch.device) -> None:
        """Sets the state that `generator_states` returned."""
        del device
        torch.default_generator.set_state(states[0])

    def make_timers(self, count: int) -> list[Any] | None:
        """Returns None: work is done when a call returns."""
        del count
        return None

    def synchronize_stream(self, device: torch.device) -> None:
        """Does nothing: work is done when a call returns."""

    def synchronize(self, device: torch.device) -> None:
        """Does nothing: work is done when a call returns."""

    def missing_for_compilation(self) -> str | None:
        """Returns what `torch.compile` lacks on this machine, see `DeviceKind.missing_for_compilation`."""
        return None if has_cpp_compiler() else "a C++ compiler such as g++"

    @property
    def group_backend(self) -> str:
        """See `DeviceKind.group_backend`."""
        return HOST_GROUP


_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class CudaKind(DeviceKind):
    """GPUs with CUDA."""

    has_graphs = True
    # The fused kernels of CUDA compute every value alike.
    rounds_by_position = False
    # With these variables torch's own threads neither end the process nor abort the group, and do not wait for dumps,
    # which would add a minute or more to a recovery. Instead the rendezvous decides when to abort, and
    # `ProcessGroup.check_device_errors` reads the error. The older class of torch has a time-out of its own in seconds
    # for a wait of NCCL, see `nonblocking_options`.
    group_settings: ClassVar[Mapping[str, str]] = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",
        "NCCL_DEBUG": "WARN",
    }
    profiler_activities = (torch.profiler.ProfilerActivity.CUDA,)

    @property
    def visible_variable(self) -> str:
        """The variable of CUDA, or that of ROCm: its builds of torch call their devices "cuda", too."""
        return "HIP_VISIBLE_DEVICES" if torch.version.hip else super().visible_variable

    def is_slice(self, device: torch.device) -> bool:
        """Returns whether a device is a slice of MIG; NCCL takes the slices of a GPU for one device, and refuses it."""
        visible = os.environ.get(self.visible_variable, "").split(",")
        return visible[min(device.index, len(visible) - 1)].startswith("MIG-") or " MIG " in query(
            self.device_name, device
        )

    def versions(self) -> dict[str, str]:
        """Returns the versions of CUDA's libraries, and which kernels may round to TF32, see `DeviceKind.versions`."""
        cuda = f"{torch.version.cuda}, driver for {driver_version()}"
        return {
            **({"hip": torch.version.hip} if torch.version.hip else {"cuda": cuda}),
            "cudnn": query(torch.backends.cudnn.version),
            "nccl": query(lambda: ".".join(map(str, torch.cuda.nccl.version()))),
            "tf32": query(
                lambda: ", ".join(f"{name} {kernels.fp32_precision}" for name, kernels in TF32_SETTINGS.items())
            ),
        }

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restores the current device, generator and kernels, see `DeviceKind.restored`."""
        benchmark = torch.backends.cudnn.benchmark
        with super().restored():
            try:
                yield
            finally:
                torch.backends.cudnn.benchmark = benchmark

    def lock_pages(self, address: int, size: int) -> str | None:
        """Page-locks a block, see `DeviceKind.lock_pages`."""
        error = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if not error:
            return None
        # The CUDA runtime reports the error once more, at the next kernel, so a kernel is started here.
        with suppress(RuntimeError):
            torch.ones(1, device=self.name)
        return f"CUDA error {error}"

    def unlock_pages(self, address: int) -> None:
        """Gives back a block, see `DeviceKind.unlock_pages`."""
        torch.cuda.cudart().cudaHostUnregister(address)

    def set_up_kernels(self, device: torch.device, deterministic: bool) -> None:
        """Turns off cuDNN's choice by time, and checks cuBLAS, see `DeviceKind.set_up_kernels`."""
        # The benchmark chooses the fastest convolution by measuring, so the choice varies.
        torch.backends.cudnn.benchmark = False
        if deterministic:
            check_cublas_workspace(device)

    def make_graph_backend(self, device: torch.device) -> GraphBackend:
        """Returns the CUDA graphs of a device."""
        return CudaGraphBackend(device)


class _Kinds(dict[str, DeviceKind]):
    """Kinds by name; a kind that has no entry gets one when it is first asked for."""

    def __missing__(self, name: str) -> DeviceKind:
        self[name] = DeviceKind(name)
        return self[name]


KINDS: dict[str, DeviceKind] = _Kinds({kind.name: kind for kind in (HostKind(HOST.type), CudaKind("cuda"))})
"""The kinds by `torch.device.type`."""
DETERMINISTIC_VARIABLES = {_WORKSPACE: ":4096:8"}
"""Environment variables without which a library of a device is not deterministic, with their values.

A library reads its variable once in a process, so the process sets all of them before it chooses a device.
"""


def kind_of(device: torch.device) -> DeviceKind:
    """Returns the kind of a device."""
    return KINDS[device.type]


def accelerator() -> DeviceKind:
    """Returns the kind of the devices that a worker reserves: torch's accelerator, by default CUDA."""
    current = torch.accelerator.current_accelerator()
    return KINDS[current.type if current is not None else "cuda"]


def assigned_device(ids: Sequence[int | str]) -> torch.device:
    """Returns the first accelerator that Ray assigned to this process, by its index among the visible ones.

    By default a process sees only its own GPUs. With `RAY_TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES` it sees the GPUs of
    all workers of the node, and with `RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES` Ray does not change which are.

    Args:
        ids: Ray's ids of the accelerators that it assigned, such as the result of `ray.get_gpu_ids`.

    Raises:
        ConfigError: The process does not see the accelerator.
    """
    kind = accelerator()
    count, assigned = kind.count(), str(ids[0]) if ids else "0"
    if count in (1, len(ids)):
        # The process sees its own devices alone, whatever Ray calls them.
        return kind.device(0)
    visible = os.environ.get(kind.visible_variable, "").split(",")
    index = visible.index(assigned) if assigned in visible else int(assigned) if assigned.isdecimal() else count
    if 0 < count <= index:
        raise ConfigError(
            f"Ray gave this process the GPU {assigned}, but the process sees {count} other GPUs"
            f" ({kind.visible_variable} is {','.join(visible) or 'not set'}). Set the variable only before `ray start`."
        )
    return kind.device(index)


# --- copies of values of the host


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies values of the host, such as random numbers of the rows, to a device without synchronizing with it."""
    kind = KINDS[device.type]
    if kind.is_host:
        return values.to(device)
    # A copy from memory that is not page-locked would wait for the device.
    return values.pin_memory().to(device, non_blocking=True)


def constant_tensor(values: Sequence[float], device: torch.device) -> Tensor:
    """Returns constants as a tensor of shape (len(values),).

    They are copied to each GPU once in a process. So later steps do not synchronize for them, and a captured CUDA graph
    reads them at a fixed address.
    """
    if KINDS[device.type].is_host:
        return torch.tensor(values, dtype=torch.float32)
    return _constant(tuple(values), device)


# The cache has no limit, because CUDA graphs read the tensors, which have to stay alive. Inference mode is off, because
# an evaluation may call this function first, and autograd refuses tensors of inference mode in training.
@cache
@torch.inference_mode(False)
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device, dtype=torch.float32)


# --- streams

_streams: dict[tuple[torch.device, str], Any] = {}


def get_stream(device: torch.device, purpose: str, priority: int = 0) -> Any:
    """Returns the stream of this process for a purpose, the same stream at each call.

    PyTorch has a pool of a few dozen streams and hands them out in turn, so a stream that is made anew at each call may
    be one that is in use for another purpose.

    Args:
        device: The device of the stream.
        purpose: Any name.
        priority: The priority of the stream, used by the first call for a purpose. PyTorch has a separate pool for the
            high priority, -1. NCCL takes another stream of normal priority in each generation, so it never gets one of
            high priority.
    """
    if (device, purpose) not in _streams:
        _streams[device, purpose] = kind_of(device).make_stream(device, priority)
    return _streams[device, purpose]


class CudaGraphBackend:
    """CUDA graphs that share one memory pool; one of them is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        # The "nccl" backend of torch 2.15 registers each segment of this pool with its communicator when the segment is
        # allocated, and so during a capture, too. Whether that matters is not tested, since it takes two GPUs. Memory
        # can be allocated before a capture only by private functions of torch. TORCH_DIST_USE_NCCL2=0 in the workers'
        # environment chooses the older backend class, which registers nothing.
        self._stream, self._pool = get_stream(device, "capture", -1), torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], object]) -> None:
        """Runs work on the capture stream, see `GraphBackend.warm_up`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """Captures work, see `GraphBackend.capture`; other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


# --- libraries of CUDA

TF32_SETTINGS: dict[str, Any] = {
    "matmul": torch.backends.cuda.matmul,
    "convolution": getattr(torch.backends.cudnn, "conv"),  # noqa: B009 - torch's types do not know it
    "recurrent": getattr(torch.backends.cudnn, "rnn"),  # noqa: B009
}
"""The settings `fp32_precision` of the kernels that may round to TF32, by the kind of kernel.

They are the newer of PyTorch's two interfaces to the precision. PyTorch refuses the older one (`allow_tf32`) in a
process that has used the newer one.
"""


def driver_version() -> str:
    """Returns the newest CUDA version that the installed driver supports, such as "13.2"; "unknown" without a driver.

    It calls the driver's library, since PyTorch has no function for it. No device is opened.
    """
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return UNKNOWN
    return UNKNOWN if failed else f"{version.value // 1000}.{version.value % 1000 // 10}"


def query(function: Callable[..., object], *arguments: object) -> str:
    """Returns the result of a function as text, or "unknown" if it raises."""
    try:
        return str(function(*arguments))
    except Exception:
        # An attribute may be missing, a library may not load, or a driver may fail, each with another type of error.
        return UNKNOWN


def check_cublas_workspace(device: torch.device) -> None:
    """Multiplies two matrices to check that cuBLAS is deterministic.

    PyTorch reads `CUBLAS_WORKSPACE_CONFIG` once, at the first matrix product of a process on a GPU. If it did not name
    a deterministic workspace then, PyTorch refuses all products while deterministic algorithms are on. In a notebook
    the first product may have been before this run.
    """
    try:
        torch.mm(*(torch.ones(2, 2, device=device) for _ in range(2)))
    except RuntimeError as error:
        if _WORKSPACE not in str(error):
            raise
        raise ConfigError(
            "This process has multiplied matrices on its GPU before the run. cuBLAS can then no longer become"
            " deterministic, which train.reduction exact needs. Restart the kernel and set"
            f" {_WORKSPACE}={DETERMINISTIC_VARIABLES[_WORKSPACE]} in its first cell, or train with a strategy other"
            " than single, in other processes."
        ) from error


def _missing_for_triton() -> str | None:
    """Returns what Triton lacks here for a GPU, such as the C compiler for launchers of kernels, or None."""
    if not os.environ.get("CC") and not (shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler such as gcc"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return f"the header Python.h of Python {platform.python_version()} (a package such as python3-dev)"
    return None
