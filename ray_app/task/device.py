"""The process settings that results depend on bit for bit, and copies of host values to a device.

Besides configuration and data, results depend on threads, kernels, instruction set and device: `set_up_torch` fixes
them, and `describe` returns them for checkpoints. `to_device` and `constant_tensor` copy host values without a device
synchronization point: a plain copy of a few bytes waits until the device has finished all queued work.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.process import set_variables

_NO_LIMIT = 2**30
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_UNKNOWN = "unknown"


def set_up_torch(config: Config, device: torch.device) -> None:
    """Sets threads, kernels and device of a worker's process.

    Raises:
        ConfigError: The process used its GPU before, so that cuBLAS cannot become deterministic any more.
    """
    pin(config.scaling.threads_per_worker, config.train.reduction == "exact")
    if config.train.compile:
        import torch._dynamo as dynamo

        # Above the limit torch runs a new input size uncompiled, with other bits. Which size that is would depend on
        # the logical workers that the process ran before.
        dynamo.config.recompile_limit = dynamo.config.accumulated_recompile_limit = _NO_LIMIT
    use_device(device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False
        if config.train.reduction == "exact":
            _check_cublas_workspace(device)


def use_device(device: torch.device) -> None:
    """Makes a GPU the current device of the calling thread; does nothing for a CPU.

    The current device belongs to a thread, and a new thread starts with the first GPU. User code that names "cuda",
    generators and Triton use the current device.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _check_cublas_workspace(device: torch.device) -> None:
    """Multiplies two matrices to check that cuBLAS is deterministic.

    PyTorch checks once, at the first product of a process, whether cuBLAS has a deterministic workspace, and refuses
    all products if it has none. In a notebook the first product may have been before this run.

    Raises:
        ConfigError: PyTorch refuses the product.
    """
    try:
        torch.mm(*(torch.ones(2, 2, device=device) for _ in range(2)))
    except RuntimeError as error:
        if _WORKSPACE not in str(error):
            raise
        raise ConfigError(
            "This process has used its GPU before it was asked for the same bits each time, which cuBLAS does not"
            f" change any more. Restart the kernel and set {_WORKSPACE}=:4096:8 in its first cell, or train with"
            " another strategy than single, in other processes."
        ) from error


def pin(threads: int, deterministic: bool, refuses: bool = True) -> None:
    """Fixes the number of threads and, if asked, enables deterministic kernels.

    Args:
        threads: CPU threads of an operation.
        deterministic: Whether to enable deterministic kernels.
        refuses: Whether an operation without a deterministic kernel raises; otherwise PyTorch warns.
    """
    torch.set_num_threads(threads)
    if deterministic:
        os.environ.setdefault(_WORKSPACE, ":4096:8")
        use_deterministic_algorithms(True, refuses)
        # Filling uninitialized memory would only guard against reading it, and costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def use_deterministic_algorithms(mode: bool, refuses: bool = True) -> None:
    """Does what `torch.use_deterministic_algorithms` does, without importing the compiler, which takes two seconds."""
    if "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(mode, warn_only=not refuses)
    else:
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(mode))
        torch.set_deterministic_debug_mode(("error" if refuses else "warn") if mode else "default")


@contextmanager
def restore_process_state() -> Iterator[None]:
    """Restores threads, kernels, current GPU and random state at the end, in a process that does more than train."""
    memory: Any = torch.utils.deterministic
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    fills, devices = (
        memory.fill_uninitialized_memory,
        [torch.cuda.current_device()] if torch.cuda.is_initialized() else [],
    )
    benchmark = torch.backends.cudnn.benchmark
    with torch.random.fork_rng(devices), set_variables(**{_WORKSPACE: None}, TORCHINDUCTOR_DETERMINISTIC=None):
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            memory.fill_uninitialized_memory = fills
            torch.backends.cudnn.benchmark = benchmark
            for number in devices:
                torch.cuda.set_device(number)
            use_deterministic_algorithms(mode > 0, refuses=mode > 1)


