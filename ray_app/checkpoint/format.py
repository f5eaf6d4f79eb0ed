"""A snapshot as files, and back: safetensors for the model, torch's zip format without pickled code for the rest."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ray_app.errors import CheckpointError

MODEL, TRAINING = "model.safetensors", "training.pt"


@dataclass(frozen=True)
class Snapshot:
    """The training state at a step boundary, in memory of its own.

    Args:
        step: Finished steps.
        model: Parameters and persistent buffers by name, on the CPU.
        optimizer: State of the optimizer.
        schedule: State of the learning-rate schedule, if there is one.
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    schedule: dict[str, Any] | None


def pack(snapshot: Snapshot) -> dict[str, bytes]:
    """The files of a snapshot by name."""
    rest = io.BytesIO()
    torch.save({"step": snapshot.step, "optimizer": snapshot.optimizer, "schedule": snapshot.schedule}, rest)
    return {MODEL: safetensors.torch.save(snapshot.model), TRAINING: rest.getvalue()}


def unpack(files: dict[str, bytes]) -> Snapshot:
    """Reads what `pack` wrote; nothing is unpickled that could run code.

    Raises:
        CheckpointError: The files hold something else, such as pickled code, which is not run.
    """
    try:
        rest = torch.load(io.BytesIO(files[TRAINING]), weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{TRAINING} is refused: {error}") from error
    return Snapshot(rest["step"], unpack_model(files), rest["optimizer"], rest["schedule"])


def unpack_model(files: dict[str, bytes]) -> dict[str, Tensor]:
    """The parameters and persistent buffers alone."""
    return safetensors.torch.load(files[MODEL])


def params_digest(model: dict[str, Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor, sorted by name."""
    sha = hashlib.sha256()
    for name, tensor in sorted(model.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
