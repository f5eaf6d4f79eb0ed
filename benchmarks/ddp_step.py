"""Two workers, a network of 11 million parameters: time per step against a hand-written loop started by torchrun.

ResNet-18 on 32x32 images, 32 rows per worker, gloo, one thread per worker. The loop is one with PyTorch's DDP, or with
`--strategy fsdp` one with its FSDP2 and the same units as ours.

python benchmarks/ddp_step.py              # needs a quiet machine; about 10 minutes
python benchmarks/ddp_step.py --strategy fsdp --rounds 2
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.harness import Sample, Stopwatch, alternate, ingest_rows, report, run_side

ROWS, ROWS_PER_WORKER = 2048, 32
WORKERS = 2
WARM_UP, STEPS = 5, 65


def make_rows() -> tuple[np.ndarray, np.ndarray]:
    """Returns pixels (rows, 32, 32, 3) uint8 and labels (rows,) int64."""
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (ROWS, 32, 32, 3), dtype=np.uint8), generator.integers(0, 10, ROWS)


def hand_written(strategy: str) -> None:
    """Trains by a hand-written loop with DDP or FSDP2, the base of all ratios."""
    import torch
    import torch.distributed as dist
    import torchvision
    from torch import nn

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pixels, labels = make_rows()
    shard = slice(rank, None, WORKERS)
    images = torch.from_numpy(pixels[shard]).permute(0, 3, 1, 2).contiguous().float() / 255
    batches = list(
        zip(images.split(ROWS_PER_WORKER), torch.from_numpy(labels[shard]).split(ROWS_PER_WORKER), strict=True)
    )
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.resnet18(num_classes=10)
    if strategy == "fsdp":
        from torch.distributed.fsdp import FSDPModule, fully_shard

        from ray_app.task.image import ImageClassification

        for unit in [*ImageClassification("resnet18").shard_units(model), model]:
            fully_shard(unit)
            assert isinstance(unit, FSDPModule)
            # gloo has no reduction that averages.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    # The fused kernel of SGD does not accept the sharded parameters of FSDP2.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=strategy == "ddp")
    for step in range(STEPS):
        if step == WARM_UP:
            wall, cpu = time.perf_counter(), time.process_time()
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        loss.item()
    spent = torch.tensor([time.process_time() - cpu])
    wall_s = time.perf_counter() - wall
    dist.all_reduce(spent)
    if rank == 0:
        print(wall_s / (STEPS - WARM_UP) * 1e3, spent.item() / (STEPS - WARM_UP) * 1e3)
    dist.destroy_process_group()


def torchrun(strategy: str) -> Sample:
    """Starts the hand-written loop."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(WORKERS),
        "--master_port",
        str(port),
    ]
    return run_side([*launcher, __file__, "--side", strategy])


class Ours:
    """Runs of the application on one local Ray cluster."""

    def __init__(self, folder: Path, strategy: str) -> None:
        ingest_rows(folder, *make_rows())
        self._folder, self._strategy = folder, strategy
        self._number = 0

    def measure(self, reduction: str) -> Sample:
        """Trains with 2 workers, each with one logical worker; returns the time of a step."""
        from rich.console import Console

        from ray_app import load_config, run_training
        from ray_app.driver.run import Faults
        from ray_app.train.job import Hooks

        self._number += 1
        watch = Stopwatch(str(self._folder / f"watch-{self._number}"), WARM_UP, STEPS)
        config = load_config(
            task__class_path="ray_app.task.image.ImageClassification",
            task__init_args__model="resnet18",
            optimizer__class_path="torch.optim.SGD",
            optimizer__init_args__lr=0.05,
            optimizer__init_args__momentum=0.9,
            run__storage_path=str(self._folder / "runs"),
            run__name=f"run-{self._number}",
            data__path=str(self._folder / "rows"),
            data__cache="memory",
            data__global_batch_size=WORKERS * ROWS_PER_WORKER,
            scaling__min_workers=WORKERS,
            scaling__max_workers=WORKERS,
            train__strategy=self._strategy,
            train__reduction=reduction,
            train__epochs=3,
            train__max_steps=STEPS,
            tracking__enabled=False,
        )
        run_training(config, Console(quiet=True), Faults(train=Hooks(after_step=watch)))
        return watch.sample(WORKERS)


def main() -> None:
    """Measures all sides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--side", choices=["ddp", "fsdp"], help="for the processes of torchrun")
    options = parser.parse_args()
    strategy = options.strategy
    if options.side:
        hand_written(options.side)
        return
    import logging

    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(Path(folder), strategy)
        sides = {
            f"hand-written {'FSDP2' if strategy == 'fsdp' else 'DDP'}": lambda: torchrun(strategy),
            "overlapped": lambda: ours.measure("overlapped"),
            "exact": lambda: ours.measure("exact"),
        }
        samples = alternate(sides, options.rounds)
    report(
        f"Time per step, ResNet-18 on 32x32 images, 2 workers of one thread{', fsdp' * (strategy == 'fsdp')}",
        samples,
        {"overlapped": 1.05} if strategy == "fsdp" else {"overlapped": 1.03, "exact": 1.10},
    )
    ray.shutdown()


if __name__ == "__main__":
    main()
