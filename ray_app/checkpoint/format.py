"""Converts snapshots to files and back.

The model is written as safetensors, and the rest by `torch.save` in a format that is read without running pickled code.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass, field
from typing import IO, Any

import safetensors.torch
import torch
from torch import Tensor

from ray_app.errors import CheckpointError
from ray_app.storage.files import Content, render_content

MODEL, TRAINING = "model.safetensors", "training.pt"


@dataclass(frozen=True)
class Snapshot:
    """A copy of the training state at a step boundary, in host memory that training does not change.

    Args:
        step: Number of finished steps.
        model: Parameters and persistent buffers of the model that training returns, by name.
        schedule: State of the learning-rate schedule; None without one.
        extra_state: Other state that a resume needs: the trained parameters if `model` has their average, the scale of
            the loss, and the outer optimizer of `local_sgd`. Files have it under the key `more`.
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    schedule: dict[str, Any] | None
    extra_state: dict[str, Any] = field(default_factory=dict)


def file_writers(snapshot: Snapshot) -> dict[str, Content]:
    """Returns functions, by file name, that write the files of a snapshot directly from its memory.

    They copy nothing and do not hold the GIL for long, so that training goes on in another thread.
    """
    rest = {
        "step": snapshot.step,
        "optimizer": snapshot.optimizer,
        "schedule": snapshot.schedule,
        "more": snapshot.extra_state,
    }
    return {MODEL: lambda file: _write_model(snapshot.model, file), TRAINING: lambda file: _write_rest(rest, file)}


def pack(snapshot: Snapshot) -> dict[str, bytes]:
    """Returns the contents of a snapshot's files by name."""
    return {name: render_content(content) for name, content in file_writers(snapshot).items()}


def _write_rest(rest: dict[str, Any], file: IO[bytes]) -> None:
    """Writes everything except the model by `torch.save`, without the CRC-32 of zip files.

    It would be computed under the GIL, and `COMMIT.json` has the SHA-256 of the file.
    """
    # torch keeps this option per thread (torch 2.15), so a write in another thread is not affected.
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(rest, file)
    except RuntimeError as error:
        # After an error of the storage torch tries to complete the file and raises that this failed, too. The error of
        # the storage is the cause, and the caller expects it.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    finally:
        torch.serialization.set_crc32_options(before)


def _write_model(model: dict[str, Tensor], file: IO[bytes]) -> None:
    """Writes the bytes that `safetensors.torch.save` would return, without a copy of the model."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.items()}
    # safetensors writes the header for empty tensors of the same names and types. The order of the tensors and the
    # names of the types are taken from it; shapes and offsets are filled in.
    data = safetensors.torch.save({name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()})
    header = json.loads(data[8:])
    offset = 0
    for name, entry in header.items():
        size = tensors[name].nbytes
        entry["shape"], entry["data_offsets"] = list(tensors[name].shape), [offset, offset + size]
        offset += size
    encoded_header = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded_header += b" " * (-len(encoded_header) % 8)
    file.write(len(encoded_header).to_bytes(8, "little") + encoded_header)
    for name in header:
        file.write(_bytes_of(tensors[name]))


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor's elements, without a copy if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def unpack(files: dict[str, bytes]) -> Snapshot:
    """Returns the snapshot in files that `pack` or `file_writers` wrote; pickled code in them is refused and not run.

    Raises:
        CheckpointError: The files contain something else than a snapshot.
        MemoryError: There is not enough memory for their contents.
    """
    try:
        rest = torch.load(io.BytesIO(files[TRAINING]), weights_only=True)
        step = rest["step"]
        optimizer = rest["optimizer"]
        schedule = rest["schedule"]
        extra_state = rest["more"]
    except Exception as error:
        raise _refusal(TRAINING, error) from error
    return Snapshot(step, unpack_model(files), optimizer, schedule, extra_state)


def unpack_model(files: dict[str, bytes]) -> dict[str, Tensor]:
    """Returns only the parameters and persistent buffers of a snapshot, by name; see `unpack`."""
    try:
        return safetensors.torch.load(files[MODEL])
    except Exception as error:
        raise _refusal(MODEL, error) from error


def _refusal(name: str, error: Exception) -> Exception:
    """Returns the error to raise for a file that cannot be read.

    With a lack of memory it is a `MemoryError` and not a `CheckpointError`, since the file may be intact.
    """
    # On the CPU torch has no error type for a lack of memory, only a message.
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return MemoryError(f"Not enough memory for {name} of a checkpoint: {error}")
    return CheckpointError(f"{name} is refused: {error}")


def params_digest(model: dict[str, Tensor]) -> str:
    """Returns the SHA-256 over name, dtype, shape and bytes of every tensor, in the order of their names."""
    sha = hashlib.sha256()
    for name, tensor in sorted(model.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(_bytes_of(tensor))
    return sha.hexdigest()
