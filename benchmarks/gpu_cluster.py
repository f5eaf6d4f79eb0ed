"""Lines about several workers on Ray, if possible with a GPU each, and the part of the reduction that NCCL overlaps
with computing.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import ray
from rich.console import Console

from benchmarks.gpu_digests import network
from benchmarks.gpu_lines import Line, Outcome
from benchmarks.gpu_speed import trace_of
from benchmarks.gpu_workers import Bench
from benchmarks.joining import AT, DieOnce
from ray_app import load_config, run_training
from ray_app.driver.run import Faults
from ray_app.runlog.journal import read_records
from ray_app.runlog.paths import RunPaths
from ray_app.train.job import Hooks

Spans = list[tuple[float, float]]


def killed_on_ray(bench: Bench) -> Outcome:
    """Measures the time from SIGKILL of one of two workers of a run on Ray to the next step of the other; on a GPU each
    through NCCL, else through gloo.

    An evaluator has a share of the only GPU, or the third one.
    """
    folder, one_gpu_each = bench.new("ray"), bench.gpus >= 2
    folder.mkdir()
    (folder / "ready").touch()
    gpus, evaluator = (
        (1.0, float(bench.gpus > 2)) if one_gpu_each else (0.4, 0.2) if bench.device == "cuda" else (0.0, 0.0)
    )
    config = load_config(
        task__class_path="ray_app.task.image.ImageClassification",
        data__path=str(bench.small),
        data__eval_path=str(bench.few),
        data__global_batch_size=bench.sizes.digest_batch,
        data__cache="memory",
        run__storage_path=str(folder),
        run__name="run",
        train__epochs=1000,
        train__max_steps=AT + 20,
        scaling__max_workers=2,
        scaling__gpus_per_worker=gpus,
        evaluate__num_gpus=evaluator,
        tracking__enabled=False,
    )
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    # Ray's own count of GPUs fails where NVML does.
    ray.init(address="local", num_cpus=4, num_gpus=bench.gpus, include_dashboard=False, **quiet)
    try:
        result = run_training(config, Console(quiet=True), Faults(train=Hooks(after_step=DieOnce(str(folder), (1,)))))
    finally:
        ray.shutdown()
    died = float((folder / "died-1").read_text())
    records, _ = read_records(RunPaths(folder / "run"))
    seconds = min(record.time_s for record in records.values() if record.time_s > died) - died
    redone = result.summary["redone_steps"]
    evaluated = result.summary["evaluation"]["done"]
    if not evaluated:
        raise RuntimeError(f"the evaluator with {evaluator:g} GPU evaluated no checkpoint")
    text = (
        f"{seconds:.2f} s through {'NCCL' if one_gpu_each else 'gloo'}, {redone} steps redone, {evaluated} evaluations"
    )
    return Outcome(
        text, seconds <= 2 and not redone if bench.device == "cuda" else None, {"s": seconds, "redone": redone}
    )


def hidden(reducing: Spans, computing: Spans) -> float:
    """Returns the fraction of the time of a reduction that overlaps with computing, 0 to 1.

    Args:
        reducing: Begin and end of each kernel of the reduction.
        computing: Begin and end of all other kernels.
    """
    joined = _join(computing)
    both = sum(max(0.0, min(end, b) - max(begin, a)) for begin, end in _join(reducing) for a, b in joined)
    whole = sum(end - begin for begin, end in _join(reducing))
    return both / whole if whole else 0.0


def _join(spans: Spans) -> Spans:
    """Returns the union of spans as spans without overlaps, in order."""
    joined: Spans = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    assert all(a[1] < b[0] for a, b in pairwise(joined))
    return joined


def reduction_hidden(bench: Bench) -> Outcome:
    """Measures the part of the reduction that overlaps with backward: two workers with a GPU each, both reductions."""
    figures: dict[str, Any] = {}
    for reduction in ("exact", "overlapped"):
        last = bench.sizes.warm_up + 3
        fields = {"train__max_steps": last, "train__epochs": 1000, "train__profile_steps": [last - 1, last - 1]}
        batch = bench.sizes.digest_batch
        job = bench.job(
            network(bench),
            bench.small,
            logical_workers=2,
            batch=batch,
            train__reduction=reduction,
            train__bucket_mb=4.0,
            **fields,
        )
        with bench.pool(2) as pool:
            bench.trained(pool, job, 2, own_gpus=True)
        kernels = [event for event in trace_of(job) if event.get("cat") == "kernel"]
        spans: dict[bool, Spans] = {True: [], False: []}
        for event in kernels:
            spans["nccl" in event["name"].lower()].append((event["ts"], event["ts"] + event["dur"]))
        figures[reduction] = {
            "hidden": hidden(spans[True], spans[False]),
            "ms": sum(b - a for a, b in spans[True]) / 1e3,
        }
    text = ", ".join(f"{name}: {values['hidden']:.0%} of {values['ms']:.1f} ms" for name, values in figures.items())
    return Outcome(text, None, figures)


LINES = [
    Line("Ray: SIGKILL to the next step", killed_on_ray, 60, "2 s"),
    Line("NCCL: overlap of the reduction in a profile", reduction_hidden, 60, gpus=2),
]
