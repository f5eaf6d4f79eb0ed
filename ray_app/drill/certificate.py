"""The result of a drill: the comparison of each run with the undisturbed one, its measurements, and the table."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psutil
import ray
import torch
from rich.table import Table

from ray_app.devices import accelerator
from ray_app.drill.scenario import Scenario, ScenarioResult, is_gone
from ray_app.runlog.history import goodput
from ray_app.runlog.journal import StepRecord, read_records
from ray_app.runlog.lease import LeaseHolder
from ray_app.runlog.paths import RunPaths
from ray_app.version import __version__

Outcome = Literal["equal", "different", "failed", "left out"]
MAX_RESTART_RATIO = 1.3
"""Maximum ratio of the time of a start after the driver was killed to the time of a first start.

The table says if the ratio is higher; the scenario does not fail.
"""
_ROOT = Path(__file__).resolve().parents[2]
_COLORS = {"equal": "green", "different": "red", "failed": "red", "left out": "yellow"}


@dataclass(frozen=True)
class Trace:
    """The values that must be equal in two runs: digest of parameters and buffers, rows, and the steps.

    A step has its loss, rows and row hashes of the logical workers.
    """

    digest: str
    rows: int
    steps: dict[int, tuple[float, list[int], list[int]]]


def read_trace(paths: RunPaths, summary: dict[str, Any]) -> Trace:
    """Returns the trace of a run that has ended."""
    steps = {step: (r.loss, r.rows, r.row_hash) for step, r in read_records(paths)[0].items()}
    return Trace(str(summary["params_digest"]), summary["rows"], steps)


@dataclass(frozen=True)
class RunStart:
    """The seconds to the first step of a run, or after the death of its driver to the next one, and its world size."""

    seconds: float
    workers: int


def find_start_after(paths: RunPaths, time_s: float) -> RunStart:
    """Returns the first step that a run finished after a time (seconds since 1970, UTC)."""
    records, repeated = read_records(paths)
    first = min((r for r in [*records.values(), *repeated] if r.time_s > time_s), key=lambda r: r.time_s)
    return RunStart(round(first.time_s - time_s, 3), first.workers)


def compare_restart(run: ScenarioResult, first: RunStart) -> dict[str, Any]:
    """Returns the comparison of the start after a kill of the driver with the first start; empty without a kill."""
    killed = run.evidence.get("driver_killed")
    if killed is None:
        return {}
    again = find_start_after(run.paths, killed["time_s"])
    ratio = round(again.seconds / first.seconds, 2)
    warning = f", more than {MAX_RESTART_RATIO}" if ratio > MAX_RESTART_RATIO else ""
    note = f"back after {ratio:.2f} of a first start{warning}, on {again.workers} of {first.workers} workers"
    restart = {"first": asdict(first), "again": asdict(again), "ratio": ratio, "bar": MAX_RESTART_RATIO}
    return {"restart": restart, "note": note}


def find_difference(undisturbed: Trace, disturbed: Trace) -> str | None:
    """Returns a message about the first difference of two runs; None if they are equal."""
    for step in sorted(undisturbed.steps.keys() | disturbed.steps.keys()):
        undisturbed_step, disturbed_step = undisturbed.steps.get(step), disturbed.steps.get(step)
        if undisturbed_step is None or disturbed_step is None:
            return f"step {step} is recorded in only one of the runs"
        if undisturbed_step[1:] != disturbed_step[1:]:
            return f"from step {step} on, the rows differ"
        if undisturbed_step[0] != disturbed_step[0]:
            return f"from step {step} on, the losses differ on the same rows"
    if undisturbed.rows != disturbed.rows:
        return f"the run used {disturbed.rows:,} rows instead of {undisturbed.rows:,}"
    return None if undisturbed.digest == disturbed.digest else "the parameters differ after the same rows and losses"


def find_missing_evidence(scenario: Scenario, run: ScenarioResult) -> list[str]:
    """Returns a message for each trace of the disturbance that is missing: without them it did not really happen."""
    if "trouble" in run.evidence:
        return [str(run.evidence["trouble"]["error"])]
    absent = [name for name in scenario.expected if name not in run.evidence]
    return [f"the evidence {name!r} is missing" for name in absent] if absent else scenario.confirm(run)


def assess_scenario(scenario: Scenario, run: ScenarioResult, undisturbed: Trace) -> tuple[Outcome, str | None]:
    """Returns the outcome of a scenario, and the reason if it is not "equal"."""
    if run.summary["status"] != "finished":
        return "failed", f"the run ended as {run.summary['status']}"
    absences = find_missing_evidence(scenario, run)
    if absences:
        return "failed", "the fault did not happen: " + "; ".join(absences)
    deviation = find_difference(undisturbed, read_trace(run.paths, run.summary))
    return ("different", deviation) if deviation else ("equal", None)


def collect_fault_evidence(evidence: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the evidence of the faults, without the pauses of the drill (`paced-`).

    In each entry of another process, `process_gone` is whether that process has ended, None if it is on another
    machine.
    """
    this_process = asdict(LeaseHolder.here())
    return {
        name: entry | ({"process_gone": is_gone(entry)} if entry["process"] != this_process else {})
        for name, entry in evidence.items()
        if not name.startswith("paced-")
    }


