"""A model with a state that is larger than the memory limit of each process trains with `fsdp`, through losses."""

import ctypes
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from torch import nn

from ray_app.checkpoint.format import params_digest
from ray_app.checkpoint.store import CheckpointStore
from ray_app.drill.faults import HookChain
from ray_app.errors import PeerLostError
from ray_app.models.export import write_parameters
from ray_app.runlog.journal import read_events
from ray_app.testing import DieAfter, KilledError, WorkerPool, cache_windows, read_trained_run, train_rank
from ray_app.train.job import Hooks, Job
from ray_app.train.process_group import FileStoreMembership
from tests.support.local_world import CLASSES, TinyImages
from tests.support.sharded import committed_before, fsdp_job

WIDTH, LAYERS = 2048, 10
STATE_BYTES = 4 * LAYERS * WIDTH * WIDTH * 4
"""Parameters, their average, and two moments of Adam."""
_M_MMAP_THRESHOLD = -3


class WideImages(TinyImages):
    """A task with a model of several large layers."""

    def build_model(self) -> nn.Module:
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), *layers, nn.Linear(WIDTH, CLASSES))


def run_limited(rank: int, store: Path, limit_bytes: int, run: Callable[..., Any], *args: Any) -> None:
    """Calls a function in a process that can allocate only so many bytes more than it has now (`RLIMIT_DATA`)."""
    # Otherwise freed tensors would stay allocated, since the allocator takes larger ones from its heap with time.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    lines = Path("/proc/self/status").read_text().splitlines()
    base_bytes = next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (base_bytes + limit_bytes, resource.RLIM_INFINITY))
    run(rank, store, *args)


def export_parts(rank: int, store: Path, job: Job, folder: Path) -> None:
    """Exports the newest checkpoint in files that are smaller than the model."""
    checkpoints = CheckpointStore(job.paths)
    model: Any = checkpoints.open_verified(checkpoints.commits()[-1]).model
    write_parameters(model, folder, {"run": "run"}, STATE_BYTES // 12)


def budget(size: int) -> int:
    """Returns the bytes for the shards of a worker, the norm of their gradients, and the copy for a checkpoint."""
    return (38 if size == 4 else 48) * STATE_BYTES // (10 * size)


def wide_job(folder: Path, data: Path, **fields: Any) -> Job:
    optimizer = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001}}
    steps = {"train__max_steps": 6, "checkpoint__every_steps": 2}
    return fsdp_job(folder, data, WideImages(), optimizer=optimizer, train__ema_decay=0.9, **steps, **fields)


@pytest.mark.rest
def test_a_state_larger_than_the_memory_of_each_process_is_trained(
    data: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of four workers one is killed, three continue with more memory for larger shards, and two without a limit."""
    assert budget(4) < STATE_BYTES
    job = wide_job(tmp_path / "run", data)
    kill = HookChain((committed_before(job, 3, step=2), DieAfter(3, killed=1)))
    stop = HookChain((committed_before(job, 5, step=4), DieAfter(5)))
    with WorkerPool(4, tmp_path) as pool:
        # This imports what a training needs.
        pool.train_to_end(fsdp_job(tmp_path / "first", data, train__max_steps=1), 4, cache_windows)
        plain = pool.train_new_run(wide_job(tmp_path / "plain", data, train__strategy="ddp"), 1, cache_windows)
        for size, hook in ((4, kill), (3, stop)):
            args = job, size, Hooks(after_step=hook), cache_windows, FileStoreMembership
            ends = pool.call(size, run_limited, budget(size), train_rank, *args)
            trace = "\n".join(end.trace for end in ends)
            assert {type(end.error) for end in ends} <= {KilledError, PeerLostError}, trace
    with WorkerPool(2, tmp_path_factory.mktemp("pool")) as pool:
        pool.train_to_end(job, 2, cache_windows)
        pool.run(1, run_limited, STATE_BYTES // 4, export_parts, job, tmp_path / "out")
    assert [e.details["step"] for e in read_events(job.paths, "resumed")] == [2, 4]
    run, exported = read_trained_run(job), dict[str, Any]()
    for name in set(json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"].values()):
        exported |= safetensors.torch.load_file(tmp_path / "out" / name)
    assert params_digest(exported) == plain.commit.params_digest
    assert [set(workers) for workers in run.workers] == [{4}] * 2 + [{4, 3}] + [{3}] + [{3, 2}] + [{2}]
    assert run.commit.params_digest == plain.commit.params_digest
