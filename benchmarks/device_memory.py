"""Device memory of `ddp` and of the strategies that save memory: three steps of a dense network with Adam on one
worker.

python benchmarks/device_memory.py     # seconds

On a GPU the peak of allocated memory; `fsdp` on one worker has all shards, so its gain is that of `cpu_offload`.
Without a GPU it adds up the bytes of the tensors that a device would hold between two steps: parameters, gradients,
optimizer state.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import nn

from ray_app.config.config import Config
from ray_app.data.windows import MicroBatch
from ray_app.plan.order import Cursor
from ray_app.reduction.world import World
from ray_app.task.image import ImageClassification
from ray_app.train.build import build_state, build_step
from ray_app.train.membership import Flags
from ray_app.train.state.state import TrainingState

ROWS, PIXELS = 32, 32
SIDES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "central_storage": {},
    "fsdp": {},
    "fsdp, offloaded": {"train__cpu_offload": True},
}


class Dense(ImageClassification):
    """A dense network of about 40 million parameters."""

    def build_model(self) -> nn.Module:
        """See `Task.build_model`."""
        layers = [layer for _ in range(4) for layer in (nn.Linear(3072, 3072), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(3072, 10))


def measure(side: str, device: torch.device) -> float:
    """Returns the megabytes that the device uses with a strategy."""
    config = Config().replace(train__strategy=side.partition(",")[0], **SIDES[side])
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    task, world = Dense(), World(0, 1, 1)
    state = build_state(config, task, device, 10)
    job: Any = SimpleNamespace(config=config, task=task, total_steps=10, steps_per_epoch=10)
    with state.backend.bind(world):
        state.backend.share(world, lambda: setattr(state, "step", 0))
        step = build_step(job, state, world, device)
        for i in range(3):
            fields = {
                "image": torch.rand(ROWS, 3, PIXELS, PIXELS, device=device),
                "label": torch.zeros(ROWS, dtype=torch.int64, device=device),
            }
            batch = MicroBatch(0, ROWS, fields, torch.arange(ROWS), 0, np.arange(ROWS))
            step.run(Cursor(0, i), [batch], ROWS, Flags(0))
        used_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _count_bytes(state)
    return used_bytes / 1e6


def _count_bytes(state: TrainingState) -> int:
    """Returns the bytes of parameters and gradients, and of the optimizer's state if it is on the same device."""
    tensors = [t for p in state.model.parameters() for t in (p, p.grad) if t is not None]
    if state.master is state.model:
        tensors += [v for values in state.optimizer.state.values() for v in values.values()]
    return sum(t.nbytes for t in tensors)


def main() -> None:
    """Prints a line of JSON for each side."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    sides = list(SIDES)
    if device.type == "cpu":
        print(
            "There is no GPU here: the bytes of tensors are added up, and cpu_offload, which would change where they"
            " are, is left out."
        )
        sides.remove("fsdp, offloaded")
    for side in sides:
        print(
            json.dumps({"strategy": side, "device": device.type, "device_mb": round(measure(side, device), 1)}),
            flush=True,
        )


if __name__ == "__main__":
    main()
