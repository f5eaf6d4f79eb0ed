"""Lines about bit-identity: digests are equal for every number of workers, with every option and strategy; the workers
share a GPU and reduce through gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from benchmarks.gpu_lines import Line, NotYetError, Outcome
from benchmarks.gpu_models import Transformer, resnet
from benchmarks.gpu_workers import Bench
from benchmarks.harness import ROOT
from ray_app import load_config
from ray_app.checkpoint.store import CheckpointStore
from ray_app.runlog.evaluations import read_evaluations
from ray_app.task import environment
from ray_app.task.base import Task
from ray_app.task.detection import ObjectDetection
from ray_app.testing import DieAfter, KilledError
from ray_app.train.job import Hooks
from tests.support.campaign import Campaign
from tests.support.server_world import ServerWorld
from tests.support.shipped_data import write_shipped_data

L = 4
STEPS, DEATHS = 4, 3
WORKERS = (1, 2, 4)
_LEFT_BYTES = 400 << 20
BF16 = {"train__precision": "bf16", "train__channels_last": True}


def transformer(bench: Bench) -> Task:
    """Returns a task with dropout."""
    return Transformer(bench.sizes.patch_width)


def network(bench: Bench) -> Task:
    """Returns a task with batch-norm."""
    return resnet(bench.sizes)


def digests(
    bench: Bench,
    task: Task,
    workers: tuple[int, ...] = WORKERS,
    own_gpus: bool = False,
    data: Path | None = None,
    **fields: Any,
) -> Outcome:
    """Checks that runs on different numbers of workers end with the same parameters and recorded the same losses and
    gradient norms.
    """
    options = {"train__max_steps": STEPS, "data__global_batch_size": bench.sizes.digest_batch} | fields
    batch = options.pop("data__global_batch_size")
    workers = workers if bench.device == "cuda" else workers[:2]
    rows = data or bench.small
    with bench.pool(max(workers)) as pool:
        runs = {
            size: bench.trained(pool, bench.job(task, rows, logical_workers=L, batch=batch, **options), size, own_gpus)
            for size in workers
        }
    digest_by_size = {size: run.commit.params_digest for size, run in runs.items()}
    same = len(set(digest_by_size.values())) == 1
    steps = [run.steps for run in runs.values()]
    if not same:
        text = "digests differ: " + ", ".join(f"W = {size}: {digest[:12]}" for size, digest in digest_by_size.items())
    elif any(run_steps != steps[0] for run_steps in steps):
        text = "the digests are equal, but recorded losses or norms differ"
    else:
        text = f"W = {', '.join(map(str, workers))}: {digest_by_size[workers[0]][:12]}"
    return Outcome(text, same and all(run_steps == steps[0] for run_steps in steps), {"digests": digest_by_size})


class Fill:
    """A hook for `Hooks.at`: fills the device of each worker before its first step, but for some memory.

    Args:
        left_bytes: Memory that stays free.
    """

    def __init__(self, left_bytes: int) -> None:
        self._left_bytes, self._ballast = left_bytes, list[torch.Tensor]()

    def __call__(self, phase: str, rank: int, step: int) -> None:
        """Called at each phase."""
        if not self._ballast and phase == "data":
            free, _ = torch.cuda.mem_get_info()
            self._ballast.append(torch.empty(max(0, free - self._left_bytes), dtype=torch.uint8, device="cuda"))


def nearly_full(bench: Bench) -> Outcome:
    """Compares the digest on a device with a few hundred MB of free memory to the usual one.

    cuDNN tries its algorithms in turn and skips those that lack memory, without a word.
    """
    if bench.device == "cpu":
        raise NotYetError("a dry run has no device whose memory could be filled")
    by_memory = []
    for hooks in (Hooks(), Hooks(at=Fill(_LEFT_BYTES))):
        fields = {"logical_workers": L, "batch": bench.sizes.digest_batch, "train__max_steps": STEPS}
        with bench.pool(1) as pool:
            run = bench.trained(pool, bench.job(network(bench), bench.small, **fields), 1, hooks=hooks)
        by_memory.append(run.commit.params_digest)
    text = f"with {_LEFT_BYTES / 1e6:,.0f} MB of free memory {by_memory[1][:12]}, else {by_memory[0][:12]}"
    return Outcome(text, by_memory[0] == by_memory[1], {"digests": by_memory})


def compare_digests(make: Callable[[Bench], Task], **fields: Any) -> Callable[[Bench], Outcome]:
    """Returns the function of a line that compares digests."""
    return lambda bench: digests(bench, make(bench), **fields)


def format_losses(losses: list[float]) -> str:
    """Formats losses for a reader, so that implausible ones show; the check compares them exactly."""
    return " and ".join(f"{loss:.4f}" for loss in losses)


def resumed(bench: Bench) -> Outcome:
    """Compares a run on one worker that breaks after its checkpoint and continues with two to an undisturbed run."""
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
    losses = [[evaluation.metrics["loss"] for evaluation in read_evaluations(job.paths)] for job in jobs]
    same = (
        digests[0] == digests[1]
        and whole.steps == rest.steps
        and losses[0] == losses[1]
        and len(losses[0]) == STEPS // 2
    )
    text = f"W = 1 to step {step}, then 2: {digests[1][:12]}, undisturbed {digests[0][:12]}"
    text += f"; losses of evaluations {format_losses(losses[1])}, {format_losses(losses[0])}"
    return Outcome(text, same, {"digests": digests})


def killed(bench: Bench) -> Outcome:
    """Compares a run with two workers that are killed repeatedly, each time in another phase of a step, to an
    undisturbed run.
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
    deaths, digest = campaign.deaths.total(), CheckpointStore(jobs[1].paths).commits()[-1].params_digest
    same = digest == whole.commit.params_digest and deaths > 0
    return Outcome(
        f"{deaths} deaths: {digest[:12]}, undisturbed {whole.commit.params_digest[:12]}",
        same,
        {"deaths": dict(campaign.deaths)},
    )


