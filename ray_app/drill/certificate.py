"""What came of a drill: comparisons with the undisturbed run, the certificate, and the table."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psutil
import ray
import torch
from rich.table import Table

from ray_app.drill.scenario import Scenario, ScenarioResult, is_gone
from ray_app.runlog.history import goodput
from ray_app.runlog.journal import MetricsReader, StepRecord
from ray_app.runlog.lease import LeaseHolder
from ray_app.runlog.paths import RunPaths
from ray_app.version import __version__

Outcome = Literal["equal", "different", "failed", "left out"]
RESTART_BAR = 1.3
"""How much longer than a first start a start after the driver was killed may take; above it the table says so, and
nothing fails.
"""
_ROOT = Path(__file__).resolve().parents[2]
_COLORS = {"equal": "green", "different": "red", "failed": "red", "left out": "yellow"}


@dataclass(frozen=True)
class Trace:
    """What two runs must have in common.

    Args:
        digest: SHA-256 of the parameters and persistent buffers.
        rows: Rows in all.
        steps: Loss, rows and row hashes of the logical workers, by step.
    """

    digest: str
    rows: int
    steps: dict[int, tuple[float, list[int], list[int]]]


def trace_of(paths: RunPaths, summary: dict[str, Any]) -> Trace:
    """The trace of a run that ended."""
    records, _ = _records(paths)
    return Trace(
        str(summary["params_digest"]),
        summary["rows"],
        {step: (r.loss, r.rows, r.row_hash) for step, r in records.items()},
    )


@dataclass(frozen=True)
class RunStart:
    """How a run came to a step.

    Args:
        seconds: From its beginning, or from the moment that its driver was killed, to the next finished step.
        workers: How many did that step.
    """

    seconds: float
    workers: int


def start_since(paths: RunPaths, time_s: float) -> RunStart:
    """The first step that a run finished after a moment.

    Args:
        paths: The run.
        time_s: The moment, seconds since 1970 (UTC).
    """
    records, repeated = _records(paths)
    first = min((r for r in [*records.values(), *repeated] if r.time_s > time_s), key=lambda r: r.time_s)
    return RunStart(round(first.time_s - time_s, 3), first.workers)


def restart(run: ScenarioResult, first: RunStart) -> dict[str, Any]:
    """How a run whose driver was killed came back, beside a first start on the same cluster; empty if its driver was
    not killed.

    Args:
        run: The run.
        first: Of the undisturbed run.
    """
    killed = run.proofs.get("driver_killed")
    if killed is None:
        return {}
    again = start_since(run.paths, killed["time_s"])
    ratio = round(again.seconds / first.seconds, 2)
    more = f", more than {RESTART_BAR}" if ratio > RESTART_BAR else ""
    note = f"back after {ratio:.2f} of a first start{more}, on {again.workers} of {first.workers} workers"
    return {
        "restart": {"first": asdict(first), "again": asdict(again), "ratio": ratio, "bar": RESTART_BAR},
        "note": note,
    }


def difference(one: Trace, other: Trace) -> str | None:
    """In what a run differs from the undisturbed one, in words; None if in nothing.

    Args:
        one: The undisturbed run.
        other: The other.
    """
    for step in sorted(one.steps.keys() | other.steps.keys()):
        here, there = one.steps.get(step), other.steps.get(step)
        if here is None or there is None:
            return f"step {step} is recorded in only one of the runs"
        if here[1:] != there[1:]:
            return f"from step {step} on it saw other rows"
        if here[0] != there[0]:
            return f"from step {step} on its losses are others, on the same rows"
    if one.rows != other.rows:
        return f"it consumed {other.rows:,} rows instead of {one.rows:,}"
    return None if one.digest == other.digest else "its parameters are others, after the same rows and losses"


def missing(disturbance: Scenario, run: ScenarioResult) -> list[str]:
    """What speaks against it that the disturbance really happened."""
    if "trouble" in run.proofs:
        return [str(run.proofs["trouble"]["error"])]
    absent = [name for name in disturbance.expected if name not in run.proofs]
    return [f"there is no proof {name!r}" for name in absent] if absent else disturbance.confirm(run)


def judge(disturbance: Scenario, run: ScenarioResult, undisturbed: Trace) -> tuple[Outcome, str | None]:
    """Whether a scenario counts, and why not."""
    if run.summary["status"] != "finished":
        return "failed", f"the run ended as {run.summary['status']}"
    lacks = missing(disturbance, run)
    if lacks:
        return "failed", "it did not happen: " + "; ".join(lacks)
    found = difference(undisturbed, trace_of(run.paths, run.summary))
    return ("different", found) if found else ("equal", None)


def proof_of(proofs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What happened, and whether the processes to which it did have ended; one on another machine cannot be asked."""
    real = {name: proof for name, proof in proofs.items() if not name.startswith("paced-")}
    here = asdict(LeaseHolder.here())
    return {
        name: proof | ({"process_gone": is_gone(proof)} if proof["process"] != here else {})
        for name, proof in real.items()
    }