def collect_measurements(scenario: Scenario, run: ScenarioResult) -> dict[str, Any]:
    """Returns what the disturbance cost the run, from its summary and step records.

    `goodput` does not count the waits that the drill itself has caused.
    """
    kept_records, repeated_records = read_records(run.paths)
    records = {step: _correct_clock(r, run.evidence) for step, r in kept_records.items()}
    repeated = [_correct_clock(r, run.evidence) for r in repeated_records]
    waits = _collect_waits(scenario, run.evidence)
    entries = [run.evidence.get(name, {}) for name in [*scenario.waits.values()] or scenario.expected]
    faults = sorted((entry["time_s"], entry["step"]) for entry in entries if "step" in entry)
    return {
        **{name: run.summary[name] for name in ("world_sizes", "recovery_s", "rows", "params_digest")},
        "redone_steps": max(run.summary["redone_steps"], _count_redone_steps(faults, run)),
        "next_step_s": _recovery_times_s(faults, records, repeated),
        "goodput": goodput(subtract_waits(records.values(), waits), subtract_waits(repeated, waits)),
        "waited_s": round(sum(waits.values()), 3),
    }


def _count_redone_steps(faults: list[tuple[float, int]], run: ScenarioResult) -> int:
    """Returns the number of steps that were lost after faults (time, step), also before their record was written."""
    lost = 0
    for event in run.events("resumed"):
        before = [step for time_s, step in faults if time_s < event.time_s]
        lost += max(0, before[-1] - event.details["step"]) if before else 0
    return lost


def _recovery_times_s(
    faults: list[tuple[float, int]], records: dict[int, StepRecord], repeated: list[StepRecord]
) -> list[float]:
    """Returns the seconds from each fault to the next finished step, for the first of several faults before a step."""
    recovery_s: dict[float, float] = {}
    for time_s, step in faults:
        # The other ranks may still finish the step of the fault, in the generation of the fault. That does not count
        # as the next step.
        generation = records[step].generation if step in records else None
        later = (r for r in [*records.values(), *repeated] if r.time_s > time_s)
        if after := [r.time_s for r in later if r.step > step or r.generation != generation]:
            recovery_s.setdefault(min(after), round(min(after) - time_s, 3))
    return list(recovery_s.values())


def _collect_waits(scenario: Scenario, evidence: dict[str, dict[str, Any]]) -> dict[int, float]:
    """Returns the seconds for which the drill itself made the run wait, by the step after which it waited."""
    waits: dict[int, float] = {}
    for name, entry in evidence.items():
        if name.startswith("paced-"):
            waits |= {int(step): waits.get(int(step), 0.0) + pause_s for step, pause_s in entry["pauses"].items()}
    for name, until in scenario.waits.items():
        if name in evidence and until in evidence:
            step = evidence[name]["step"]
            waits[step] = waits.get(step, 0.0) + evidence[until]["time_s"] - evidence[name]["time_s"]
    return waits