def served(bench: Bench) -> Outcome:
    """Compares one worker to two that alternate, with parameter servers in host memory, in one process."""
    fields = {"train__strategy": "parameter_server", "train__servers": 2, "train__max_steps": STEPS}
    digests = {}
    for workers in (1, 2):
        job = bench.job(transformer(bench), bench.small, logical_workers=L, batch=bench.sizes.digest_batch, **fields)
        environment.set_up_torch(job.config, bench.first)
        ServerWorld(job, workers, device=bench.first).run()
        digests[workers] = CheckpointStore(job.paths).commits()[-1].params_digest
    same = len(set(digests.values())) == 1
    return Outcome(
        ", ".join(f"W = {size}: {digest[:12]}" for size, digest in digests.items()), same, {"digests": digests}
    )


def sharded(bench: Bench, **fields: Any) -> Outcome:
    """Compares digests with `fsdp`, which adds shards in the fixed tree."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise NotYetError(f"fsdp needs PyTorch 2.15, this is {torch.__version__}")
    return digests(bench, transformer(bench), train__strategy="fsdp", **fields)


def fsdp_offloaded(bench: Bench) -> Outcome:
    """Compares digests with `fsdp` and shards and updates in host memory."""
    if bench.device == "cpu":
        raise NotYetError("a dry run has no device that shards could leave")
    return sharded(bench, train__cpu_offload=True)


def captured(bench: Bench) -> Outcome:
    """Compares both networks as CUDA graphs, on different numbers of workers, to eager steps."""
    if bench.device == "cpu":
        raise NotYetError(
            "a dry run captures nothing; tests/processes/train/step/test_cuda_graphs.py looks at a stand-in"
        )
    texts, same = [], True
    digests_by_model = {}
    options: dict[str, Any] = {"transformer": {}, "network": BF16}
    for make in (transformer, network):
        fields = options[make.__name__]
        [eager] = digests(bench, make(bench), (1,), **fields).figures["digests"].values()
        outcome = digests(bench, make(bench), train__capture=True, **fields)
        digests_by_model[make.__name__] = outcome.figures["digests"] | {"eager": eager}
        same &= bool(outcome.passed) and set(outcome.figures["digests"].values()) == {eager}
        texts.append(f"{make.__name__}: {outcome.text}, eager {eager[:12]}")
    return Outcome("; ".join(texts), same, {"digests": digests_by_model})


def detected(bench: Bench) -> Outcome:
    """Compares digests of a detector: PyTorch would compile its RoIAlign for the first shapes, and these depend on the
    number of workers.
    """
    detector = load_config(ROOT / "conf" / "detection.yaml").task.init_args["detector"]
    data = write_shipped_data("detection", bench.new("shapes"))
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.0005}}
    return digests(
        bench, ObjectDetection(detector), data=data, data__global_batch_size=8, optimizer=optimizer, train__epochs=10
    )


def nccl(bench: Bench) -> Outcome:
    """Compares digests of as many workers as there are GPUs, and of fewer."""
    return digests(bench, network(bench), tuple(size for size in WORKERS if size <= bench.gpus), own_gpus=True)


LINES = [
    Line("bits: ResNet-18, batch-norm", compare_digests(network), 60, "equal"),
    Line("bits: transformer, dropout", compare_digests(transformer), 40, "equal"),
    Line("bits: ResNet-18, bf16, channels last", compare_digests(network, **BF16), 40, "equal"),
    Line("bits: ResNet-18 on a device that is nearly full", nearly_full, 30, "equal"),
    Line("bits: transformer, bf16", compare_digests(transformer, train__precision="bf16"), 40, "equal"),
    Line("bits: ResNet-18, fp16", compare_digests(network, train__precision="fp16"), 40, "equal"),
    Line("bits: detection, RoIAlign", detected, 60, "equal"),
    Line("bits: transformer, compile", compare_digests(transformer, train__compile=True), 90, "equal"),
    Line("bits: capture", captured, 60, "equal"),
    Line("bits: checkpoint, resume at another W", resumed, 40, "equal"),
    Line(
        "bits: local_sgd, 2 local steps",
        compare_digests(transformer, train__strategy="local_sgd", train__local_steps=2),
        40,
        "equal",
    ),
    Line("bits: fsdp", sharded, 40, "equal"),
    Line("bits: fsdp, cpu_offload", fsdp_offloaded, 40, "equal"),
    Line("bits: central_storage", compare_digests(transformer, train__strategy="central_storage"), 40, "equal"),
    Line("SIGKILL of a worker, in place", killed, 60, "equal digest"),
    Line("bits: parameter_server", served, 40, "equal"),
    Line("bits: NCCL, a GPU each", nccl, 60, "equal", gpus=2),
]