def measures(disturbance: Scenario, run: ScenarioResult) -> dict[str, Any]:
    """What the run's summary and record say of the disturbance; waits of the drill's own making are taken out of
    `goodput`.
    """
    found, again = _records(run.paths)
    records, repeated = (
        {step: _on_time(r, run.proofs) for step, r in found.items()},
        [_on_time(r, run.proofs) for r in again],
    )
    waits = _waits(disturbance, run.proofs)
    names = [*disturbance.held.values()] or disturbance.expected
    struck = sorted(
        (run.proofs[name]["time_s"], run.proofs[name]["step"]) for name in names if "step" in run.proofs.get(name, {})
    )
    return {
        "world_sizes": run.summary["world_sizes"],
        "redone_steps": max(run.summary["redone_steps"], _redone(struck, run)),
        "recovery_s": run.summary["recovery_s"],
        "next_step_s": _next_step_s(struck, records, repeated),
        "goodput": goodput(without(records.values(), waits), without(repeated, waits)),
        "waited_s": round(sum(waits.values()), 3),
        "rows": run.summary["rows"],
        "params_digest": run.summary["params_digest"],
    }


def _redone(struck: list[tuple[float, int]], run: ScenarioResult) -> int:
    """Finished steps that were lost, also those whose record had not reached the storage when they were."""
    lost = 0
    for event in run.events("resumed"):
        before = [step for time_s, step in struck if time_s < event.time_s]
        lost += max(0, before[-1] - event.details["step"]) if before else 0
    return lost


def _next_step_s(
    struck: list[tuple[float, int]], records: dict[int, StepRecord], repeated: list[StepRecord]
) -> list[float]:
    """Seconds to the next finished step, for every time that the run was struck; from the first of several strikes
    before it.
    """
    found: dict[float, float] = {}
    for time_s, step in struck:
        own = records[step].generation if step in records else None  # the other ranks may just finish that step
        after = [
            r.time_s
            for r in [*records.values(), *repeated]
            if r.time_s > time_s and (r.step > step or r.generation != own)
        ]
        if after:
            found.setdefault(min(after), round(min(after) - time_s, 3))
    return list(found.values())


def _waits(disturbance: Scenario, proofs: dict[str, dict[str, Any]]) -> dict[int, float]:
    """Seconds that the drill itself held the run up, by the step after which it did."""
    waits: dict[int, float] = {}
    for name, proof in proofs.items():
        if name.startswith("paced-"):
            waits |= {int(step): waits.get(int(step), 0.0) + pause_s for step, pause_s in proof["pauses"].items()}
    for name, until in disturbance.held.items():
        if name in proofs and until in proofs:
            step = proofs[name]["step"]
            waits[step] = waits.get(step, 0.0) + proofs[until]["time_s"] - proofs[name]["time_s"]
    return waits


