"""That benchmarks run and print their figures, and that the memory of a strategy is what it must be."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.strategies import TINY, Measured
from tests.cluster import ROOT

NUMBER = r"(\d+\.?\d*)"
IMAGE_SIDES = ("bare decode and resize", "reader", "Ray Data read tasks", "cache: disk")
ROW_SIDES = ("stock iter_torch_batches", "cache: none", "cache: memory", "cache: disk")


def printed(*command: str) -> str:
    """What a benchmark prints, in a process of its own as by hand."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # half a minute
def test_the_input_pipeline_is_measured() -> None:
    found = printed("benchmarks/input.py", "--tiny")
    sides = re.findall(rf"^(\S.*?) +{NUMBER} \(\S+\) ", found, re.MULTILINE)
    assert [side for side, _ in sides if not side.endswith("again")] == [*IMAGE_SIDES, *ROW_SIDES]
    assert all(float(wall_ms) > 0 for _, wall_ms in sides)
    waits = re.findall(rf"^Waiting for (.*): {NUMBER}% of (\d+) steps of {NUMBER} ms", found, re.MULTILINE)
    assert [what for what, *_ in waits] == ["small rows", "images"]
    assert all(0 <= float(percent) < 100 and int(steps) >= 6 and float(ms) > 0 for _, percent, steps, ms in waits)


def test_the_object_store_is_measured() -> None:
    found = printed("benchmarks/object_store.py", "--rows", "300")
    [sizes] = re.findall(rf"store of {NUMBER} MB, {NUMBER} MB through it:\s+at most {NUMBER} MB used, {NUMBER} MB spilled", found)
    store, through, used, spilled = map(float, sizes)
    assert (round(through), spilled) == (45, 0)
    assert 0 < used <= store


def test_the_memory_of_a_device_is_measured() -> None:
    lines = [json.loads(line) for line in printed("benchmarks/device_memory.py").splitlines() if line.startswith("{")]
    used = {line["strategy"]: line["device_mb"] for line in lines}
    assert used.keys() >= {"ddp", "central_storage", "fsdp"}
    assert 0 < used["central_storage"] < 0.9 * used["ddp"], "the moments are elsewhere"


@pytest.mark.usefixtures("ray_cluster")
def test_the_memory_of_a_strategy(tmp_path: Path) -> None:
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
        assert used[name].state == pytest.approx(2 * parameters_mb, rel=0.01), "parameters and gradients"
        assert used[name].tensors >= used[name].state
        assert used[name].peak > used[name].state
    servers = sum(used[name].state for name in ("server 0", "server 1"))
    assert servers == pytest.approx(4 * parameters_mb, rel=0.02), "parameters, gradients and two moments"
