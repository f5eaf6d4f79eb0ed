"""Lines about bits: the same for every number of workers, with every option and strategy; the workers share a GPU, through gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu_lines import Found, Line, NotYetError
from benchmarks.gpu_models import Transformer, resnet
from benchmarks.gpu_workers import Bench
from ray_app.task.base import Task

L, STEPS = 4, 4
WORKERS = (1, 2, 4)
BF16 = {"train__precision": "bf16", "train__channels_last": True}


def transformer(bench: Bench) -> Task:
    """With dropout."""
    return Transformer(bench.sizes.patch_width)


def digests(
    bench: Bench, task: Task, workers: tuple[int, ...] = WORKERS, own_gpus: bool = False, logical_workers: int = L, **fields: Any
) -> Found:
    """Whether runs on different numbers of workers end with the same parameters and recorded the same losses and norms of gradients."""
    options = {"train__max_steps": STEPS, "data__global_batch_size": bench.sizes.digest_batch} | fields
    batch = options.pop("data__global_batch_size")
    with bench.pool(max(workers)) as pool:
        found = {
            size: bench.trained(pool, bench.job(task, bench.small, logical_workers=logical_workers, batch=batch, **options), size, own_gpus)
            for size in workers
        }
    said = {size: run.commit.params_digest for size, run in found.items()}
    same = len(set(said.values())) == 1
    steps = [run.steps for run in found.values()]
    if not same:
        text = "digests differ: " + ", ".join(f"W = {size}: {digest[:12]}" for size, digest in said.items())
    elif any(each != steps[0] for each in steps):
        text = "the digests are equal, but recorded losses or norms differ"
    else:
        text = f"W = {', '.join(map(str, workers))}: {said[workers[0]][:12]}"
    return Found(text, same and all(each == steps[0] for each in steps), {"digests": said})


def of(make: Callable[[Bench], Task], **fields: Any) -> Callable[[Bench], Found]:
    """A line that compares digests."""
    return lambda bench: digests(bench, make(bench), **fields)


def _capture(bench: Bench) -> Found:
    raise NotYetError("train.capture, a micro-batch as a CUDA graph, does not exist")


LINES = [
    Line("bits: ResNet-18, batch-norm", of(lambda _: resnet()), 60, "equal"),
    Line("bits: transformer, dropout", of(transformer), 40, "equal"),
    Line("bits: ResNet-18, bf16, channels last", of(lambda _: resnet(), **BF16), 40, "equal"),
    Line("bits: transformer, bf16", of(transformer, train__precision="bf16"), 40, "equal"),
    Line("bits: ResNet-18, fp16", of(lambda _: resnet(), train__precision="fp16"), 40, "equal"),
    Line("bits: transformer, compile", of(transformer, train__compile=True), 90, "equal"),
    Line("bits: capture", _capture, 1, "equal"),
]
