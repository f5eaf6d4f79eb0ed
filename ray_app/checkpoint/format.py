"""Converts snapshots to files and back.

The model is written as safetensors, and the rest by `torch.save` in a format that is read without running pickled code.

A snapshot of a sharded state is divided into parts, one for each rank. Part k of n is written as
`model-k-of-n.safetensors` and `training-k-of-n.safetensors` with the rows of the part and metadata that say where the
rows belong (`start`, `shape`). Tensors that are not sharded are in the first part, which also has `training.pt`, with
tensors without memory (`meta`) in place of those in the files of the parts. `unpack` joins the parts; `open_snapshot`
returns tensors of which any rows can be read, so that no process needs memory for a whole tensor.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from ray_app.errors import CheckpointError
from ray_app.storage.files import Content, put_json, render_content

MODEL, TRAINING = "model.safetensors", "training.pt"
_PART = re.compile(r"(model|training)-\d+-of-\d+\.safetensors")
"""The names of the files of a part: the kind, the number of the part from 1, and the number of parts."""
_METADATA = "__metadata__"
"""The key of the metadata in a header of safetensors."""
_VALUES = "rows of a tensor"
"""The key of a dictionary that stands for rows of a tensor, see `make_rows`."""
_BLOCK_BYTES = 16 << 20
"""The maximum number of bytes of a tensor that are read at a time to compute a digest."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of the training state at a step boundary, in host memory that training does not change.

    Args:
        step: Number of finished steps.
        model: Parameters and persistent buffers of the model that training returns, by name.
        schedule: State of the learning-rate schedule; None without one.
        extra_state: Other state that a resume needs: the trained parameters if `model` has their average, the scale of
            the loss, the outer optimizer of `local_sgd`, and metrics of the epoch. Files have it under the key `more`.
        part: Index and number of the parts if this is one part of a snapshot, with `make_rows` in place of tensors.
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    schedule: dict[str, Any] | None
    extra_state: dict[str, Any] = field(default_factory=dict)
    part: tuple[int, int] | None = None


def make_rows(values: Tensor, start: int, shape: Sequence[int]) -> dict[str, Any]:
    """Returns what stands for rows of a tensor in a part of a snapshot.

    It is a plain dictionary, so that functions that copy states need not know it.

    Args:
        values: The rows.
        start: Index of the first row in the whole tensor.
        shape: Shape of the whole tensor.
    """
    return {_VALUES: values, "start": start, "shape": tuple(shape)}


def is_rows(value: Any) -> bool:
    """Returns whether a value was returned by `make_rows`."""
    return isinstance(value, dict) and _VALUES in value


def row_values(rows: dict[str, Any]) -> Tensor:
    """Returns the values of `make_rows`."""
    values: Tensor = rows[_VALUES]
    return values


