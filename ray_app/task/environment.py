"""What the bits of a result depend on besides configuration and data: threads, kernels, instruction set, device."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.process import variables

_NO_LIMIT = 2**30
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def set_up_torch(config: Config, device: torch.device) -> None:
    """Readies a worker's process.

    Raises:
        ConfigError: It has used its GPU in a way that cannot be made deterministic any more.
    """
    pin(config.scaling.threads_per_worker, config.train.reduction == "exact")
    if config.train.compile:
        import torch._dynamo as dynamo

        # Beyond its limit a size would run uncompiled, with other bits; which one depends on what was played before.
        dynamo.config.recompile_limit = dynamo.config.accumulated_recompile_limit = _NO_LIMIT
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = False
        if config.train.reduction == "exact":
            _try_product(device)


def _try_product(device: torch.device) -> None:
    """Multiplies two matrices: PyTorch looks once, at the first product of a process, whether cuBLAS was given a deterministic workspace,
    and refuses all of them if it was not; that of a notebook may have been before this run.

    Raises:
        ConfigError: It refuses.
    """
    try:
        torch.mm(*(torch.ones(2, 2, device=device) for _ in range(2)))
    except RuntimeError as error:
        if _WORKSPACE not in str(error):
            raise
        raise ConfigError(
            "This process has used its GPU before it was asked for the same bits each time, which cuBLAS does not change any more. Restart"
            f" the kernel and set {_WORKSPACE}=:4096:8 in its first cell, or train with another strategy than single, in other processes."
        ) from error


def pin(threads: int, deterministic: bool, refuses: bool = True) -> None:
    """Fixes the number of threads and, for what has to have the same bits, asks for deterministic kernels.

    Args:
        threads: How many.
        deterministic: Whether to ask.
        refuses: Whether an operation that has none is refused; otherwise it is warned of.
    """
    torch.set_num_threads(threads)
    if deterministic:
        os.environ.setdefault(_WORKSPACE, ":4096:8")
        use_deterministic_algorithms(True, refuses)
        # A guard against reading garbage, at the price of filling it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def use_deterministic_algorithms(mode: bool, refuses: bool = True) -> None:
    """As PyTorch's, which imports the compiler only to tell it; that takes two seconds."""
    if "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(mode, warn_only=not refuses)
    else:
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(mode))
        torch.set_deterministic_debug_mode(("error" if refuses else "warn") if mode else "default")


@contextmanager
def given_back() -> Iterator[None]:
    """Gives a process that is not only a worker's its threads, its choice of kernels and its random numbers back."""
    memory: Any = torch.utils.deterministic
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    fills, devices = memory.fill_uninitialized_memory, [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), variables(**{_WORKSPACE: None}, TORCHINDUCTOR_DETERMINISTIC=None):
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            memory.fill_uninitialized_memory = fills
            use_deterministic_algorithms(mode > 0, refuses=mode > 1)


def gpu_of(ids: Sequence[int | str], visible: str | None) -> torch.device:
    """The GPU to compute on: the first of those that Ray gave this process, numbered as it sees them.

    Ray shows a process what it has, or what all workers of its node have (`RAY_TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES`), or leaves alone
    what it sees (`RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES`).

    Args:
        ids: From `ray.get_gpu_ids`.
        visible: `CUDA_VISIBLE_DEVICES`.
    """
    first, seen = str(ids[0]) if ids else "0", visible.split(",") if visible else []
    return torch.device("cuda", seen.index(first) if first in seen else int(first))


_ROUNDING: dict[str, Any] = {
    "matmul": torch.backends.cuda.matmul,
    "convolution": getattr(torch.backends.cudnn, "conv"),  # noqa: B009 - torch's types do not know it
    "recurrent": getattr(torch.backends.cudnn, "rnn"),  # noqa: B009
}
"""What may round to TF32; asked by the newer of PyTorch's two names, since it refuses the older one to who has used the newer."""


def describe(device: torch.device) -> dict[str, str]:
    """The environment that a checkpoint records; two runs with equal ones are bit for bit comparable."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    found = {
        "torch": torch.__version__,
        "device": f"{device.type} {name}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        found |= {
            "cuda": f"{torch.version.cuda}, driver for {torch._C._cuda_getDriverVersion()}",  # type: ignore[attr-defined]
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "tf32": ", ".join(f"{name} {found.fp32_precision}" for name, found in _ROUNDING.items()),
        }
    return found


def need_compiler(device: torch.device) -> None:
    """Refuses `train.compile` where it cannot work.

    Raises:
        ConfigError: There is no compiler here.
    """
    if device.type == "cpu":
        from torch._inductor import cpp_builder
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            cpp_builder.get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ConfigError(
                f"train.compile needs a C++ compiler such as g++ on every node, and {platform.node()} has none. Install one, or set it to"
                " false."
            ) from error
