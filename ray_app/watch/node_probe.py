"""How busy this node is. Runs in a process of its own on other nodes, so it imports next to nothing."""

from __future__ import annotations

from typing import Any

import psutil


class Probe:
    """Measures the node that it is on; CPU time counts since the last measurement."""

    def __init__(self) -> None:
        psutil.cpu_percent()
        self._gpus = _gpus()

    def measure(self) -> dict[str, float]:
        """Percent of CPU time, memory, and of each NVIDIA GPU where `pynvml` is installed; gigabytes are 10^9 bytes."""
        memory = psutil.virtual_memory()
        found = {
            "cpu_percent": float(psutil.cpu_percent()),
            "memory_percent": float(memory.percent),
            "memory_gb": (memory.total - memory.available) / 1e9,
        }
        for number, (nvml, gpu) in enumerate(self._gpus):
            try:
                found[f"gpu{number}_percent"] = float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
                found[f"gpu{number}_memory_gb"] = nvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e9
            except nvml.NVMLError:  # this device does not tell, or is gone
                continue
        return found


def _gpus() -> list[tuple[Any, Any]]:
    """The library and a handle for each GPU; none without NVIDIA's library or driver."""
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        return [(pynvml, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
