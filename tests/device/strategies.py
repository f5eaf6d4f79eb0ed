"""The strategies that train on simulated devices, and a job for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray_app.train.job import Job
from tests.support.local_world import make_job
from tests.support.sharded import ONE_CYCLE, Units

Fields = dict[str, Any]
FP16, BF16 = {"train__precision": "fp16"}, {"train__precision": "bf16"}
AVERAGE = {"train__ema_decay": 0.9, "train__grad_clip_norm": 0.5}
SMALL_BUCKETS = {"train__bucket_mb": 0.001}
OVERLAPPED = {"train__reduction": "overlapped"}
FSDP = {"train__strategy": "fsdp", "checkpoint__snapshot_every_steps": None}
OFFLOAD = FSDP | {"train__cpu_offload": True}
LOCAL = {"train__strategy": "local_sgd", "train__local_steps": 3}
CENTRAL = {"train__strategy": "central_storage"}
SDC = {"failure__sdc_check_rate": 1.0}
BIT_IDENTICAL: dict[str, Fields] = {
    "ddp": SMALL_BUCKETS | AVERAGE,
    "fsdp, offload": OFFLOAD,
    "local_sgd": LOCAL,
    "central_storage": CENTRAL | AVERAGE,
    "ddp, fp16": FP16,
    "ddp, bf16": BF16,
    "ddp, SDC": SDC,
    "fsdp": FSDP | AVERAGE,
    "fsdp, bf16": FSDP | BF16,
    "fsdp, replica": FSDP | {"train__peer_replica": True},
    "local_sgd, outer": LOCAL | {"train__outer_lr": 0.7, "train__outer_momentum": 0.9} | BF16,
    "central_storage, fp16": CENTRAL | FP16,
    "central_storage, replica": CENTRAL | {"train__peer_replica": True},
}
"""Settings that are bit-identical on any number of devices."""


def strategy_job(folder: Path, data: Path, dropout: float, logical_workers: int = 4, **fields: Any) -> Job:
    task = Units()
    task.model_args = {"channels": 4, "dropout": dropout}
    defaults: Fields = {
        "train__epochs": 2,
        "schedule": ONE_CYCLE,
        "checkpoint__every_epochs": None,
        "checkpoint__every_steps": 6,
        "checkpoint__snapshot_every_steps": 3,
    }
    return make_job(
        folder, data, logical_workers=logical_workers, batch=3 * logical_workers, task=task, **(defaults | fields)
    )
