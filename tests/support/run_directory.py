"""Run directories that are written by hand as a run would write them, for tests of their readers."""

import base64
import json
import math
import struct
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config.config import Config
from ray_app.runlog.evaluations import Evaluation, put_evaluation
from ray_app.runlog.journal import StepRecord
from ray_app.runlog.lease import LeaseHolder, LeaseRecord
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import put_json

START_S = 1_790_000_000.0


class RunDirectory:
    """One run directory; times are seconds since the run's first start.

    Args:
        folder: The folder of runs.
        name: The name of the run.
        start_s: The time of its first start.
        fields: Fields of its configuration, as for `Config.replace`.
    """

    def __init__(self, folder: Path, name: str = "run", start_s: float = START_S, **fields: Any) -> None:
        self.paths = RunPaths(folder / name)
        self.start_s = start_s
        self._events = 0
        defaults = {
            "task__class_path": "made.Task",
            "data__path": "made",
            "scaling__max_workers": 2,
            "scaling__logical_workers": 4,
        }
        self.config = Config().replace(**{**defaults, "data__eval_path": "made", "run__name": name, **fields})
        self.paths.root.mkdir(parents=True)
        self.paths.config.write_text(self.config.to_yaml())

    def event(self, kind: str, at_s: float, fence: int = 1, **details: Any) -> None:
        """Records an event."""
        time_s = self.start_s + at_s
        self._events += 1
        name = f"{int(time_s * 1e9):020d}-{kind}-{self._events}.json"
        put_json(self.paths.events / name, {"kind": kind, "time_s": time_s, "fence": fence, "details": details})

    def start(self, at_s: float = 0.0, fence: int = 1, **details: Any) -> None:
        """Records a start of the driver."""
        self.event(
            "started",
            at_s,
            fence,
            max_workers=2,
            **({"metric": "accuracy", "mode": "max", "total_steps": 400} | details),
        )

    def steps(
        self,
        first: int,
        last: int,
        at_s: float,
        each_s: float = 0.1,
        workers: int = 2,
        generation: str = "1.1",
        **fields: Any,
    ) -> float:
        """Records consecutive steps; returns the time of the last.

        `losses` replaces the loss of some steps; the other fields are fields of each record.
        """
        losses = fields.pop("losses", {})
        records = [
            StepRecord(
                step,
                (step - 1) // 100,
                self.start_s + at_s + (step - first + 1) * each_s,
                losses.get(step, 2.3 * math.exp(-step / 120) + 0.02),
                1e-3 * step / 400,
                1.0,
                each_s * 1e3,
                1.0,
                workers,
                [16, 16],
                [step, step + 1],
                generation,
                **fields,
            )
            for step in range(first, last + 1)
        ]
        columns = {name: [asdict(record)[name] for record in records] for name in asdict(records[0])}
        put_json(self.paths.metrics / f"{first:010d}-0001-{int((self.start_s + at_s) * 1e9)}.json", columns)
        return at_s + (last - first + 1) * each_s

    def checkpoint(self, step: int, at_s: float, why: str = "cadence") -> None:
        """Writes a committed checkpoint and its event."""
        commit = Commit(step, 1, 0, step, why, "c", "m", 4, f"{step:064x}", {"torch": "2"}, self.start_s + at_s)
        CheckpointStore(self.paths).write({}, commit)
        self.event("checkpointed", at_s, step=step, why=why, duration_s=0.2)

    def evaluate(
        self, step: int, at_s: float, metrics: dict[str, float], name: str | None = None, **fields: Any
    ) -> None:
        """Writes an evaluation of the evaluator `name`."""
        put_evaluation(self.paths, Evaluation(step, 0, "", metrics, 500, 0.3, self.start_s + at_s, **fields), name)

    def end(self, at_s: float, status: str = "finished", value: float | None = None, reason: str | None = None) -> None:
        """Records the end of a start, and writes the summary."""
        self.event("run_failed" if status == "failed" else status, at_s, reason=reason)
        best = {"step": 300, "metric": "accuracy", "value": value} if value is not None else None
        timing = {"wall_s": at_s}
        summary = {
            "status": status,
            "best": best,
            "ended_s": self.start_s + at_s,
            "params_digest": "e" * 64,
            "steps": 400,
            "timing": timing,
        }
        put_json(self.paths.summary, summary | {"rows": 12800, "goodput": 0.9, "world_sizes": [[0, 2]]})

    def write_live_lease(self) -> None:
        """Writes the lease of a driver that is alive."""
        now_s = self.start_s
        put_json(self.paths.fence(1), asdict(LeaseRecord(LeaseHolder.here(), now_s, now_s, 1e9)))


