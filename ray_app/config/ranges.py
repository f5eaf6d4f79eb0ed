"""What single fields of a configuration may hold: ranges and choices."""

from __future__ import annotations

import math
from typing import Literal, get_args, get_origin, get_type_hints

from ray_app.config.config import SECTIONS, Config, flatten

AT_LEAST: dict[str, float] = {
    "scaling.min_workers": 1,
    "scaling.max_workers": 1,
    "scaling.logical_workers": 1,
    "scaling.threads_per_worker": 1,
    "scaling.cpus_per_worker": 0,
    "scaling.gpus_per_worker": 0,
    "scaling.spare_workers": 0,
    "data.global_batch_size": 1,
    "data.shuffle_window_rows": 1,
    "data.prefetch_windows": 1,
    "data.max_bad_rows": 0,
    "data.reader_threads": 0,
    "train.epochs": 1,
    "train.max_steps": 1,
    "train.steps_per_epoch": 1,
    "train.local_steps": 1,
    "train.outer_momentum": 0,
    "train.servers": 1,
    "train.server_cpus": 0,
    "train.min_shard_kb": 1,
    "train.staleness": 0,
    "train.ema_decay": 0,
    "checkpoint.every_steps": 1,
    "checkpoint.every_epochs": 1,
    "checkpoint.keep_last": 2,
    "checkpoint.snapshot_every_steps": 1,
    "checkpoint.keep_best": 0,
    "failure.compare_every_steps": 1,
    "failure.max_failures": -1,
    "failure.max_preemptions": -1,
    "evaluate.most_waiting": 1,
    "evaluate.patience": 1,
    "evaluate.min_delta": 0,
    "evaluate.batch_size": 1,
    "evaluate.num_cpus": 0,
    "evaluate.num_gpus": 0,
    "evaluate.threads": 1,
    "evaluate.drain_timeout_s": 0,
    "tracking.every_steps": 1,
}
ABOVE_ZERO = (
    "scaling.resize_check_s",
    "scaling.replace_slow_s",
    "data.read_task_mb",
    "data.cache_gb",
    "train.grad_clip_norm",
    "train.outer_lr",
    "train.bucket_mb",
    "failure.step_timeout_s",
    "failure.heartbeat_timeout_s",
    "evaluate.budget",
    "tracking.system_metrics_s",
)
_FINITE = ("data.read_task_mb", "train.bucket_mb")


def check_empty(config: Config) -> list[str]:
    """What is wrong with fields that have nothing in them."""
    problems = []
    for section, made in SECTIONS.items():
        for name, hint in get_type_hints(made).items():
            if getattr(getattr(config, section), name) is None and type(None) not in get_args(hint):
                default = getattr(made(), name)
                problems.append(f"{section}.{name} is empty; give a value, or leave the line out for the default, {default!r}.")
    return problems


def check_ranges(config: Config) -> list[str]:
    """What is wrong with single values."""
    values = flatten(config.to_dict())
    problems = []
    for section, made in SECTIONS.items():
        for name, hint in get_type_hints(made).items():
            allowed = [choice for part in (hint, *get_args(hint)) if get_origin(part) is Literal for choice in get_args(part)]
            value = getattr(getattr(config, section), name)
            is_number = int in get_args(hint) and isinstance(value, int)
            if allowed and value is not None and not is_number and value not in allowed:
                number = "a number or " if int in get_args(hint) else ""
                problems.append(f"{section}.{name} is {value!r}; it must be {number}one of {', '.join(allowed)}.")
    for name, least in AT_LEAST.items():
        if values[name] is not None and not isinstance(values[name], str) and not values[name] >= least:  # also NaN
            problems.append(f"{name} is {values[name]}; it must be at least {least:g}.")
    for name in ABOVE_ZERO:
        if values[name] is not None and not values[name] > 0:
            problems.append(f"{name} is {values[name]}; it must be greater than 0.")
    for name in _FINITE:
        if math.isinf(values[name]):
            problems.append(f"{name} is {values[name]}; it must be finite.")
    return problems