def subtract_waits(records: Iterable[StepRecord], waits: dict[int, float]) -> list[StepRecord]:
    """Returns the records with the times that they would have without the waits (seconds, by the step before)."""

    def without_waits(record: StepRecord) -> StepRecord:
        before_s = sum(wait_s for step, wait_s in waits.items() if step < record.step)
        wait_ms = 1e3 * waits.get(record.step - 1, 0.0)
        # The first step of a generation is timed from the start of the generation: a wait before that is not in it.
        step_ms = record.step_ms - wait_ms if record.step_ms >= wait_ms else record.step_ms
        return replace(record, time_s=record.time_s - before_s, step_ms=step_ms)

    return [without_waits(record) for record in records]


def _correct_clock(record: StepRecord, evidence: dict[str, dict[str, Any]]) -> StepRecord:
    """Returns the record with the time of a clock that the drill has not changed (scenario `clock_jump`)."""
    jumps = sorted((p["step"], p["clock_s"]) for p in evidence.values() if "clock_s" in p and p["step"] < record.step)
    return replace(record, time_s=record.time_s - jumps[-1][1]) if jumps else record


def describe_environment() -> dict[str, Any]:
    """Returns the environment for which the results hold: versions, this machine, the nodes of the cluster."""
    names, kind = ("CPU", "GPU", "memory"), accelerator()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "versions": {
            "ray_app": _describe_version(),
            "ray": ray.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "host": {
            "name": platform.node(),
            "platform": platform.platform(),
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
            "gpus": [kind.device_name(kind.device(i)) for i in range(kind.count())],
        },
        "nodes": [
            {
                "host": node["NodeManagerHostname"],
                "resources": {name: node["Resources"][name] for name in names if name in node["Resources"]},
            }
            for node in ray.nodes()
            if node["Alive"]
        ],
    }


def _describe_version() -> str:
    """Returns the version of this application and, in a clone, the commit."""
    # Where the package is installed, a folder further up may be another repository: git must not be asked.
    if not (_ROOT / ".git").exists():
        return __version__
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    git = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{__version__} ({git.stdout.strip()})" if git.returncode == 0 else __version__


def _cpu_model() -> str:
    try:
        model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        model = None
    return model[1] if model else platform.processor() or platform.machine()


def summarize_results(results: list[dict[str, Any]], digest: str, planned: int) -> str:
    """Returns one sentence on the whole drill."""
    outcomes = Counter(result["outcome"] for result in results)
    text = (
        f"{outcomes['equal']} of {planned - outcomes['left out']} scenarios ended with the parameters of the"
        f" undisturbed run: sha256 {digest}"
    )
    counts = {kind: outcomes[kind] for kind in ("different", "failed", "left out")}
    counts["not reached"] = planned - len(results)
    remainder = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return f"{text} ({remainder})" if remainder else text


def make_results_table(results: list[dict[str, Any]]) -> Table:
    """Returns the results as a table for the terminal."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("scenario", "at step", "workers", "redone steps", "s to next step", "goodput", "result"):
        table.add_column(name, justify="right" if name in ("redone steps", "s to next step", "goodput") else "left")
    for result in results:
        sizes = " ".join(
            f"{workers}" if not step else f"→ {workers} @{step}" for step, workers in result.get("world_sizes", [])
        )
        seconds = ", ".join(f"{s:.2f}" for s in result.get("next_step_s", []))
        outcome = result["outcome"]
        shown_outcome = outcome if outcome in ("equal", "left out") else outcome.upper()
        reason = "".join(f": {text}" for text in (result["reason"], result.get("note")) if text)
        share = result.get("goodput")
        table.add_row(
            result["scenario"],
            ", ".join(map(str, result.get("steps", []))) or "-",
            sizes or "-",
            str(result.get("redone_steps", "-")),
            seconds or "-",
            f"{share:.2f}" if share is not None else "-",
            f"[{_COLORS[outcome]}]{shown_outcome}[/]{reason.replace('[', chr(92) + '[')}",
        )
    return table
