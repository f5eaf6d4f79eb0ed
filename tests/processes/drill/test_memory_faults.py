"""The drill exhausts a worker's memory; the kernel kills the worker and counts the kill."""

import subprocess
import sys

import pytest

from ray_app.drill import memory_faults


@pytest.mark.rest
def test_the_kernel_kills_a_process_above_the_limit_of_its_cgroup() -> None:
    if reason := memory_faults.find_cgroup_obstacle():
        print(reason)
        pytest.skip(reason)
    group = memory_faults.make_cgroup()
    try:
        script = (
            "import os, pathlib; from ray_app.drill import memory_faults;"
            f" memory_faults.add_to_cgroup(pathlib.Path({str(group)!r}), os.getpid())"
        )
        assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
        assert memory_faults.count_oom_kills(str(group)) == 0
        done = subprocess.run(
            [sys.executable, "-c", f"{script}; memory_faults.exceed_limit()"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == -9, done.stderr
        assert memory_faults.count_oom_kills(str(group)) == 1
    finally:
        memory_faults.remove_cgroup(str(group))
    assert not group.exists()
