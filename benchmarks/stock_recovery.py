"""The other sides of `recovery.py`: the same network, rows and steps under stock Ray Train, and under torchrun.

Both run a hand-written loop: DDP, a checkpoint of model and optimizer every 200 steps, which a restarted group loads.
Stock Ray Train reports it with `ray.train.report`; all its settings are the defaults, but for an unlimited number of
failures.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.disturb import BATCH, CHECKPOINT_EVERY, Disturber, Scenario, StepLog, start_nodes

State = dict[str, Any]


def make_rows(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns pixels (rows, 28, 28) uint8 and labels (rows,) int64."""
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (rows, 28, 28), dtype=np.uint8), generator.integers(0, 10, rows)


def train_forever(
    folder: str, rank: int, workers: int, load: Callable[[], State | None], save: Callable[[State], None]
) -> None:
    """Runs the loop of one worker until its process ends."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.load(Path(folder) / "rows.npz") as data:
        features = torch.from_numpy(data["x"]).reshape(-1, 784).float() / 255
        labels = torch.from_numpy(data["y"])
    net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    step, log = 0, StepLog(folder)
    per_epoch = len(labels) // BATCH
    order: torch.Tensor | None = None
    state = load()
    if state is not None:
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        if order is None or step % per_epoch == 0:
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step // per_epoch))
        batch_rows = order[step % per_epoch * BATCH :][:BATCH][rank::workers]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features[batch_rows]), labels[batch_rows])
        loss.backward()
        optimizer.step()
        loss.item()
        step += 1
        log(rank, step)
        if step % CHECKPOINT_EVERY == 0:
            save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step})


def ray_worker(config: dict[str, Any]) -> None:
    """Runs the loop as a worker of Ray Train."""
    import ray.train
    import torch

    context = ray.train.get_context()
    rank = context.get_world_rank()

    def load() -> State | None:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return None
        with checkpoint.as_directory() as folder:
            return torch.load(Path(folder) / "state.pt")

    def save(state: State) -> None:
        if rank != 0:
            ray.train.report({})
            return
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, Path(folder) / "state.pt")
            ray.train.report({"step": state["step"]}, checkpoint=ray.train.Checkpoint.from_directory(folder))

    train_forever(config["folder"], rank, context.get_world_size(), load, save)


def run_ray(scenario: Scenario, folder: Path, done: Callable[[Disturber], None]) -> None:
    """Runs and disturbs stock Ray Train in this process; calls `done` before the shutdown, which may fail because of
    `fit` in its thread.
    """
    import logging

    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    # The loop reads in the workers, so the head needs no CPU.
    cluster = start_nodes(scenario, head_cpus=0)
    if cluster is not None:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    else:
        ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    min_workers, max_workers = scenario.workers
    trainer = TorchTrainer(
        ray_worker,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(
            num_workers=max_workers if min_workers == max_workers else (min_workers, max_workers),
            resources_per_worker={"CPU": 1},
        ),
        run_config=RunConfig(
            name="stock",
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=-1, max_preemption_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    disturber = Disturber(scenario, folder, cluster)
    thread = threading.Thread(target=trainer.fit, daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not disturber.poll():
            time.sleep(0.25)
        if not thread.is_alive():
            raise RuntimeError("the stock run ended by itself")
        done(disturber)
    finally:
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()


def torchrun_worker(folder: str) -> None:
    """Runs the loop as a worker of torchrun."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    path = Path(folder) / "state.pt"

    def load() -> State | None:
        return torch.load(path) if path.exists() else None

    def save(state: State) -> None:
        if dist.get_rank() == 0:
            torch.save(state, f"{path}.new")
            os.replace(f"{path}.new", path)

    train_forever(folder, dist.get_rank(), dist.get_world_size(), load, save)


def run_torchrun(scenario: Scenario, folder: Path, done: Callable[[Disturber], None]) -> None:
    """Runs and disturbs the loop under torchrun."""
    import subprocess

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(scenario.before),
        "--master_port",
        str(port),
    ]
    with (folder / "torchrun.log").open("w") as log:
        launcher = subprocess.Popen([*command, "--max-restarts", "100", __file__, str(folder)], stdout=log, stderr=log)
        disturber = Disturber(scenario, folder)
        try:
            while launcher.poll() is None and not disturber.poll():
                time.sleep(0.25)
            if launcher.returncode is not None:
                raise RuntimeError((folder / "torchrun.log").read_text()[-4000:])
            done(disturber)
        finally:
            launcher.terminate()
            launcher.wait()


if __name__ == "__main__":
    torchrun_worker(sys.argv[1])
