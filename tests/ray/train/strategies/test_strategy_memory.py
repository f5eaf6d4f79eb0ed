"""The memory that a strategy uses equals the size of its state."""

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.strategies import TINY, Measured


@pytest.mark.usefixtures("ray_cluster")
def test_workers_and_servers_use_the_expected_memory(tmp_path: Path) -> None:
    model = TINY[1]
    measured = Measured(tmp_path)
    sample = measured.run("parameter_server, 0", model)
    assert sample.wall_ms > 0
    assert sample.cpu_ms > 0
    sizes = [64, *model.fields["task__init_args"]["hidden"], 10]
    parameters_mb = sum(4 * (before + 1) * after for before, after in pairwise(sizes)) / 1e6
    used = measured.memory[model.name, "parameter_server, 0"]
    assert sorted(used) == ["server 0", "server 1", "worker 0", "worker 1"]
    for name in ("worker 0", "worker 1"):
        assert used[name].state == pytest.approx(2 * parameters_mb, rel=0.01), (
            "a worker must hold parameters and gradients"
        )
        assert used[name].tensors >= used[name].state
        assert used[name].peak > used[name].state
    servers = sum(used[name].state for name in ("server 0", "server 1"))
    assert servers == pytest.approx(4 * parameters_mb, rel=0.02), (
        "servers must hold parameters, gradients and two moments"
    )