def png(shade: int = 128) -> str:
    """Returns an image of one pixel as a data URI."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    data = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes([0, shade])))
        + chunk(b"IEND", b"")
    )
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def make_full_run(
    folder: Path, name: str = "run", classes: int = 10, text: str = "class", **fields: Any
) -> RunDirectory:
    """Writes a run with a failure, a preemption, a resize, a second start, evaluations with tables and examples, next
    to an earlier run.

    Args:
        folder: The folder of runs.
        name: The name of the run.
        classes: Number of classes.
        text: The text of class names, reasons and other strings.
        fields: Fields of its configuration, as for `Config.replace`.
    """
    earlier = RunDirectory(folder, "before", START_S - 1000, optimizer__init_args={"lr": 0.5})
    earlier.end(100, value=0.91)
    run = RunDirectory(folder, name, **fields)
    run.start()
    done_s = run.steps(1, 100, 3.0)
    run.checkpoint(100, done_s)
    run.event("failed", done_s + 0.05, number=1, errors={"1": text}, step=100, left=1, final=False)
    run.event("formed", done_s + 0.2, generation=2, workers=1, step=100, lost_s=run.start_s + done_s + 0.02)
    done_s = run.steps(101, 150, done_s + 0.2, each_s=0.2, workers=1, generation="1.2")
    run.event("replaced", done_s, before=1, after=2, step=150, reason=text)
    done_s = run.steps(151, 200, done_s, generation="1.3")
    run.checkpoint(200, done_s)
    run.event("preempted", done_s, number=1, workers=1, step=200, left=1)
    run.event("interrupted", done_s + 0.5, reason=None)
    run.start(done_s + 5000, fence=2)
    done_s = run.steps(191, 400, done_s + 5003, generation="2.1")
    run.event("resized", done_s - 3, fence=2, before=1, after=2, step=370, reason=text)
    run.checkpoint(400, done_s, "extra")
    matrix = [[40 - 3 * (t % 3) if t == p else (t * p) % 4 for p in range(classes)] for t in range(classes)]
    tables = {
        "confusion_matrix": matrix,
        "precision": [0.9] * classes,
        "recall": [0.5 + 0.4 * t / classes for t in range(classes)],
    }
    names = [f"{text} {i}" for i in range(classes)]
    examples = [
        {"row": i, "truth": names[0], "predicted": names[1], "confidence": 0.9, "image": png(20 * i)} for i in range(6)
    ]
    examples.append({"row": 99, "truth": names[1], "predicted": names[0], "confidence": 0.8, "image": None})
    for step in (100, 200, 400):
        at_s = 20.0 if step < 400 else done_s + 1
        metrics = {"accuracy": 0.9 + step / 5000, "f1": 0.8, "loss": 50 / step}
        run.evaluate(step, at_s + step / 100, metrics, tables=tables, classes=names, examples=examples)
    run.evaluate(400, 90.0, {"accuracy": 0.7}, "harder")
    put_json(
        run.paths.bad_rows / "000000000005.json",
        {"position": 5, "path": text, "row_group": 0, "row": 5, "reason": text},
    )
    run.event("finished", done_s + 6, fence=2, reason=None)
    put_json(run.paths.summary, json.loads("{}"))
    return run