def gpu_of(ids: Sequence[int | str], visible: str | None) -> torch.device:
    """Returns the first GPU that Ray assigned to this process, by its index among the visible ones.

    Ray makes visible the GPUs of the process, or those of all workers of its node
    (`RAY_TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES`), or does not change what is visible
    (`RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES`).

    Args:
        ids: From `ray.get_gpu_ids`.
        visible: `CUDA_VISIBLE_DEVICES`.
    """
    first = str(ids[0]) if ids else "0"
    visible_ids = visible.split(",") if visible else []
    return torch.device("cuda", visible_ids.index(first) if first in visible_ids else int(first))


_ROUNDING: dict[str, Any] = {
    "matmul": torch.backends.cuda.matmul,
    "convolution": getattr(torch.backends.cudnn, "conv"),  # noqa: B009 - torch's types do not know it
    "recurrent": getattr(torch.backends.cudnn, "rnn"),  # noqa: B009
}
"""The kernels that may round to TF32, by the newer of PyTorch's two interfaces: PyTorch refuses the older interface in
a process that has used the newer one.
"""


def driver_version() -> str:
    """Returns the newest CUDA version that the installed driver supports, such as 13.2, or "unknown" if the driver does
    not answer.

    The question goes to the driver's library: no module of PyTorch answers it, and no device is opened for it.
    """
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return _UNKNOWN
    return _UNKNOWN if failed else f"{version.value // 1000}.{version.value % 1000 // 10}"


def describe(device: torch.device) -> dict[str, str]:
    """Returns the environment that a checkpoint records: two runs with equal environments are comparable bit for bit.

    It never raises: a value that a build of PyTorch or a driver does not provide is "unknown".
    """
    environment = {
        "torch": torch.__version__,
        "device": f"cpu {platform.machine()}"
        if device.type == "cpu"
        else f"{device.type} {_query(torch.cuda.get_device_name, device)}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        environment |= {
            "cuda": f"{torch.version.cuda}, driver for {driver_version()}",
            "cudnn": _query(torch.backends.cudnn.version),
            "nccl": _query(lambda: ".".join(map(str, torch.cuda.nccl.version()))),
            "tf32": _query(
                lambda: ", ".join(f"{name} {kernels.fp32_precision}" for name, kernels in _ROUNDING.items())
            ),
        }
    return environment


def _query(question: Callable[..., object], *arguments: object) -> str:
    """Returns an answer as text, or "unknown" if the question raises."""
    try:
        return str(question(*arguments))
    except Exception:
        # An attribute may be missing, a library may not load, a driver may not answer.
        return _UNKNOWN


def need_compiler(device: torch.device) -> None:
    """Refuses `train.compile` on a machine without the compiler that it needs.

    Raises:
        ConfigError: There is no C++ compiler for a CPU, or no C compiler or no header of Python for a GPU.
    """
    missing = _missing_for_cpu() if device.type == "cpu" else _missing_for_triton()
    if missing is not None:
        raise ConfigError(
            f"train.compile needs {missing} on every node, and {platform.node()} has none. Install it, or set"
            " train.compile to false."
        )


def _missing_for_cpu() -> str | None:
    """Returns what the compiler of PyTorch lacks on this machine to compile for a CPU, None if nothing."""
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        cpp_builder.get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler such as g++"
    return None


def _missing_for_triton() -> str | None:
    """Returns what Triton lacks on this machine, None if nothing. It builds the launcher of each kernel with a C
    compiler.
    """
    if not os.environ.get("CC") and not (shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler such as gcc"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return f"the header Python.h of Python {platform.python_version()} (a package such as python3-dev)"
    return None


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies values of the host, such as random numbers drawn from `keys`, to a device without synchronizing."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def constant_tensor(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns constants as a tensor of shape (numbers,), copied to each GPU once: a step does not synchronize for them,
    and a captured CUDA graph reads them at a fixed address.
    """
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return _constant(tuple(values), device, dtype)


# The cache keeps the tensor alive for CUDA graphs that read it.
@cache
@torch.inference_mode(False)
def _constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, device=device, dtype=dtype)
