"""Several runs in one Python process: when the raylet dies under one of them, that run fails and the next one trains."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ray_app.config.config import Config
from tests.support.places import ROOT

SWEEP = """
import sys, threading, time
import psutil
from ray_app import run_training
from ray_app.config.config import from_yaml
from ray_app.record.journal import newest_record
from ray_app.record.paths import RunPaths
from pathlib import Path

config = from_yaml(open(sys.argv[1]).read())
first = config.replace(run__name="first", train__epochs=1000, train__max_steps=None)

def kill():
    while newest_record(RunPaths(Path(first.run.storage_path) / "first")) is None:
        time.sleep(0.2)
    [victim] = [p for p in psutil.Process().children(recursive=True) if p.name() == sys.argv[2]]
    victim.kill()
    print("KILLED", victim.pid, flush=True)

threading.Thread(target=kill, daemon=True).start()
try:
    run_training(first)
except Exception as error:
    print("RAISED", type(error).__name__, flush=True)
print("THEN", run_training(config.replace(run__name="second")).status, flush=True)
"""
_PROCESS_S = 300


@pytest.mark.parametrize("victim", ["raylet"])
def test_the_process_lives_when_ray_dies(victim: str, short_run: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(short_run(scaling__max_workers=1, train__max_steps=3).to_yaml())
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SWEEP, str(tmp_path / "run.yaml"), victim]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=_PROCESS_S, check=False)
    told = [line.split()[0] for line in done.stdout.splitlines() if line.startswith(("KILLED", "RAISED", "THEN"))]
    assert (done.returncode, told) == (0, ["KILLED", "RAISED", "THEN"]), done.stdout[-2000:] + done.stderr[-2000:]
    assert "THEN finished" in done.stdout
