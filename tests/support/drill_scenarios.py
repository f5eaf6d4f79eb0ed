"""A drill scenario and the record of a run, written by hand."""

import os
import random
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ray_app import load_config
from ray_app.drill.faults import Evidence
from ray_app.drill.scenario import ScenarioContext, ScenarioResult
from ray_app.runlog.journal import StepRecord, put_segment
from ray_app.runlog.lease import LeaseHolder
from ray_app.runlog.paths import RunPaths
from tests.support.paths import ROOT

SUMMARY: dict[str, Any] = {"status": "finished", "params_digest": "d", "rows": 8, "redone_steps": 0, "recovery_s": []}


def make_step_record(step: int, **fields: Any) -> StepRecord:
    record = StepRecord(step, 0, 100.0 + step, 1.0 / step, 0.1, 1.0, 1000.0, 0.0, 2, [1, 1], [5, 6], "1.1")
    return replace(record, **fields)


def write_records(root: Path, records: list[StepRecord]) -> RunPaths:
    put_segment(RunPaths(root), 1, records)
    return RunPaths(root)


def make_result(root: Path, evidence: dict[str, Any], records: list[StepRecord], **summary: Any) -> ScenarioResult:
    paths = write_records(root, records) if records else RunPaths(root)
    return ScenarioResult(paths, SUMMARY | {"world_sizes": [[0, 2]]} | summary, evidence)


def scenario_context(folder: Path, workers: int = 2, **fields: Any) -> ScenarioContext:
    """Returns a context on a cluster that the drill does not own."""
    config = load_config(ROOT / "conf" / "digits.yaml", run__storage_path=str(folder), run__name="run", **fields)
    return ScenarioContext(
        config, workers, 60, 20, 7, Evidence(str(folder / "evidence")), random.Random(0), None, _runs_nothing
    )


def _runs_nothing(*_: Any) -> Any:
    raise AssertionError("it runs nothing")


def evidence_of_dead_process() -> dict[str, Any]:
    """Returns the evidence about a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        evidence = asdict(LeaseHolder.of(process.pid))
        process.kill()
    return evidence


@dataclass(frozen=True)
class BlockForever:
    """A hook after a step that never ends."""

    def __call__(self, rank: int, step: int) -> None:
        threading.Event().wait()


def drill_arguments(digits: Path, out: Path, **drill: Any) -> list[str]:
    """Returns the arguments of a drill of the digits."""
    fields = {
        "config": ROOT / "conf" / "digits.yaml",
        "data.path": digits / "train",
        "data.eval_path": digits / "eval",
        "drill.out": out,
    }
    return [f"--{name}={value}" for name, value in (fields | {f"drill.{k}": v for k, v in drill.items()}).items()]


def run_drill(*more: str, limit_s: float = 280.0) -> subprocess.CompletedProcess[str]:
    """Runs a drill on a cluster of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, str(ROOT / "jobs" / "drill.py"), *more]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