def without(records: Iterable[StepRecord], waits: dict[int, float]) -> list[StepRecord]:
    """The records as they were without waits. A first step of a generation is timed from its beginning: a wait before
    that is not in it.

    Args:
        records: Of steps.
        waits: Seconds, by the step after which the run waited.
    """

    def shortened(record: StepRecord) -> StepRecord:
        before_s, wait_ms = (
            sum(wait_s for step, wait_s in waits.items() if step < record.step),
            1e3 * waits.get(record.step - 1, 0.0),
        )
        step_ms = record.step_ms - wait_ms if record.step_ms >= wait_ms else record.step_ms
        return replace(record, time_s=record.time_s - before_s, step_ms=step_ms)

    return [shortened(record) for record in records]


def _on_time(record: StepRecord, proofs: dict[str, dict[str, Any]]) -> StepRecord:
    """The record as a clock would have it that the drill has not moved."""
    moved = sorted((p["step"], p["clock_s"]) for p in proofs.values() if "clock_s" in p and p["step"] < record.step)
    return replace(record, time_s=record.time_s - moved[-1][1]) if moved else record


def _records(paths: RunPaths) -> tuple[dict[int, StepRecord], list[StepRecord]]:
    reader = MetricsReader(paths)
    reader.poll()
    return dict(sorted(reader.records.items())), reader.repeated


def facts() -> dict[str, Any]:
    """What the results hold for: versions, this machine, the cluster."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "versions": {
            "ray_app": _own_version(),
            "ray": ray.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "host": {
            "name": platform.node(),
            "platform": platform.platform(),
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
            "gpus": gpus,
        },
        "nodes": [
            {
                "host": n["NodeManagerHostname"],
                "resources": {k: n["Resources"][k] for k in ("CPU", "GPU", "memory") if k in n["Resources"]},
            }
            for n in ray.nodes()
            if n["Alive"]
        ],
    }


def _own_version() -> str:
    """The version of this application and, in a clone, the commit."""
    if not (_ROOT / ".git").exists():  # installed; what is above may be another repository
        return __version__
    done = subprocess.run(
        ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"{__version__} ({done.stdout.strip()})" if done.returncode == 0 else __version__


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def conclusion(results: list[dict[str, Any]], digest: str, planned: int) -> str:
    """One sentence on the whole drill."""
    left_out = sum(r["outcome"] == "left out" for r in results)
    equal = sum(r["outcome"] == "equal" for r in results)
    text = (
        f"{equal} of {planned - left_out} scenarios ended with the parameters of the undisturbed run: sha256 {digest}"
    )
    more = {kind: sum(r["outcome"] == kind for r in results) for kind in ("different", "failed", "left out")}
    more["not reached"] = planned - len(results)
    said = ", ".join(f"{count} {kind}" for kind, count in more.items() if count)
    return f"{text} ({said})" if said else text


def table(results: list[dict[str, Any]]) -> Table:
    """The results for people."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("scenario", "at step", "workers", "redone steps", "s to next step", "goodput", "result"):
        made.add_column(name, justify="right" if name in ("redone steps", "s to next step", "goodput") else "left")
    for result in results:
        sizes = " ".join(
            f"{workers}" if not step else f"→ {workers} @{step}" for step, workers in result.get("world_sizes", [])
        )
        seconds = ", ".join(f"{s:.2f}" for s in result.get("next_step_s", []))
        outcome = result["outcome"]
        said = outcome if outcome in ("equal", "left out") else outcome.upper()
        reason = "".join(f": {text}" for text in (result["reason"], result.get("note")) if text)
        share = result.get("goodput")
        made.add_row(
            result["scenario"],
            ", ".join(map(str, result.get("steps", []))) or "-",
            sizes or "-",
            str(result.get("redone_steps", "-")),
            seconds or "-",
            f"{share:.2f}" if share is not None else "-",
            f"[{_COLORS[outcome]}]{said}[/]{reason.replace('[', chr(92) + '[')}",
        )
    return made
