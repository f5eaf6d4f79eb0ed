"""`Probe` measures the load of a node. It runs as an actor on other nodes, so this module imports almost nothing."""

from __future__ import annotations

from typing import Any

import psutil


class Probe:
    """Measures the load of the node on which it runs; CPU time counts since the last measurement."""

    def __init__(self) -> None:
        psutil.cpu_percent()
        self._gpus = _open_gpus()

    def measure(self) -> dict[str, float]:
        """Returns load of CPUs, memory and, by `pynvml`, GPUs; `_percent` is to 100, `_gb` are 10^9 bytes."""
        memory = psutil.virtual_memory()
        values = {
            "cpu_percent": float(psutil.cpu_percent()),
            "memory_percent": float(memory.percent),
            "memory_gb": (memory.total - memory.available) / 1e9,
        }
        for number, (nvml, gpu) in enumerate(self._gpus):
            try:
                values[f"gpu{number}_percent"] = float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
                values[f"gpu{number}_memory_gb"] = nvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e9
            except nvml.NVMLError:
                # The device does not support this query, or was removed.
                continue
        return values


def _open_gpus() -> list[tuple[Any, Any]]:
    """Returns the library and a handle for each GPU; empty without NVIDIA's library or driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        return [(pynvml, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