def map_tensors(value: Any, convert: Callable[[str, Any], Any], path: str = "") -> Any:
    """Returns a copy of a state with `convert(path, tensor)` in place of each tensor, stored tensor and `make_rows`."""
    if isinstance(value, Tensor | StoredTensor) or is_rows(value):
        return convert(path, value)
    if isinstance(value, dict):
        return {k: map_tensors(v, convert, f"{path}/{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(v, convert, f"{path}/{i}") for i, v in enumerate(value))
    return value


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
    if snapshot.part is None:
        return {MODEL: partial(_write_tensors, snapshot.model), TRAINING: partial(write_rest, rest)}
    index, count = snapshot.part
    training: dict[str, Any] = {}

    def without_rows(path: str, value: Any) -> Any:
        if not is_rows(value):
            return value
        training[path] = value
        return torch.empty(value["shape"], dtype=row_values(value).dtype, device="meta")

    rest = map_tensors(rest, without_rows)
    model = {name: value for name, value in snapshot.model.items() if index == 0 or is_rows(value)}
    end = f"{index + 1:05d}-of-{count:05d}.safetensors"
    files: dict[str, Content] = {
        f"model-{end}": partial(_write_tensors, model),
        f"training-{end}": partial(_write_tensors, training),
    }
    return files if index else {**files, TRAINING: partial(write_rest, rest)}


def pack(snapshot: Snapshot) -> dict[str, bytes]:
    """Returns the contents of a snapshot's files by name."""
    return {name: render_content(content) for name, content in file_writers(snapshot).items()}


def write_rest(rest: dict[str, Any], file: IO[bytes]) -> None:
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


def read_rest(data: bytes) -> dict[str, Any]:
    """Returns the content of `training.pt`; pickled code in it is refused. Tensors of parts have no memory."""
    try:
        rest: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        raise _refusal(TRAINING, error) from error
    return rest


def _write_tensors(values: Mapping[str, Any], file: IO[bytes], metadata: Mapping[str, str] | None = None) -> None:
    """Writes the bytes that `safetensors.torch.save` would return, without a copy of the tensors.

    Args:
        values: Tensors, stored tensors and `make_rows` by name. The metadata have the start and the whole shape of each
            of the last.
        file: The file to write.
        metadata: Other metadata of the file.
    """
    tensors = {name: row_values(value) if is_rows(value) else value for name, value in values.items()}
    positions = {name: {"start": v["start"], "shape": v["shape"]} for name, v in values.items() if is_rows(v)}
    if positions:
        metadata = {"rows": json.dumps(positions)}
    # safetensors writes the header for empty tensors of the same names and types. The order of the tensors and the
    # names of the types are taken from it; shapes and offsets are filled in.
    empty = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}
    header = json.loads(safetensors.torch.save(empty, dict(metadata) if metadata else None)[8:])
    offset, names = 0, [name for name in header if name != _METADATA]
    for name in names:
        size = tensors[name].nbytes
        header[name]["shape"], header[name]["data_offsets"] = list(tensors[name].shape), [offset, offset + size]
        offset += size
    encoded_header = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded_header += b" " * (-len(encoded_header) % 8)
    file.write(len(encoded_header).to_bytes(8, "little") + encoded_header)
    for name in names:
        for block in _blocks_of(tensors[name]):
            file.write(_bytes_of(block))


def write_model(model: Mapping[str, StoredTensor], folder: Path, max_bytes: int) -> None:
    """Writes a model to files of safetensors with an index, as Transformers reads them, block by block.

    Args:
        model: The parameters and persistent buffers by name.
        folder: The folder of the files.
        max_bytes: Maximum bytes of the tensors in a file; a larger tensor has a file of its own.
    """
    files: list[dict[str, StoredTensor]] = []
    size = 0
    for name, tensor in sorted(model.items()):
        if not files or size + tensor.nbytes > max_bytes:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    weight_map = dict[str, str]()
    for number, tensors in enumerate(files, 1):
        file_name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weight_map |= dict.fromkeys(tensors, file_name)
        with (folder / file_name).open("wb") as file:
            _write_tensors(tensors, file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in model.values())}, "weight_map": weight_map}
    put_json(folder / f"{MODEL}.index.json", index)


def _blocks_of(tensor: Tensor | StoredTensor) -> Iterable[Tensor]:
    return tensor.blocks() if isinstance(tensor, StoredTensor) else [tensor]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor's elements, without a copy if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def unpack(files: dict[str, bytes]) -> Snapshot:
    """Returns the snapshot in files that `pack` or `file_writers` wrote; pickled code in them is refused and not run.

    Raises:
        CheckpointError: The files contain something else than a snapshot.
        MemoryError: There is not enough memory for their contents.
    """
    rest = read_rest(files[TRAINING])
    try:
        training = _join_parts(files, "training")
        snapshot = _make_snapshot(rest, {}, training)
    except Exception as error:
        raise _refusal(TRAINING, error) from error
    return replace(snapshot, model=unpack_model(files))


def _make_snapshot(rest: dict[str, Any], model: Mapping[str, Any], training: Mapping[str, Any]) -> Snapshot:
    """Returns a snapshot of the content of `training.pt`, with tensors by path in place of those without memory."""
    rest = map_tensors(rest, lambda path, value: training[path] if value.is_meta else value)
    return Snapshot(rest["step"], dict(model), rest["optimizer"], rest["schedule"], rest["more"])


def unpack_model(files: dict[str, bytes]) -> dict[str, Tensor]:
    """Returns only the parameters and persistent buffers of a snapshot, by name; see `unpack`."""
    try:
        return safetensors.torch.load(files[MODEL]) if MODEL in files else _join_parts(files, "model")
    except Exception as error:
        raise _refusal(MODEL, error) from error


def is_model_file(name: str) -> bool:
    """Returns whether a file of a checkpoint has parameters and persistent buffers of the model."""
    return name == MODEL or name.startswith("model-")


def _join_parts(files: Mapping[str, bytes], kind: str) -> dict[str, Tensor]:
    """Returns the whole tensors in the files of all parts."""
    opened = {name: io.BytesIO(data) for name, data in files.items() if (m := _PART.fullmatch(name)) and m[1] == kind}
    return {name: stored.read() for name, stored in open_tensors(opened.values()).items()}


class _StoredRows(NamedTuple):
    """Rows of a tensor in a file: the first row, the number of rows, and the position of their first byte."""

    start: int
    num_rows: int
    file: IO[bytes]
    offset: int


