"""A snapshot as files, and back: safetensors for the model, torch's zip format without pickled code for the rest."""

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

    Args: step: Finished steps. model: Parameters and persistent buffers of the model that is returned, by name, on the
        CPU. optimizer: State of the optimizer. schedule: State of the learning-rate schedule, if there is one. more:
        What else is needed to go on: the trained parameters where `model` holds their average, the scale of the loss.
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    schedule: dict[str, Any] | None
    more: dict[str, Any] = field(default_factory=dict)


def file_writers(snapshot: Snapshot) -> dict[str, Content]:
    """The files of a snapshot by name, as functions that write them straight from the snapshot's memory.

    Nothing is copied, and whoever holds Python's lock waits for nothing big: the training goes on in another thread
    meanwhile.
    """
    rest = {
        "step": snapshot.step,
        "optimizer": snapshot.optimizer,
        "schedule": snapshot.schedule,
        "more": snapshot.more,
    }
    return {MODEL: lambda file: _write_model(snapshot.model, file), TRAINING: lambda file: _write_rest(rest, file)}


def pack(snapshot: Snapshot) -> dict[str, bytes]:
    """The files of a snapshot by name."""
    return {name: render_content(content) for name, content in file_writers(snapshot).items()}


def _write_rest(rest: dict[str, Any], file: IO[bytes]) -> None:
    """`torch.save` without zip's CRC-32, which is computed under Python's lock; the commit holds a SHA-256 of
    the file.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(rest, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch ends the file even so, and says that this failed
            raise error.__context__ from None
        raise
    finally:
        torch.serialization.set_crc32_options(before)


def _write_model(model: dict[str, Tensor], file: IO[bytes]) -> None:
    """Writes what `safetensors.torch.save` returns; the order and the names of types are those that it gives to tensors
    without data.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.items()}
    data = safetensors.torch.save({name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()})
    header, at = json.loads(data[8:]), 0
    for name, facts in header.items():
        size = tensors[name].nbytes
        facts["shape"], facts["data_offsets"] = list(tensors[name].shape), [at, at + size]
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in header:
        file.write(_bytes_of(tensors[name]))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def unpack(files: dict[str, bytes]) -> Snapshot:
    """Reads what `pack` wrote; nothing is unpickled that could run code.

    Raises:
        CheckpointError: The files hold something else, such as pickled code, which is not run.
        MemoryError: There is no room for what they hold.
    """
    try:
        rest = torch.load(io.BytesIO(files[TRAINING]), weights_only=True)
        step, optimizer, schedule, more = rest["step"], rest["optimizer"], rest["schedule"], rest["more"]
    except Exception as error:
        raise _refusal(TRAINING, error) from error
    return Snapshot(step, unpack_model(files), optimizer, schedule, more)


def unpack_model(files: dict[str, bytes]) -> dict[str, Tensor]:
    """The parameters and persistent buffers alone.

    Raises:
        CheckpointError: The file holds something else.
        MemoryError: There is no room for what it holds.
    """
    try:
        return safetensors.torch.load(files[MODEL])
    except Exception as error:
        raise _refusal(MODEL, error) from error


def _refusal(name: str, error: Exception) -> Exception:
    """What to raise for a file that cannot be read: a machine that has no room for it says nothing of the file."""
    if isinstance(error, MemoryError) or "allocate memory" in str(
        error
    ):  # torch has no type of its own for it on the CPU
        return MemoryError(f"No room for {name} of a checkpoint: {error}")
    return CheckpointError(f"{name} is refused: {error}")


def has_same_values(one: bytes, other: bytes) -> bool:
    """Whether two `training.pt` hold the same; of two workers the bytes may differ even so, since pickle remembers
    objects, not values.
    """
    try:
        return _equal(*(torch.load(io.BytesIO(data), weights_only=True) for data in (one, other)))
    except Exception:  # it is damaged; torch raises what it likes
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
    """SHA-256 over name, dtype, shape and bytes of every tensor, sorted by name."""
    sha = hashlib.sha256()
    for name, tensor in sorted(model.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(_bytes_of(tensor))
    return sha.hexdigest()
