"""Converts snapshots to files and back: safetensors for the model, torch's zip format without pickled code for the
rest.
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
    """The training state at a step boundary, in memory of its own.

    Args:
        step: Number of finished steps.
        model: Parameters and persistent buffers of the model that training returns, by name, on the CPU.
        optimizer: State of the optimizer.
        schedule: State of the learning-rate schedule, if there is one.
        more: Other state for a resume: the trained parameters if `model` is their average, the scale of the loss.
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    schedule: dict[str, Any] | None
    more: dict[str, Any] = field(default_factory=dict)


def file_writers(snapshot: Snapshot) -> dict[str, Content]:
    """Returns functions, by file name, that write the files of a snapshot directly from its memory.

    They copy nothing and do not keep the GIL for long, so that training goes on in another thread meanwhile.
    """
    rest = {
        "step": snapshot.step,
        "optimizer": snapshot.optimizer,
        "schedule": snapshot.schedule,
        "more": snapshot.more,
    }
    return {MODEL: lambda file: _write_model(snapshot.model, file), TRAINING: lambda file: _write_rest(rest, file)}


def pack(snapshot: Snapshot) -> dict[str, bytes]:
    """Returns the contents of a snapshot's files by name."""
    return {name: render_content(content) for name, content in file_writers(snapshot).items()}


def _write_rest(rest: dict[str, Any], file: IO[bytes]) -> None:
    """Writes a file by `torch.save` without zip's CRC-32, which is computed under the GIL.

    The commit has a SHA-256 of the file.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(rest, file)
    except RuntimeError as error:
        # After an error of the storage torch tries to end the file, and raises that this failed.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    finally:
        torch.serialization.set_crc32_options(before)


def _write_model(model: dict[str, Tensor], file: IO[bytes]) -> None:
    """Writes the bytes that `safetensors.torch.save` would return, without a copy of the model.

    The header of tensors without data gives the order and the names of the types.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.items()}
    data = safetensors.torch.save({name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()})
    header = json.loads(data[8:])
    offset = 0
    for name, facts in header.items():
        size = tensors[name].nbytes
        facts["shape"], facts["data_offsets"] = list(tensors[name].shape), [offset, offset + size]
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in header:
        file.write(_bytes_of(tensors[name]))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def unpack(files: dict[str, bytes]) -> Snapshot:
    """Returns the snapshot that `pack` wrote; nothing is unpickled that could run code.

    Raises:
        CheckpointError: The files contain something else, such as pickled code, which is not run.
        MemoryError: There is not enough memory for their contents.
    """
    try:
        rest = torch.load(io.BytesIO(files[TRAINING]), weights_only=True)
        step, optimizer, schedule, more = rest["step"], rest["optimizer"], rest["schedule"], rest["more"]
    except Exception as error:
        raise _refusal(TRAINING, error) from error
    return Snapshot(step, unpack_model(files), optimizer, schedule, more)


def unpack_model(files: dict[str, bytes]) -> dict[str, Tensor]:
    """Returns the parameters and persistent buffers alone.

    Raises:
        CheckpointError: The file contains something else.
        MemoryError: There is not enough memory for its contents.
    """
    try:
        return safetensors.torch.load(files[MODEL])
    except Exception as error:
        raise _refusal(MODEL, error) from error


def _refusal(name: str, error: Exception) -> Exception:
    """Returns the error for a file that cannot be read; a lack of memory says nothing about the file."""
    # On the CPU torch has no error type for a lack of memory.
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return MemoryError(f"Not enough memory for {name} of a checkpoint: {error}")
    return CheckpointError(f"{name} is refused: {error}")


def has_same_values(one: bytes, other: bytes) -> bool:
    """Returns whether two `training.pt` have equal values.

    Those of two workers may differ in their bytes even so, since pickle writes references to objects, not to values.
    """
    try:
        return _equal(*(torch.load(io.BytesIO(data), weights_only=True) for data in (one, other)))
    except Exception:
        # For a damaged file torch may raise any error.
        return False


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and _bytes_of(one) == _bytes_of(other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


def params_digest(model: dict[str, Tensor]) -> str:
    """Returns the SHA-256 over name, dtype, shape and bytes of every tensor, sorted by name."""
    sha = hashlib.sha256()
    for name, tensor in sorted(model.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(_bytes_of(tensor))
    return sha.hexdigest()
