"""A driver without workers, which writes all files of a run up to the moment at which it is killed.

As a script it is that driver; its arguments are the configuration file and the number of steps.
"""

import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from ray_app.checkpoint.format import pack
from ray_app.checkpoint.store import CheckpointStore
from ray_app.config.config import Config, from_yaml
from ray_app.preflight.prepare import claim, prepare
from ray_app.runlog.journal import MetricsWriter, StepRecord, put_event
from ray_app.runlog.lease import Lease, LeaseHolder, LeaseRecord, acquire_lease
from ray_app.storage.files import put_json
from ray_app.track.tracker import Tracker
from tests.support.checkpoints import commit_of, snapshot_of
from tests.support.waiting import wait_until


def drive_run(config: Config, last: int, end: str = "") -> tuple[Lease, Tracker]:
    """Records steps, sends them to MLflow, writes a checkpoint of the last, and keeps its lease.

    Args:
        config: The configuration of the run.
        last: Number of steps.
        end: The event with which it records its end; empty: none.
    """
    prepared = prepare(config)
    lease = acquire_lease(prepared.job.paths)
    job = claim(prepared, lease.fence).job
    put_event(job.paths, "started", job.fence, max_workers=1)
    tracker = Tracker(job.paths, config, {}, 1)
    tracker.start()
    writer = MetricsWriter(job.paths, job.fence)
    for step in range(1, last + 1):
        writer.add(StepRecord(step, 0, time.time(), 1.0, 0.1, 1.0, 5.0, 0.1, 1, [16] * 4, [step] * 4, f"{job.fence}.1"))
    writer.close()
    CheckpointStore(job.paths).write(pack(snapshot_of(last)), replace(commit_of(last, job.fence), params_digest="abc"))
    if end:
        put_event(job.paths, end, job.fence)
    wait_until(
        lambda: tracker.run_id and f'"sent_step": {last}' in job.paths.tracking.read_text(),
        "MLflow did not get the steps",
    )
    return lease, tracker


def make_orphan(config: Config, last: int, end: str = "") -> None:
    """Writes quickly what a killed `drive_run` leaves: the lease names a process that has ended."""
    lease, tracker = drive_run(config, last, end)
    tracker.abandon()
    lease.release()
    dead_holder = replace(LeaseHolder.here(), pid_ticks=-1)
    put_json(
        prepare(config).job.paths.fence(lease.fence), asdict(LeaseRecord(dead_holder, time.time(), time.time(), 30.0))
    )


if __name__ == "__main__":
    drive_run(from_yaml(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    print("ready", flush=True)
    time.sleep(600)
