"""What the training loop of a worker gets from the process that calls it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ray_app.task.ragged import Arrays
from ray_app.train.checkpointing.persistence import SnapshotSender
from ray_app.train.job import Hooks, Job, OpenWindows
from ray_app.train.membership import Membership


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
        load_evaluation: Loads the evaluation data, with `job.evaluation`; the workers then evaluate at every planned
            checkpoint.
        ask: Called in rank 0 when the question of a step is on storage (`put_question`), with `job.is_intervened`. The
            driver may answer during the call or later.
        at_batch: Called after each step if this process is the driver's; returns whether the epoch ends there, which is
            then its last one.
    """

    job: Job
    membership: Membership
    open_windows: OpenWindows
    device: torch.device
    hooks: Hooks = Hooks()
    sender: SnapshotSender | None = None
    load_evaluation: Callable[[], Arrays] | None = None
    ask: Callable[[int], object] = lambda step: None
    at_batch: Callable[[], bool] | None = None
