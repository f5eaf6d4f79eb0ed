"""Lines about bits: the same for every number of workers, with every option and strategy; the workers share a GPU,
through gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from benchmarks.gpu_lines import Found, Line, NotYetError
from benchmarks.gpu_models import Transformer, resnet
from benchmarks.gpu_workers import Bench
from benchmarks.harness import ROOT
from ray_app import load_config
from ray_app.checkpoint.store import CheckpointStore
from ray_app.runlog.evaluations import read_evaluations
from ray_app.task import device
from ray_app.task.base import Task
from ray_app.task.detection import ObjectDetection
from ray_app.testing import DieAfter, KilledError
from ray_app.train.job import Hooks
from tests.support.campaign import Campaign
from tests.support.server_world import World as ServedWorld
from tests.support.shipped_data import write_shipped_data

L, STEPS, DEATHS = 4, 4, 3
WORKERS = (1, 2, 4)
BF16 = {"train__precision": "bf16", "train__channels_last": True}


def transformer(bench: Bench) -> Task:
    """With dropout."""
    return Transformer(bench.sizes.patch_width)


def network(bench: Bench) -> Task:
    """With batch-norm."""
    return resnet(bench.sizes)


def digests(
    bench: Bench,
    task: Task,
    workers: tuple[int, ...] = WORKERS,
    own_gpus: bool = False,
    data: Path | None = None,
    **fields: Any,
) -> Found:
    """Whether runs on different numbers of workers end with the same parameters and recorded the same losses and norms
    of gradients.
    """
    options = {"train__max_steps": STEPS, "data__global_batch_size": bench.sizes.digest_batch} | fields
    batch = options.pop("data__global_batch_size")
    workers = workers if bench.device == "cuda" else workers[:2]
    rows = data or bench.small
    with bench.pool(max(workers)) as pool:
        found = {
            size: bench.trained(pool, bench.job(task, rows, logical_workers=L, batch=batch, **options), size, own_gpus)
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


def shown(losses: list[float]) -> str:
    """Losses for people, who see whether they are plausible; their bits are compared elsewhere."""
    return " and ".join(f"{loss:.4f}" for loss in losses)


def resumed(bench: Bench) -> Found:
    """A run on one worker that breaks after its checkpoint and goes on with two, against one that is not disturbed."""
    fields: dict[str, Any] = {"train__max_steps": STEPS, "checkpoint__every_steps": 2}
    fields |= {"data__eval_path": str(bench.few), "evaluate__where": "workers"}
    jobs = [
        bench.job(network(bench), bench.small, logical_workers=L, batch=bench.sizes.digest_batch, **fields)
        for _ in range(2)
    ]
    with bench.pool(2) as pool:
        whole = bench.trained(pool, jobs[0], 1)
        [broken] = bench.outcomes(pool, jobs[1], 1, hooks=Hooks(after_step=DieAfter(3)))
        if not isinstance(broken.error, KilledError):
            raise RuntimeError(f"the run was to break after step 3, but {broken.trace or 'it ended'}")
        step = CheckpointStore(jobs[1].paths).commits()[-1].step
        rest = bench.trained(pool, jobs[1], 2)
    digests = [whole.commit.params_digest, rest.commit.params_digest]
    if step != 2 or rest.workers[-1] != [2]:
        raise RuntimeError(f"the run was to go on from step 2 on 2 workers; it did from {step} on {rest.workers[-1]}")
    losses = [[each.metrics["loss"] for each in read_evaluations(job.paths)] for job in jobs]
    same = (
        digests[0] == digests[1]
        and whole.steps == rest.steps
        and losses[0] == losses[1]
        and len(losses[0]) == STEPS // 2
    )
    said = f"W = 1 to step {step}, then 2: {digests[1][:12]}, undisturbed {digests[0][:12]}"
    said += f"; losses of evaluations {shown(losses[1])}, {shown(losses[0])}"
    return Found(said, same, {"digests": digests})


def killed(bench: Bench) -> Found:
    """Two workers that are killed again and again, each time in another phase of a step, against a run that is not
    disturbed.
    """
    fields = {"train__max_steps": 12, "train__epochs": 10, "checkpoint__every_steps": 4}
    jobs = [
        bench.job(network(bench), bench.small, logical_workers=2, batch=bench.sizes.digest_batch, **fields)
        for _ in range(2)
    ]
    with bench.pool(1) as pool:
        whole = bench.trained(pool, jobs[0], 1)
    campaign = Campaign(bench.new("kills"), 0, jobs[1], 2, device=bench.first)
    campaign.run(DEATHS)
    deaths, digest = campaign.fired.total(), CheckpointStore(jobs[1].paths).commits()[-1].params_digest
    same = digest == whole.commit.params_digest and deaths > 0
    return Found(
        f"{deaths} deaths: {digest[:12]}, undisturbed {whole.commit.params_digest[:12]}",
        same,
        {"deaths": dict(campaign.fired)},
    )


def served(bench: Bench) -> Found:
    """Parameter servers in host memory, one worker and two that take turns, in one process."""
    fields = {"train__strategy": "parameter_server", "train__servers": 2, "train__max_steps": STEPS}
    digests = {}
    for workers in (1, 2):
        job = bench.job(transformer(bench), bench.small, logical_workers=L, batch=bench.sizes.digest_batch, **fields)
        device.set_up_torch(job.config, bench.first)
        ServedWorld(job, workers, device=bench.first).run()
        digests[workers] = CheckpointStore(job.paths).commits()[-1].params_digest
    same = len(set(digests.values())) == 1
    return Found(
        ", ".join(f"W = {size}: {digest[:12]}" for size, digest in digests.items()), same, {"digests": digests}
    )


def sharded(bench: Bench, **fields: Any) -> Found:
    """Shards, added in the fixed tree."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise NotYetError(f"fsdp needs PyTorch 2.15, this is {torch.__version__}")
    return digests(bench, transformer(bench), train__strategy="fsdp", **fields)


