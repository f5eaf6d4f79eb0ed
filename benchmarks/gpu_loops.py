"""Hand-written loops, as fast as PyTorch allows, and clocks: the references of the lines about speed and memory."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu_models import CLASSES, Sizes, resnet

_BEFORE_CAPTURE = 3
"""Eager steps before a capture."""


@dataclass(frozen=True)
class Clock:
    """A hook for `Hooks.after_step`: rank 0 notes the end of each step, and the peak memory of its device.

    Args:
        file: File with a JSON line per step: `at_s`, the seconds of all steps from `first` on, and `peak_bytes`, 0
            without a device.
        first: The last step of the warm-up.
        last: The last step.
    """

    file: str
    first: int
    last: int

    def __call__(self, rank: int, step: int) -> None:
        """Called after every step."""
        if rank or step < self.first:
            return
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        if cuda and step in (self.first, self.last):
            torch.cuda.synchronize()
        with Path(self.file).open("a") as file:
            file.write(
                json.dumps(
                    {"at_s": time.perf_counter(), "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0}
                )
                + "\n"
            )

    def read(self) -> tuple[list[float], int]:
        """Returns the seconds of the steps after the warm-up, and the peak memory of the device in bytes."""
        lines = [json.loads(line) for line in Path(self.file).read_text().splitlines()]
        at_s = [line["at_s"] for line in lines]
        return [b - a for a, b in pairwise(at_s)], lines[-1]["peak_bytes"]


def _batches(rows: int, pixels: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Returns eight batches of uint8 images and labels in host memory, pinned for a GPU."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randint(0, 256, (rows, 3, pixels, pixels), dtype=torch.uint8, generator=generator),
            torch.randint(0, CLASSES, (rows,), generator=generator),
        )
        for _ in range(8)
    ]
    return [(x.pin_memory(), y.pin_memory()) for x, y in batches] if device.type == "cuda" else batches


def bare_loop(rank: int, store: Path, name: str, sizes: Sizes, is_deterministic: bool) -> float:
    """Returns the seconds per step of a ResNet in bf16 and channels last with data in pinned memory; on a GPU the whole
    step is one CUDA graph.

    With `is_deterministic` it uses deterministic kernels only, as this application does; otherwise the fastest ones.
    """
    del rank, store
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = not is_deterministic
    torch.use_deterministic_algorithms(is_deterministic)
    torch.set_num_threads(1)
    model = resnet(sizes, name).build_model().to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
    rows, pixels = sizes.large_batch, sizes.large_pixels
    batches = _batches(rows, pixels, device)
    x = torch.zeros(rows, 3, pixels, pixels, dtype=torch.uint8, device=device)
    y = torch.zeros(rows, dtype=torch.int64, device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            outputs = model((x.float() / 255).contiguous(memory_format=torch.channels_last))
            loss = nn.functional.cross_entropy(outputs, y)
        loss.backward()
        optimizer.step()

    run = _captured(step) if device.type == "cuda" else step
    began_s = 0.0
    for i in range(sizes.warm_up + sizes.steps):
        if i == sizes.warm_up:
            _synchronize(device)
            began_s = time.perf_counter()
        images, labels = batches[i % len(batches)]
        x.copy_(images, non_blocking=True)
        y.copy_(labels, non_blocking=True)
        run()
    _synchronize(device)
    return (time.perf_counter() - began_s) / sizes.steps


def _captured(step: Any) -> Any:
    """Returns a step as a CUDA graph, after warm-up steps on a side stream, which PyTorch requires."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(_BEFORE_CAPTURE):
            step()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def plain_ddp(rank: int, store: Path, model: nn.Module, size: int, rows: int, sizes: Sizes) -> tuple[float, int]:
    """Trains with PyTorch's own DDP over gloo with Adam, all processes on the first GPU.

    Returns:
        Seconds per step, and the peak memory of this process on the device in bytes.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(1)
    file_store = dist.FileStore(str(store), size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        wrapped = nn.parallel.DistributedDataParallel(model.to(device))
        optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.001, fused=True)
        batches, began_s = _batches(rows, 32, device), 0.0
        for i in range(sizes.warm_up + sizes.steps):
            if i == sizes.warm_up:
                _synchronize(device)
                began_s = time.perf_counter()
            x, y = (tensor.to(device, non_blocking=True) for tensor in batches[i % len(batches)])
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x.float() / 255), y).backward()
            optimizer.step()
        _synchronize(device)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        return (time.perf_counter() - began_s) / sizes.steps, peak
    finally:
        dist.destroy_process_group()
