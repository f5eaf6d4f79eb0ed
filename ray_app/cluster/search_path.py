"""Where workers look for modules: wherever the driver found some, so that what it imports they import.

Ray (2.60) hands on the script's folder and the current one by itself, with the private argument `_py_driver_sys_path` of `JobConfig`.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from ray.job_config import JobConfig

_IN_A_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def search_path() -> list[str]:
    """The folders where this process finds modules, and another one of the same Python would not by itself, in their order."""
    installed, package = _installed(), str(Path(__file__).resolve().parents[2])
    libraries = {path for path in installed if Path(path).name in ("site-packages", "dist-packages")}
    added = [path for path in sys.path if libraries.isdisjoint(map(str, Path(path).parents))]  # Ray and others add folders inside their own
    found = [package, str(Path.cwd()), *os.environ.get("PYTHONPATH", "").split(os.pathsep), *added]
    return [path for path in dict.fromkeys(found) if path and path not in installed and Path(path).exists()]


@functools.cache
def _installed() -> frozenset[str]:
    """Where every process of this Python looks; that stays behind the standard library, where `PYTHONPATH` would put it before."""
    environment = {name: os.environ.get(name, "") for name in os.environ if name != "PYTHONPATH"}
    told = [sys.executable, "-c", "import sys; print(*sys.path, sep='\\n')"]
    return frozenset(subprocess.run(told, env=environment, capture_output=True, text=True, check=True).stdout.splitlines())


def job_config() -> JobConfig | None:
    """What a driver tells a cluster that it joins; nothing in a Ray job, whose workers have its runtime environment."""
    return None if _IN_A_RAY_JOB in os.environ else JobConfig(_py_driver_sys_path=search_path()[::-1])  # workers put each before the last
