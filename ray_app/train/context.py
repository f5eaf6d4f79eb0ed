"""What the training loop of a worker gets from the process that calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ray_app.data.reader import Decoded, RowSource, fetch_in_process, load_all
from ray_app.train.checkpointing.persistence import SnapshotSender
from ray_app.train.job import Hooks, Job, OpenWindows
from ray_app.train.membership import Membership

load_in_process = partial(load_all, fetch_in_process)
"""Decodes a whole data set in this process."""


@dataclass(frozen=True)
class WorkerContext:
    """The run and the surroundings of one worker.

    Args:
        job: The run to train.
        membership: Forms generations with the other workers, and gets reports of phases and steps.
        open_windows: Opens the training data.
        device: Device to compute on.
        hooks: Callbacks for fault tests.
        sender: Sends snapshots to the snapshot actors and fetches the newest; None without them.
        load_evaluation: Returns the decoded rows of `job.eval_source`, with `job.workers_evaluate`.
        ask: Called in rank 0 when the question of a step is on storage (`put_question`), with `job.is_intervened`. The
            driver may answer during the call or later.
        ends_epoch: Called after each step if this process is the driver's; returns whether the epoch ends there, and
            with it the run.
    """

    job: Job
    membership: Membership
    open_windows: OpenWindows
    device: torch.device
    hooks: Hooks = Hooks()
    sender: SnapshotSender | None = None
    load_evaluation: Callable[[RowSource], Decoded] = load_in_process
    ask: Callable[[int], object] = lambda step: None
    ends_epoch: Callable[[], bool] | None = None
