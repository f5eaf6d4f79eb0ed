"""The simulated accelerator: builds `simulated.cpp` once, and makes it the accelerator of torch in this process.

`load()` does both. A process that imports `tests.device.sim` has called it. Processes of Ray load it when they import
torch, by the entry point that `autoload_folder` writes.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SOURCE = Path(__file__).with_name("simulated.cpp")
BUILD = SOURCE.parents[2] / "build" / "device"
NAME = "sim"
"""The simulated devices in `torch.device.type`."""
DEVICES = 8
GROUP = "simulated"
"""torch's name of the backend of their process groups."""
CAPACITY = 4 << 30
"""Bytes of memory of each device; only what is used takes memory of the host."""
_ENTRY_POINTS = "[torch.backends]\nsim = tests.device.simulated:load\n"


def build() -> Path:
    """Compiles the backend for the installed torch, unless that has been done, and returns the library."""
    state = "\n".join((SOURCE.read_text(), torch.__version__, sys.version))
    library = BUILD / f"simulated-{hashlib.sha256(state.encode()).hexdigest()[:16]}.so"
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            partial = library.with_suffix(".partial")
            subprocess.run(_command(partial), check=True)
            for older in BUILD.glob("simulated-*.so"):
                older.unlink()
            partial.rename(library)
    return library


def _command(library: Path) -> list[str]:
    folder = Path(torch.__file__).parent
    headers = (folder / "include", folder / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    return [
        *(os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-fPIC", "-shared", "-w", str(SOURCE), "-o", str(library)),
        "-DTORCH_EXTENSION_NAME=simulated",
        *(option for path in headers for option in ("-isystem", str(path))),
        *(f"-L{folder / 'lib'}", f"-Wl,-rpath,{folder / 'lib'}"),
        *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
    ]


@cache
def load() -> Any:
    """Makes the simulated devices the accelerator of torch in this process; returns the functions of the backend."""
    ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_python.so"), ctypes.RTLD_GLOBAL)
    path = str(build())
    spec = importlib.util.spec_from_file_location(
        "simulated", path, loader=importlib.machinery.ExtensionFileLoader("simulated", path)
    )
    assert spec is not None
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    backend.start(DEVICES, CAPACITY)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _DeviceModule(backend))
    torch.utils.generate_methods_for_privateuse1_backend(for_packed_sequence=False, for_storage=True)
    dist.Backend.register_backend(GROUP, _make_group, devices=[NAME])
    return backend


def _make_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    # Its module imports the package, which may be what imports torch, and so this module, at the moment.
    from tests.device.sim import SimulatedGroup

    return SimulatedGroup(store, rank, size, timeout)


class _DeviceModule(types.ModuleType):
    """The module `torch.sim`, with the functions of `torch.cuda` that torch and the package call."""

    Event = torch.Event

    def __init__(self, backend: Any) -> None:
        super().__init__(f"torch.{NAME}")
        self._backend = backend

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return DEVICES

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(_index(device))

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def get_device_name(self, device: Any = None) -> str:
        del device
        return "simulated"

    def get_device_properties(self, device: Any = None) -> Any:
        return types.SimpleNamespace(uuid=f"uuid-of-{_index(device)}")

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    # --- streams

    def Stream(self, device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(torch.device(NAME, _index(device)), priority=priority)

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(_index(device))

    def stream(self, stream: torch.Stream) -> torch.Stream:
        return stream

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(_index(device))

    def is_current_stream_capturing(self) -> bool:
        return False

    # --- random numbers

    def _generator(self, device: Any = None) -> torch.Generator:
        return self._backend.default_generator(_index(device))

    def manual_seed(self, seed: int) -> None:
        self._generator().manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(DEVICES):
            self._generator(index).manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self._generator(device).get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self._generator(device).set_state(state)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def autoload_folder(folder: Path) -> Path:
    """Makes a folder for `PYTHONPATH` with which each process that imports torch loads the simulated devices."""
    info = folder / "simulated_device-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated_device\nVersion: 1\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    return folder


if __name__ == "__main__":
    print(build())
