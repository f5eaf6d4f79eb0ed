"""The benchmark of device memory runs, and its measurements have the expected order."""

import json

import pytest

from tests.support.train_command import run_benchmark


@pytest.mark.rest
def test_the_benchmark_measures_the_device_memory_of_the_strategies() -> None:
    lines = [
        json.loads(line) for line in run_benchmark("benchmarks/device_memory.py").splitlines() if line.startswith("{")
    ]
    used = {line["strategy"]: line["device_mb"] for line in lines}
    assert used.keys() >= {"ddp", "central_storage", "fsdp"}
    assert 0 < used["central_storage"] < 0.9 * used["ddp"], "the moments are not outside the device"
