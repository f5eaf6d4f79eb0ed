"""Settings of a process that decide whether results are bit-identical.

Besides configuration and data, results depend on the number of threads, the kernels, the instruction set and the
device. `set_up_torch` fixes threads, kernels and device; `describe` returns all of them, which checkpoints record.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from ray_app.config.config import Config
from ray_app.config.variables import recorded_variables
from ray_app.devices import DETERMINISTIC_VARIABLES, UNKNOWN, accelerator, kind_of, query
from ray_app.errors import ConfigError, DeviceFaultError
from ray_app.process import set_variables, temporary_folder
from ray_app.torch_private import is_compiler_imported, lift_recompile_limit

# torch needs an integer here and has no value for "no limit".
_NO_RECOMPILE_LIMIT = 2**30
_DEVICE_ERROR = re.compile("(cuda|hip|xpu|cudnn|miopen) (error|failure)")
_FAILED_ASSERTION = "device-side assert"


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
        # The compiler loads the libraries in it; another user can make torch's own folder, with a predictable name.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(temporary_folder() / "torchinductor"))
    kind = kind_of(device)
    kind.use(device)
    share = config.scaling.worker_gpus
    if 0 < share < 1 and config.train.strategy_traits.has_workers:
        # Otherwise one worker could take the memory of all others on the device. A notebook keeps the whole.
        kind.limit_memory(device, share)
    kind.set_up_kernels(device, config.train.reduction == "exact")


def set_threads_and_kernels(threads: int, deterministic: bool, refuses: bool = True) -> None:
    """Sets the number of threads of torch in this process, and may enable deterministic kernels.

    With `deterministic` an operation without a deterministic kernel raises if `refuses` is set; otherwise PyTorch
    warns.
    """
    torch.set_num_threads(threads)
    if deterministic:
        for name, value in DETERMINISTIC_VARIABLES.items():
            os.environ.setdefault(name, value)
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
    variables = set_variables(**dict.fromkeys(DETERMINISTIC_VARIABLES), TORCHINDUCTOR_DETERMINISTIC=None)
    with accelerator().restored(), variables:
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            memory.fill_uninitialized_memory = fills_memory
            use_deterministic_algorithms(debug_mode > 0, refuses=debug_mode > 1)


@cache
def device_uuid(device: torch.device) -> str:
    """Returns what tells a device from all others, see `DeviceKind.uuid`; kept for when the device has failed."""
    uuid = query(kind_of(device).uuid, device)
    return "" if uuid == UNKNOWN else uuid


def device_model(device: torch.device) -> str:
    """Returns kind and model of a device, such as "cuda NVIDIA H200"."""
    return f"{device.type} {query(kind_of(device).device_name, device)}"


def device_label(device: torch.device) -> str:
    """Returns kind, model and UUID of a device, for events; results depend on the first two alone."""
    return ", ".join(part for part in (device_model(device), device_uuid(device)) if part)


def find_device_fault(error: BaseException) -> DeviceFaultError | None:
    """Returns the fault of this thread's device if an error comes from one that does not compute any more, or None.

    After some errors, such as one of its memory or an access to an illegal address, each later call of CUDA in the
    process raises the same error. So does a failed assertion, which is no fault: an operation got values that it
    refuses, such as an index out of range.
    """
    if isinstance(error, DeviceFaultError):
        return error
    kind = accelerator()
    is_of_device = isinstance(error, torch.AcceleratorError) or _DEVICE_ERROR.search(str(error).lower())
    if not is_of_device or not kind.module.is_initialized():
        return None
    device = kind.device(kind.module.current_device())
    try:
        kind.check(device)
        return None
    except RuntimeError as failure:
        text = str(failure).partition("\n")[0]
    if _FAILED_ASSERTION in text:
        return None
    name, node = device_label(device), platform.node()
    return DeviceFaultError(
        f"{text}\nThe device {name} of {node} no longer computes, so this process ends. The cause is the hardware, its"
        " driver, or an extension's kernel that writes outside its memory. On this node, lines with Xid in the output"
        " of dmesg show which.",
        name,
        node,
    )


def describe(device: torch.device) -> dict[str, str]:
    """Returns the environment that a checkpoint records: what results depend on besides configuration and data.

    The results of two runs with equal environments can be compared bit for bit. The function never raises: a value that
    a build of PyTorch or a driver does not provide is "unknown".
    """
    kind = kind_of(device)
    return {
        "torch": torch.__version__,
        "device": device_model(device),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        **kind.versions(),
        **{
            name: value
            for name, value in recorded_variables(os.environ).items()
            if value != DETERMINISTIC_VARIABLES.get(name)
        },
    }


def check_compiler(device: torch.device) -> None:
    """Raises ConfigError if this machine lacks a compiler or header that `train.compile` needs for a device."""
    if (missing := kind_of(device).missing_for_compilation()) is not None:
        raise ConfigError(
            f"train.compile needs {missing} on every node, but {platform.node()} has none. Install it, or set"
            " train.compile to false."
        )
