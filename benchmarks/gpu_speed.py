"""Lines about speed and memory: measurements, with hand-written loops as references where they exist."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from torch.distributed.fsdp import FSDPModule

from benchmarks.gpu_digests import BF16, network, transformer
from benchmarks.gpu_lines import Line, NotYetError, Outcome
from benchmarks.gpu_loops import Clock, bare_loop, plain_ddp
from benchmarks.gpu_models import Dense, resnet
from benchmarks.gpu_workers import Bench
from ray_app.runlog.journal import read_events
from ray_app.testing import WorkerPool
from ray_app.train.job import Hooks, Job

SHARDED: dict[str, Any] = {"train__strategy": "fsdp", "train__reduction": "overlapped"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "local_sgd": {"train__strategy": "local_sgd"},
    "central_storage": {"train__strategy": "central_storage"},
    "fsdp": SHARDED,
    "fsdp, cpu_offload": SHARDED | {"train__cpu_offload": True},
}
MOMENTUM = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01, "momentum": 0.9}}
ADAM = {"optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001, "fused": True}}}


def measure_steps(bench: Bench, pool: WorkerPool, job: Job, size: int = 1) -> tuple[list[float], int]:
    """Trains a run to its end; returns the seconds of its steps after the warm-up, and the peak memory of rank 0's
    device in bytes.
    """
    clock = Clock(str(bench.new("clock")), bench.sizes.warm_up, job.total_steps)
    failed = [
        outcome.trace
        for outcome in bench.outcomes(pool, job, size, hooks=Hooks(after_step=clock))
        if outcome.error is not None
    ]
    if failed:
        raise RuntimeError(failed[0])
    return clock.read()


def steps(bench: Bench) -> dict[str, Any]:
    """Returns the settings for the number of steps: the warm-up and the measured steps."""
    total = bench.sizes.warm_up + bench.sizes.steps
    return {"train__max_steps": total, "train__epochs": 1000, "data__shuffle_window_rows": 10_000}


def memory_of_strategies(bench: Bench) -> Outcome:
    """Measures the peak memory of each strategy: two workers, a dense network with Adam."""
    peak_mb = {}
    for name, fields in STRATEGIES.items():
        if bench.device == "cpu" and fields.get("train__cpu_offload"):
            continue
        # PyTorch before 2.15 lacks this function.
        if name.startswith("fsdp") and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            continue
        job = bench.job(
            Dense(bench.sizes.width // 4), bench.small, logical_workers=2, batch=64, **steps(bench), **ADAM, **fields
        )
        with bench.pool(2) as pool:
            peak_mb[name] = measure_steps(bench, pool, job, 2)[1] / 1e6
    return Outcome(", ".join(f"{name} {mb:,.0f} MB" for name, mb in peak_mb.items()), None, {"peak_mb": peak_mb})


def against_ddp(bench: Bench, reduction: str) -> tuple[float, float, int, int]:
    """Returns seconds of this application and of PyTorch's own DDP, then peak bytes of both: two workers on one device,
    a dense network with Adam.
    """
    task, rows = Dense(bench.sizes.width // 4), 64
    fields = steps(bench) | ADAM | {"train__reduction": reduction}
    with bench.pool(2) as pool:
        times, peak = measure_steps(
            bench, pool, bench.job(task, bench.small, logical_workers=2, batch=2 * rows, **fields), 2
        )
    with bench.pool(2) as pool:
        ddp_s, ddp_bytes = pool.run(2, plain_ddp, task.build_model(), 2, rows, bench.sizes)[0]
    return median(times), ddp_s, peak, ddp_bytes


def memory_against_ddp(bench: Bench) -> Outcome:
    """Checks that exact at W = L uses at most a tenth more memory than DDP."""
    _, _, ours, ddp_bytes = against_ddp(bench, "exact")
    if not ddp_bytes:
        return Outcome("a dry run has no device whose memory could be read")
    text = f"{ours / ddp_bytes:.2f}: {ours / 1e6:,.0f} MB, DDP {ddp_bytes / 1e6:,.0f} MB"
    return Outcome(text, ours <= 1.1 * ddp_bytes, {"ours": ours, "ddp": ddp_bytes})


def step_against_ddp(bench: Bench) -> Outcome:
    """Measures the cost of the exact order and of the overlapped reduction, both through gloo."""
    ratios = {}
    for reduction in ("exact", "overlapped"):
        our_s, ddp_s, _, _ = against_ddp(bench, reduction)
        ratios[reduction] = our_s / ddp_s
    return Outcome(", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()), None, ratios)


def images_per_s(bench: Bench, **fields: Any) -> Outcome:
    """Compares a large ResNet with forward and backward as a CUDA graph to loops that are one graph, in turn.

    The bar is for the loop with deterministic kernels; the other one shows what these cost.
    """
    sizes = bench.sizes
    fields = {"train__capture": bench.device == "cuda", "optimizer": MOMENTUM} | fields
    task = resnet(sizes, "resnet50")
    rates: dict[str, list[float]] = {"ours": [], "deterministic": [], "fast": []}
    for _ in range(sizes.rounds):
        job = bench.job(task, bench.large, logical_workers=1, batch=sizes.large_batch, **(steps(bench) | BF16 | fields))
        with bench.pool(1) as pool:
            rates["ours"].append(sizes.large_batch / median(measure_steps(bench, pool, job)[0]))
        for name in ("deterministic", "fast"):
            with bench.pool(1) as pool:
                [seconds] = pool.run(1, bare_loop, "resnet50", sizes, name == "deterministic")
            rates[name].append(sizes.large_batch / seconds)
    ratio = median(a / b for a, b in zip(rates["ours"], rates["deterministic"], strict=True))
    values = {name: median(values) for name, values in rates.items()}
    text = (
        f"{ratio:.3f}: {values['ours']:,.0f} images/s, bare and deterministic {values['deterministic']:,.0f}, bare and"
        f" fast {values['fast']:,.0f}"
    )
    return Outcome(text, ratio >= 0.97 if bench.device == "cuda" else None, dict(rates))


def captured_step(bench: Bench) -> Outcome:
    """Compares a step of the transformer on a few rows, eager and as a CUDA graph, in turn."""
    if bench.device == "cpu":
        raise NotYetError("a dry run captures nothing")
    times: dict[bool, list[float]] = {False: [], True: []}
    for captures in [False, True] * bench.sizes.rounds:
        job = bench.job(
            transformer(bench), bench.small, logical_workers=1, batch=8, **steps(bench), train__capture=captures
        )
        with bench.pool(1) as pool:
            times[captures].append(median(measure_steps(bench, pool, job)[0]))
    eager_s, captured_s = median(times[False]), median(times[True])
    text = f"{eager_s / captured_s:.2f} times as fast: {captured_s * 1e3:.2f} ms, eager {eager_s * 1e3:.2f} ms"
    return Outcome(
        text,
        eager_s >= 2 * captured_s if eager_s < 5e-3 else None,
        {"eager_s": times[False], "captured_s": times[True]},
    )


def from_parquet(bench: Bench) -> Outcome:
    """Measures images per second with rows that are read and decoded during training."""
    return images_per_s(bench, data__cache="none", data__reader_threads=4)


def recipe(bench: Bench) -> Outcome:
    """Measures an epoch of a ResNet-18 in bf16 over 50,000 images of 32 x 32, in memory."""
    batch = bench.sizes.recipe_batch
    job = bench.job(network(bench), bench.small, logical_workers=1, batch=batch, **(steps(bench) | BF16))
    with bench.pool(1) as pool:
        step_s = median(measure_steps(bench, pool, job)[0])
    rows = job.plan.manifest.num_rows
    return Outcome(f"{step_s * rows / batch:.2f} s per epoch of {rows:,} images", None, {"step_ms": step_s * 1e3})


def stall(bench: Bench) -> Outcome:
    """Measures by how much the step that makes a checkpoint, and the next one, exceed the median step."""
    total = bench.sizes.warm_up + 3 * bench.sizes.steps
    fields = {"train__max_steps": total, "train__epochs": 1000, "checkpoint__every_steps": bench.sizes.steps}
    job = bench.job(Dense(bench.sizes.width), bench.small, logical_workers=1, batch=64, **fields, **ADAM)
    with bench.pool(1) as pool:
        times, _ = measure_steps(bench, pool, job)
    usual = median(times)
    checkpoints = [e.details for e in read_events(job.paths, "checkpointed") if e.details["step"] < total]
    # The first of the measured times belongs to this step.
    first = bench.sizes.warm_up + 1
    over = [
        sum(times[e["step"] - first + i] - usual for i in (0, 1) if e["step"] - first + i < len(times))
        for e in checkpoints
    ]
    newest = sorted(Path(str(job.paths.checkpoints)).iterdir())[-1]
    size = sum(file.stat().st_size for file in newest.iterdir())
    text = f"{median(over) * 1e3:.0f} ms beside a step of {usual * 1e3:.1f} ms, state of {size / 1e6:,.0f} MB"
    return Outcome(text, None, {"stall_ms": [s * 1e3 for s in over], "step_ms": usual * 1e3, "bytes": size})


def trace_of(job: Job) -> list[dict[str, Any]]:
    """Returns the complete events in the trace of a run."""
    [file] = Path(str(job.paths.profile)).iterdir()
    with gzip.open(file) as packed:
        return [event for event in json.load(packed)["traceEvents"] if event.get("ph") == "X"]


def profiled(bench: Bench) -> Outcome:
    """Counts the kernels that a step of the transformer starts, and measures the busy fraction of the device."""
    last = bench.sizes.warm_up + 3
    fields = {"train__max_steps": last, "train__epochs": 1000, "train__profile_steps": [last - 1, last - 1]}
    job = bench.job(transformer(bench), bench.small, logical_workers=1, batch=bench.sizes.digest_batch, **fields)
    with bench.pool(1) as pool:
        bench.trained(pool, job, 1)
    events = trace_of(job)
    kind = "kernel" if bench.device == "cuda" else "cpu_op"
    kernels = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == kind)
    busy, until = 0.0, kernels[0][0]
    for begin, end in kernels:
        busy, until = busy + max(0.0, end - max(begin, until)), max(until, end)
    whole = until - kernels[0][0]
    text = (
        f"{len(kernels)} {'kernels' if bench.device == 'cuda' else 'operators'}, busy {busy / whole:.0%} of"
        f" {whole / 1e3:.1f} ms"
    )
    return Outcome(text, None, {"kernels": len(kernels), "busy": busy / whole, "ms": whole / 1e3})


def line(name: str, look: Callable[[Bench], Outcome], limit_s: float, bar: str = "") -> Line:
    """Makes a line for one GPU."""
    return Line(name, look, limit_s, bar)


LINES = [
    line("memory of each strategy", memory_of_strategies, 60),
    line("memory: exact at W = L / torch's DDP", memory_against_ddp, 30, "at most 1.10"),
    line(
        "ResNet-50, bf16, channels last, batch 256, in memory: images/s / bare loop as a CUDA graph",
        images_per_s,
        90,
        "at least 0.97 of the deterministic loop",
    ),
    line("the same, fed from Parquet", from_parquet, 90, "at least 0.97 of the deterministic loop"),
    line("small step: captured / eager", captured_step, 60, "at least 2 times as fast below 5 ms"),
    line("step on 2 workers: exact, overlapped / plain DDP", step_against_ddp, 40),
    line("recipe of CIFAR-10's size: s per epoch", recipe, 30),
    line("stall of a checkpoint with 1 GB of state", stall, 60),
    line("profile of a step: kernels, gaps", profiled, 30),
]
