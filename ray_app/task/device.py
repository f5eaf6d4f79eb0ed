"""Settings of a process that decide whether results are bit-identical, and copies of host values to a device.

Besides configuration and data, results depend on the number of threads, the kernels, the instruction set and the
device. `set_up_torch` fixes threads, kernels and device; `describe` returns all of them, which checkpoints record.
`to_device` and `constant_tensor` copy host values without a device synchronization point: a plain copy of even a few
bytes waits until the device has finished all queued work.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
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
from ray_app.torch_private import has_cpp_compiler, is_compiler_imported, lift_recompile_limit

# torch needs an integer here and has no value for "no limit".
_NO_RECOMPILE_LIMIT = 2**30
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_UNKNOWN = "unknown"


def set_up_torch(config: Config, device: torch.device) -> None:
    """Sets the threads, the kernels and the current device of a worker's process.

    Raises:
        ConfigError: The process has multiplied matrices on its GPU before, and cuBLAS cannot become deterministic any
            more.
    """
    set_threads_and_kernels(config.scaling.threads_per_worker, config.train.reduction == "exact")
    if config.train.compile:
        # Above the limit torch would run a new input size uncompiled, with results that differ in their last bits.
        # Which size that is would depend on the logical workers that the process ran before.
        lift_recompile_limit(_NO_RECOMPILE_LIMIT)
    use_device(device)
    if device.type == "cuda":
        # The benchmark chooses the fastest convolution by measuring, so the choice varies.
        torch.backends.cudnn.benchmark = False
        if config.train.reduction == "exact":
            _check_cublas_workspace(device)


def use_device(device: torch.device) -> None:
    """Makes a GPU the current device of the calling thread; does nothing for a CPU.

    Every thread that computes has to call it: the current device belongs to a thread, and a new thread starts with the
    first GPU. Triton, torch's generators and user code that names "cuda" without an index use the current device.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _check_cublas_workspace(device: torch.device) -> None:
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
            "This process has multiplied matrices on its GPU before the run. After that cuBLAS cannot become"
            " deterministic any more, as train.reduction exact needs it to be. Restart the kernel and set"
            f" {_WORKSPACE}=:4096:8 in its first cell, or train with another strategy than single, in other processes."
        ) from error


def set_threads_and_kernels(threads: int, deterministic: bool, refuses: bool = True) -> None:
    """Sets the number of threads of torch in this process, and may enable deterministic kernels.

    With `deterministic` an operation without a deterministic kernel raises if `refuses` is set; otherwise PyTorch
    warns.
    """
    torch.set_num_threads(threads)
    if deterministic:
        os.environ.setdefault(_WORKSPACE, ":4096:8")
        use_deterministic_algorithms(True, refuses)
        # Deterministic algorithms also fill uninitialized memory, which costs time and matters only to code that reads
        # such memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def use_deterministic_algorithms(mode: bool, refuses: bool = True) -> None:
    """Does what `torch.use_deterministic_algorithms` does, without importing the compiler, which takes two seconds.

    An operation that has no deterministic algorithm raises if `refuses` is set; otherwise PyTorch warns.
    """
    if is_compiler_imported():
        torch.use_deterministic_algorithms(mode, warn_only=not refuses)
    else:
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(mode))
        torch.set_deterministic_debug_mode(("error" if refuses else "warn") if mode else "default")


@contextmanager
def restore_process_state() -> Iterator[None]:
    """Restores threads, kernels, GPU and generators at the end of the block, as in a notebook or a test."""
    memory: Any = torch.utils.deterministic
    # The debug mode is 0 if deterministic algorithms are off, 1 if PyTorch warns of operations without one, 2 if these
    # raise.
    threads, debug_mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    fills_memory = memory.fill_uninitialized_memory
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    benchmark = torch.backends.cudnn.benchmark
    with torch.random.fork_rng(devices), set_variables(**{_WORKSPACE: None}, TORCHINDUCTOR_DETERMINISTIC=None):
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            memory.fill_uninitialized_memory = fills_memory
            torch.backends.cudnn.benchmark = benchmark
            for index in devices:
                torch.cuda.set_device(index)
            use_deterministic_algorithms(debug_mode > 0, refuses=debug_mode > 1)


def gpu_of(ids: Sequence[int | str], visible: str | None) -> torch.device:
    """Returns the first GPU that Ray assigned to this process, by its index among the visible GPUs.

    By default only the GPUs of the process are visible. With `RAY_TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES` those of all
    workers of the node are, and with `RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES` Ray does not change which are. `ids`
    are those of `ray.get_gpu_ids`, `visible` is the value of `CUDA_VISIBLE_DEVICES`.
    """
    assigned = str(ids[0]) if ids else "0"
    visible_ids = visible.split(",") if visible else []
    return torch.device("cuda", visible_ids.index(assigned) if assigned in visible_ids else int(assigned))


_ROUNDING: dict[str, Any] = {
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
        return _UNKNOWN
    return _UNKNOWN if failed else f"{version.value // 1000}.{version.value % 1000 // 10}"


def describe(device: torch.device) -> dict[str, str]:
    """Returns the environment that a checkpoint records: what results depend on besides configuration and data.

    The results of two runs with equal environments can be compared bit for bit. The function never raises: a value that
    a build of PyTorch or a driver does not provide is "unknown".
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


def _query(function: Callable[..., object], *arguments: object) -> str:
    """Returns the result of a function as text, or "unknown" if it raises."""
    try:
        return str(function(*arguments))
    except Exception:
        # An attribute may be missing, a library may not load, or a driver may fail, each with another type of error.
        return _UNKNOWN


def check_compiler(device: torch.device) -> None:
    """Raises ConfigError if this machine lacks a compiler or header that `train.compile` needs for a device."""
    if device.type == "cpu":
        missing = None if has_cpp_compiler() else "a C++ compiler such as g++"
    else:
        missing = _missing_for_triton()
    if missing is not None:
        raise ConfigError(
            f"train.compile needs {missing} on every node, and {platform.node()} has none. Install it, or set"
            " train.compile to false."
        )


def _missing_for_triton() -> str | None:
    """Returns what Triton lacks here for a GPU, such as the C compiler for launchers of kernels, or None."""
    if not os.environ.get("CC") and not (shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler such as gcc"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return f"the header Python.h of Python {platform.python_version()} (a package such as python3-dev)"
    return None


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies values of the host, such as random numbers of the rows, to a device without synchronizing with it."""
    # A copy from memory that is not page-locked would wait for the device.
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def constant_tensor(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns constants as a tensor of shape (len(values),).

    They are copied to each GPU once in a process. So later steps do not synchronize for them, and a captured CUDA graph
    reads them at a fixed address.
    """
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return _constant(tuple(values), device, dtype)


def normalize_images(images: Tensor, pixel_max: float, mean: list[float], std: list[float]) -> Tensor:
    """Returns images, (rows, channels, height, width), as float32 from 0 to 1, less the mean, divided by std."""
    images = images.to(torch.float32) / pixel_max
    if mean == [0.0] and std == [1.0]:
        return images
    means, stds = (constant_tensor(values, images.device)[:, None, None] for values in (mean, std))
    return (images - means) / stds


# The cache has no limit, because CUDA graphs read the tensors, which have to stay alive. Inference mode is off, because
# an evaluation may be the first caller, and training cannot use tensors that are made in that mode.
@cache
@torch.inference_mode(False)
def _constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, device=device, dtype=dtype)
