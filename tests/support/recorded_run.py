"""A run directory with a record, and the points that MLflow should have of it."""

import random
import statistics
from pathlib import Path
from typing import Any

from ray_app.config.config import Config
from ray_app.config.sections import ClassSpec
from ray_app.runlog.evaluations import Evaluation, put_evaluation
from ray_app.runlog.journal import MetricsWriter, StepRecord, read_events
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import put_json
from ray_app.track.tracker import Tracker

EVERY = 10


BASE_S = 1_700_000_000.25


History = list[tuple[int, int, float]]


class RecordedRun:
    """A run directory, the record that rank 0 and evaluators write, and the points that MLflow should have of it."""

    def __init__(self, root: Path, uri: str, **fields: Any) -> None:
        self.paths = RunPaths(root)
        self.config = Config(
            task=ClassSpec("some.Task", {"source": "s3://user:secret@bucket/x", "token": "xy"})
        ).replace(
            run__name=root.name, run__storage_path=str(root.parent), tracking__uri=uri, scaling__max_workers=2, **fields
        )
        self.records: dict[int, StepRecord] = {}
        self.evaluations: list[tuple[str, Evaluation]] = []
        put_json(self.paths.manifest, {})
        self.paths.config.write_text(self.config.to_yaml())

    def record(
        self, first: int, last: int, fence: int = 1, flush_s: float = 3600.0, losses: dict[int, float] | None = None
    ) -> None:
        """Records steps as rank 0 does; a step that was recorded before gets other timings."""
        draw = random.Random(first * 1000 + fence)
        writer = MetricsWriter(self.paths, fence, flush_s)
        for step in range(first, last + 1):
            record = StepRecord(
                step=step,
                epoch=0,
                time_s=BASE_S + step * 0.1 + fence * 1e-3,
                loss=(losses or {}).get(step, draw.random()),
                lr=1e-3 / step,
                grad_norm=draw.random(),
                step_ms=100 * draw.random(),
                data_wait_ms=draw.random(),
                workers=1 + step % 2,
                rows=[draw.randint(1, 9), draw.randint(0, 9)],
                row_hash=[2**64 - 1, step],
                generation=f"{fence}.1",
                metrics={"caught": draw.random()},
            )
            self.records.setdefault(step, record)
            writer.add(record)
        writer.close()

    def evaluate(self, step: int, evaluator: str | None = None, **metrics: float) -> None:
        evaluation = Evaluation(
            step, 0, "digest", metrics or {"accuracy": step / 7, "val/loss": 0.1}, 10, 0.5, BASE_S + step * 0.2
        )
        assert put_evaluation(self.paths, evaluation, evaluator)
        self.evaluations.append((f"eval_{evaluator}_" if evaluator else "eval_", evaluation))

    def tracker(self, tags: dict[str, str] | None = None, every_steps: int = EVERY, **fields: Any) -> Tracker:
        tracker = Tracker(self.paths, self.config.replace(**fields), tags or {"kind": "test"}, every_steps)
        tracker.start()
        return tracker

    def expected_points(self, last: int) -> dict[str, History]:
        """Returns the expected points up to a step, computed from the record alone."""
        failed = [event.time_s for event in read_events(self.paths, "failed")]
        points: dict[str, History] = {}
        for end in [*range(EVERY, last + 1, EVERY), *([last] if last % EVERY else [])]:
            block = [self.records[step] for step in range((end - 1) // EVERY * EVERY + 1, end + 1)]
            rows = [sum(r.rows) for r in block]
            values = {
                "loss": sum(r.loss * n for r, n in zip(block, rows, strict=True)) / sum(rows),
                "lr": block[-1].lr,
                "grad_norm": statistics.fmean(r.grad_norm for r in block),
                "step_ms": statistics.median(r.step_ms for r in block),
                "data_wait_ms": statistics.fmean(r.data_wait_ms for r in block),
                "rows_per_s": 1000 * sum(rows) / sum(r.step_ms for r in block),
                "workers": block[-1].workers,
                "restarts": sum(at <= block[-1].time_s for at in failed),
            }
            values["caught"] = sum(r.metrics["caught"] * n for r, n in zip(block, rows, strict=True)) / sum(rows)
            for name, value in values.items():
                points.setdefault(name, []).append((end, int(block[-1].time_s * 1000), value))
        for prefix, evaluation in self.evaluations:
            for name, value in evaluation.metrics.items():
                points.setdefault(prefix + name, []).append((evaluation.step, int(evaluation.time_s * 1000), value))
        return points
