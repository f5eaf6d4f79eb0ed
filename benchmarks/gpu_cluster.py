"""Lines about several workers as users have them: on Ray, where there are GPUs enough on one each, and what NCCL hides
behind computing.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import ray
from rich.console import Console

from benchmarks.gpu_digests import network
from benchmarks.gpu_lines import Found, Line
from benchmarks.gpu_loops import WARM_UP
from benchmarks.gpu_speed import trace_of
from benchmarks.gpu_workers import Bench
from benchmarks.joining import AT, Dies
from ray_app import load_config, run_training
from ray_app.driver.run import Faults
from ray_app.runlog.journal import MetricsReader
from ray_app.runlog.paths import RunPaths
from ray_app.train.job import Hooks

Spans = list[tuple[float, float]]


def killed_on_ray(bench: Bench) -> Found:
    """SIGKILL of one of two workers of a run on Ray to the next step of the other one; on a GPU each through NCCL, else
    through gloo.

    An evaluator has a share of the only GPU, or the third one.
    """
    folder, own = bench.new("ray"), bench.gpus >= 2
    folder.mkdir()
    (folder / "ready").touch()
    gpus, evaluator = (1.0, float(bench.gpus > 2)) if own else (0.4, 0.2) if bench.device == "cuda" else (0.0, 0.0)
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
        result = run_training(config, Console(quiet=True), Faults(train=Hooks(after_step=Dies(str(folder), (1,)))))
    finally:
        ray.shutdown()
    died = float((folder / "died-1").read_text())
    reader = MetricsReader(RunPaths(folder / "run"))
    reader.poll()
    seconds = min(record.time_s for record in reader.records.values() if record.time_s > died) - died
    redone = result.summary["redone_steps"]
    evaluated = result.summary["evaluation"]["done"]
    if not evaluated:
        raise RuntimeError(f"the evaluator with {evaluator:g} GPU evaluated no checkpoint")
    said = f"{seconds:.2f} s through {'NCCL' if own else 'gloo'}, {redone} steps redone, {evaluated} evaluations"
    return Found(
        said, seconds <= 2 and not redone if bench.device == "cuda" else None, {"s": seconds, "redone": redone}
    )


def hidden(exchange: Spans, computing: Spans) -> float:
    """Which part of the time of an exchange something is computed, 0 to 1.

    Args:
        exchange: Begin and end of each of its kernels.
        computing: Those of all other kernels.
    """
    joined = _joined(computing)
    both = sum(max(0.0, min(end, b) - max(begin, a)) for begin, end in _joined(exchange) for a, b in joined)
    whole = sum(end - begin for begin, end in _joined(exchange))
    return both / whole if whole else 0.0


def _joined(spans: Spans) -> Spans:
    """The same without overlaps, in order."""
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    assert all(a[1] < b[0] for a, b in pairwise(found))
    return found


def exchange_hidden(bench: Bench) -> Found:
    """Two workers on a GPU each: which part of the exchange travels while backward computes, for both reductions."""
    found: dict[str, Any] = {}
    for reduction in ("exact", "overlapped"):
        last = WARM_UP + 3
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
        found[reduction] = {"hidden": hidden(spans[True], spans[False]), "ms": sum(b - a for a, b in spans[True]) / 1e3}
    said = ", ".join(f"{name}: {each['hidden']:.0%} of {each['ms']:.1f} ms" for name, each in found.items())
    return Found(said, None, found)


LINES = [
    Line("Ray: SIGKILL to the next step", killed_on_ray, 60, "2 s"),
    Line("NCCL: overlap of the reduction in a profile", exchange_hidden, 60, gpus=2),
]
