"""The cost of tracking for a step: the digits run on two workers with MLflow, against the same run
without, and with an unreachable server.

Rank 0 measures the time between two steps in mid-run; the evaluator is off on both sides. The run without tracking is
measured twice for the null: a median ratio within the null's range is a difference that this machine cannot show.

python benchmarks/tracking.py --rounds 5      # needs a quiet machine; about 8 minutes
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import ROOT, Sample, Stopwatch, alternate, report, scaled

OFF, ON = "tracking off", "tracking on"
AWAY = "tracking on, no server"
BAR = 1.02
WORKERS = 2
WARM_UP = 120
STEPS = WARM_UP + scaled(500)


class Digits:
    """Runs of the application on one local Ray cluster.

    Args:
        folder: Folder for data and runs.
    """

    def __init__(self, folder: Path) -> None:
        from ray_app.ingest.ingest import IngestOptions, ingest

        ingest(IngestOptions(source="digits", out=str(folder / "digits")))
        self._folder, self._number = folder, 0

    def measure(self, tracking: bool, uri: str | None = None) -> Sample:
        """Trains once; returns the time of a step in mid-run."""
        from rich.console import Console

        from ray_app import load_config, run_training
        from ray_app.driver.run import Faults
        from ray_app.train.job import Hooks

        self._number += 1
        watch = Stopwatch(str(self._folder / f"watch-{self._number}"), WARM_UP, STEPS)
        config = load_config(
            ROOT / "conf" / "digits.yaml",
            run__storage_path=str(self._folder / "runs"),
            run__name=f"run-{self._number}",
            data__path=str(self._folder / "digits" / "train"),
            data__eval_path=None,
            scaling__min_workers=WORKERS,
            scaling__max_workers=WORKERS,
            train__epochs=1000,
            train__max_steps=STEPS,
            tracking__enabled=tracking,
            tracking__uri=uri,
        )
        run_training(config, Console(quiet=True), Faults(train=Hooks(after_step=watch)))
        return watch.sample(WORKERS)


def main() -> int:
    """Measures all sides; returns 0 if tracking costs no more than the bar allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        digits = Digits(Path(folder))
        # The first run makes the database, and starts processes that stay alive.
        digits.measure(tracking=True)
        sides = {
            OFF: lambda: digits.measure(False),
            ON: lambda: digits.measure(True),
            AWAY: lambda: digits.measure(True, "http://127.0.0.1:9"),
        }
        samples = alternate(sides, options.rounds)
    ray.shutdown()
    report("Time per step, digits on 2 workers", samples, {ON: BAR, AWAY: BAR})
    walls, nulls = (
        [s.wall_ms / b.wall_ms for s, b in zip(samples[side], samples[OFF], strict=True)]
        for side in (ON, f"{OFF} again")
    )
    ratio, is_met = median(walls), median(walls) <= BAR
    print(
        f"\nverdict: {'held' if is_met else 'MISSED'}: {ratio:.3f} against the bar {BAR} (null"
        f" {min(nulls):.3f}-{max(nulls):.3f})"
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