def fsdp_offloaded(bench: Bench) -> Found:
    """Shards and updates in host memory."""
    if bench.device == "cpu":
        raise NotYetError("a dry run has no device that shards could leave")
    return sharded(bench, train__cpu_offload=True)


def captured(bench: Bench) -> Found:
    """Both networks as CUDA graphs, on other numbers of workers, against eager steps."""
    if bench.device == "cpu":
        raise NotYetError(
            "a dry run captures nothing; tests/processes/train/step/test_cuda_graphs.py looks at a stand-in"
        )
    said, same, told = [], True, {}
    options: dict[str, Any] = {"transformer": {}, "network": BF16}
    for make in (transformer, network):
        fields = options[make.__name__]
        [eager] = digests(bench, make(bench), (1,), **fields).figures["digests"].values()
        found = digests(bench, make(bench), train__capture=True, **fields)
        told[make.__name__] = found.figures["digests"] | {"eager": eager}
        same &= bool(found.passed) and set(found.figures["digests"].values()) == {eager}
        said.append(f"{make.__name__}: {found.said}, eager {eager[:12]}")
    return Found("; ".join(said), same, {"digests": told})


def detected(bench: Bench) -> Found:
    """A detector, whose RoIAlign PyTorch would compile by the shapes that come first; each number of workers sees other
    ones first.
    """
    detector = load_config(ROOT / "conf" / "detection.yaml").task.init_args["detector"]
    data = write_shipped_data("detection", bench.new("shapes"))
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.0005}}
    return digests(
        bench, ObjectDetection(detector), data=data, data__global_batch_size=8, optimizer=optimizer, train__epochs=10
    )


def nccl(bench: Bench) -> Found:
    """As many workers as there are GPUs, and fewer."""
    return digests(bench, network(bench), tuple(size for size in WORKERS if size <= bench.gpus), own_gpus=True)


LINES = [
    Line("bits: ResNet-18, batch-norm", of(network), 60, "equal"),
    Line("bits: transformer, dropout", of(transformer), 40, "equal"),
    Line("bits: ResNet-18, bf16, channels last", of(network, **BF16), 40, "equal"),
    Line("bits: transformer, bf16", of(transformer, train__precision="bf16"), 40, "equal"),
    Line("bits: ResNet-18, fp16", of(network, train__precision="fp16"), 40, "equal"),
    Line("bits: detection, RoIAlign", detected, 60, "equal"),
    Line("bits: transformer, compile", of(transformer, train__compile=True), 90, "equal"),
    Line("bits: capture", captured, 60, "equal"),
    Line("bits: checkpoint, resume at another W", resumed, 40, "equal"),
    Line(
        "bits: local_sgd, 2 local steps",
        of(transformer, train__strategy="local_sgd", train__local_steps=2),
        40,
        "equal",
    ),
    Line("bits: fsdp", sharded, 40, "equal"),
    Line("bits: fsdp, cpu_offload", fsdp_offloaded, 40, "equal"),
    Line("bits: central_storage", of(transformer, train__strategy="central_storage"), 40, "equal"),
    Line("SIGKILL of a worker, in place", killed, 60, "equal digest"),
    Line("bits: parameter_server", served, 40, "equal"),
    Line("bits: NCCL, a GPU each", nccl, 60, "equal", gpus=2),
]
