"""The cost for a report of finding the best of the neighboring runs.

    python benchmarks/neighbours.py                 # a thousand runs on a disk
    python benchmarks/neighbours.py --runs 200

`not listed`: every summary is read, as for runs of an earlier version, which are then listed; `listed`: all others.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from unittest import mock

from ray_app.runlog.endings import put_summary, read_ends
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import put_json


def main() -> None:
    """Makes runs and measures reading their ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    runs = parser.parse_args().runs
    for title, put in (
        ("not listed", lambda paths, summary: put_json(paths.summary, summary)),
        ("listed", put_summary),
    ):
        with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync"):
            for number in range(runs):
                best = {"step": 100, "metric": "accuracy", "value": 1 - 1 / (number + 2)}
                timing = {
                    "wall_s": 1.0,
                    "rows_by_logical_worker": [1000] * 64,
                    "world_sizes": [[step, 2] for step in range(40)],
                }
                put(
                    RunPaths(Path(folder) / f"run-{number}"),
                    {"status": "finished", "ended_s": 1e9 + number, "best": best, **timing},
                )
            with mock.patch.object(Path, "read_bytes", autospec=True, side_effect=Path.read_bytes) as read:
                began_s = time.perf_counter()
                assert len(read_ends(Path(folder))) == runs
                print(
                    f"{title:<11} {read.call_count:>5,} summaries read, {1e3 * (time.perf_counter() - began_s):,.0f} ms"
                )


if __name__ == "__main__":
    main()