class StoredTensor:
    """A tensor in files of safetensors, of which rows are read when they are needed.

    Args:
        dtype: Its dtype.
        shape: Its whole shape.
        pieces: Its rows in the files.
    """

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], pieces: Sequence[_StoredRows]) -> None:
        self.dtype, self.shape = dtype, torch.Size(shape)
        self._pieces = sorted(pieces, key=lambda piece: (piece.start, piece.num_rows))

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return self.shape.numel() * self.dtype.itemsize

    def read(self, low: int = 0, high: int | None = None) -> Tensor:
        """Returns the rows from `low` to `high`, by default to the last one; a tensor without dimensions as it is.

        Raises:
            CheckpointError: A row is missing.
        """
        high = high if high is not None else self.shape[0] if self.shape else 1
        values = torch.empty((high - low, *self.shape[1:]), dtype=self.dtype)
        row_bytes = self.shape[1:].numel() * self.dtype.itemsize
        memory, position = memoryview(_bytes_of(values)), low
        for start, num_rows, file, offset in self._pieces:
            end = min(high, start + num_rows)
            if start <= position < end:
                target = memory[(position - low) * row_bytes : (end - low) * row_bytes]
                file.seek(offset + (position - start) * row_bytes)
                if target and file.readinto(target) != len(target):  # type: ignore[attr-defined]
                    raise CheckpointError("a file with rows of a tensor is cut short")
                position = end
        if position < high:
            raise CheckpointError(f"row {position} of a tensor of shape {tuple(self.shape)} is missing")
        return values if self.shape else values.reshape(())

    def blocks(self) -> Iterator[Tensor]:
        """Yields the tensor in blocks of rows that take little memory."""
        rows = max(1, _BLOCK_BYTES // max(1, self.shape[1:].numel() * self.dtype.itemsize))
        for low in range(0, self.shape[0] if self.shape else 1, rows):
            yield self.read(low, min(low + rows, self.shape[0]) if self.shape else 1)


def open_tensors(files: Iterable[IO[bytes]]) -> dict[str, StoredTensor]:
    """Returns the tensors in files of safetensors by name; the files stay open while the result is used.

    Raises:
        CheckpointError: The files contain something else.
    """
    pieces: dict[str, list[_StoredRows]] = {}
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for file in files:
        file.seek(0)
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        positions = json.loads(header.pop(_METADATA, {}).get("rows", "{}"))
        # safetensors reads the dtypes, from a header of empty tensors.
        empty = json.dumps({name: {**entry, "shape": [0], "data_offsets": [0, 0]} for name, entry in header.items()})
        dtypes = safetensors.torch.load(len(empty.encode()).to_bytes(8, "little") + empty.encode())
        for name, entry in header.items():
            shape = tuple(positions.get(name, entry)["shape"])
            if kinds.setdefault(name, (dtypes[name].dtype, shape)) != (dtypes[name].dtype, shape):
                raise CheckpointError(f"the parts of {name} differ in dtype or shape")
            count = entry["shape"][0] if entry["shape"] else 1
            start = positions.get(name, {"start": 0})["start"]
            pieces.setdefault(name, []).append(_StoredRows(start, count, file, 8 + size + entry["data_offsets"][0]))
    return {name: StoredTensor(*kinds[name], rows) for name, rows in pieces.items()}


def open_snapshot(files: Mapping[str, IO[bytes]]) -> Snapshot:
    """Returns a snapshot in open files with tensors that take no memory: they are stored tensors, or in a mapped file.

    `training.pt` is mapped into memory; one that is in a bucket is first copied to a temporary file.

    Raises:
        CheckpointError: The files contain something else than a snapshot.
    """
    try:
        training = open_tensors(file for name, file in files.items() if name.startswith("training-"))
        model = open_tensors(file for name, file in files.items() if is_model_file(name))
        with tempfile.TemporaryDirectory(prefix="ray_app-checkpoint-") as folder:
            path, source = Path(folder, TRAINING), files[TRAINING]
            source.seek(0)
            if isinstance(source, io.BufferedReader):
                path = Path(source.name)
            else:
                with path.open("wb") as file:
                    shutil.copyfileobj(source, file, _BLOCK_BYTES)
            rest = torch.load(path, mmap=True, weights_only=True)
        return _make_snapshot(rest, model, training)
    except OSError:
        raise
    except Exception as error:
        raise _refusal("the checkpoint", error) from error


def _refusal(name: str, error: Exception) -> Exception:
    """Returns the error to raise for a file that cannot be read.

    With a lack of memory it is a `MemoryError` and not a `CheckpointError`, since the file may be intact.
    """
    # On the CPU torch has no error type for a lack of memory, only a message.
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return MemoryError(f"Not enough memory for {name} of a checkpoint: {error}")
    return CheckpointError(f"{name} is refused: {error}")


def params_digest(model: Mapping[str, Tensor | StoredTensor]) -> str:
    """Returns the SHA-256 over name, dtype, shape and bytes of every tensor, in the order of their names.

    Stored tensors are read in blocks.
    """
    sha = hashlib.sha256()
    for name, tensor in sorted(model.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for block in _blocks_of(tensor):
            sha.update(_bytes_of(block))
    return sha.hexdigest()
