"""How a training state gets to those that lack it: tensor by tensor, along a tree of them, in pieces that nobody has to
wait long for.

Nothing big is pickled or copied while Python's lock is held, so heartbeats go on however large the state is. A tensor
leaves from the memory that it has and arrives in the memory that it stays in; from a device it goes through the host
piece by piece.

Page-locked host memory, from and to which a device copies by itself while the host goes on.

PyTorch's own (`pin_memory=True`) rounds each tensor up to a power of two and never gives memory back: what a snapshot
of a big model takes would be up to twice the model for each copy, and grow with each kind of copy. Here a copy is one
piece of exactly its size. When no tensor uses it any more, the next copy takes it, or gives it back if it is of another
size: to lock memory takes a second for some gigabytes.

Each tensor has a storage of its own, which is its part of the piece: `torch.save` writes the whole storage of a tensor,
and refuses tensors of different types in one storage.

Copies of a state in host memory: those of a device are all given to it, through page-locked memory, before any is
waited for.

All ranks copy like this, also those that only hold a copy: the next step waits for the slowest of them. Of this the
CPU's part has run, not that of a GPU; tests look at the order of its calls.
"""

from __future__ import annotations

import logging
import mmap
import pickle
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, cuda

from ray_app.checkpoint.format import Snapshot
from ray_app.reduction.base import collective
from ray_app.reduction.transport import P2PWork, receive, start_send

_PIECE_BYTES = 16 << 20
_SMALL_BYTES = 4096
"""Tensors up to this size travel with what is no tensor: a message each would take longer than they do."""
_MOST_ON_THE_WAY = 4


class _Place(NamedTuple):
    """Where a tensor belongs that travels on its own."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def ranks_without_state(steps: Sequence[int], source: int) -> list[int]:
    """The ranks that do not have what the source has, by every rank's step; nobody has anything at a step below 0."""
    return [rank for rank, step in enumerate(steps) if rank != source and (step < 0 or step != steps[source])]


def divergent_ranks(steps: Sequence[int], digests: Sequence[str]) -> list[int]:
    """The ranks with the highest step that are not of one mind with more than half of those that have it, by every
    rank's digest.
    """
    newest = [rank for rank, step in enumerate(steps) if step == max(steps)]
    digest, count = Counter(digests[rank] for rank in newest).most_common(1)[0]
    return [rank for rank in newest if digests[rank] != digest or 2 * count <= len(newest)]


def transfer_snapshot(snapshot: Snapshot | None, rank: int, source: int, to: Sequence[int]) -> Snapshot | None:
    """Gives a state to the ranks that lack it; only they and the source take part.

    Args:
        snapshot: What the source has; it may be the memory that it trains in, on a device, too.
        rank: This rank.
        source: Who has it.
        to: Who gets it, the same on all ranks.

    Returns:
        On those who get it the state, on the CPU and in memory of its own; on all others what they gave.

    Raises:
        PeerLostError: One of them left meanwhile.
    """
    order = [source, *to]
    if rank not in order or not to:
        return snapshot
    me = order.index(rank)
    line = _Line(order[(me - 1) // 2] if me else None, order[2 * me + 1 : 2 * me + 3])
    tensors: list[Tensor] = []
    with collective():
        if me == 0:
            assert snapshot is not None
            line.pass_head(
                pickle.dumps(extract_tensors([getattr(snapshot, part.name) for part in fields(Snapshot)], tensors))
            )
        else:
            snapshot = Snapshot(*insert_tensors(pickle.loads(line.pass_head(b"")), tensors))
        for tensor in tensors:
            line.pass_on(tensor)
        line.settle()
    return snapshot


class _Line:
    """A rank's place in the tree.

    Args:
        parent: Where everything comes from; None for the source.
        children: Where it goes.
    """

    def __init__(self, parent: int | None, children: Sequence[int]) -> None:
        self._parent, self._children = parent, children
        self._sent: deque[P2PWork] = deque()

    def pass_head(self, head: bytes) -> bytes:
        """Passes on what comes before the tensors; returns it."""
        size = torch.tensor([len(head)])
        self._pass_piece(size)
        data = torch.frombuffer(bytearray(head or bytes(int(size))), dtype=torch.uint8)
        self.pass_on(data)
        return data.numpy().tobytes()

    def pass_on(self, tensor: Tensor) -> None:
        """Passes on the bytes of a tensor, which those who are not the source receive into it."""
        flat = tensor.detach().reshape(-1)
        step = max(1, _PIECE_BYTES // flat.element_size())
        for low in range(0, flat.numel(), step):
            self._pass_piece(flat[low : low + step].cpu().contiguous().view(torch.uint8))

    def _pass_piece(self, piece: Tensor) -> None:
        if self._parent is not None:
            receive(piece, self._parent)
        for child in self._children:
            self._sent.append(start_send(piece, child))
        while len(self._sent) > _MOST_ON_THE_WAY * len(self._children):
            self._sent.popleft().wait()

    def settle(self) -> None:
        """Waits until all has left."""
        while self._sent:
            self._sent.popleft().wait()


def extract_tensors(value: Any, found: list[Tensor]) -> Any:
    """A value with places instead of tensors, which go into `found`."""
    if isinstance(value, Tensor):
        if value.nbytes <= _SMALL_BYTES:
            return value.detach().cpu().clone()  # a view would take its whole storage along
        found.append(value)
        return _Place(value.dtype, tuple(value.shape))
    if isinstance(value, dict):
        return {k: extract_tensors(v, found) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(extract_tensors(v, found) for v in value)
    return value


def insert_tensors(form: Any, found: list[Tensor]) -> Any:
    """What `extract_tensors` was given, with tensors that are still to be filled, which go into `found`."""
    if isinstance(form, _Place):
        found.append(torch.empty(form.shape, dtype=form.dtype))
        return found[-1]
    if isinstance(form, dict):
        return {k: insert_tensors(v, found) for k, v in form.items()}
    if isinstance(form, list | tuple):
        return type(form)(insert_tensors(v, found) for v in form)
    return form


logger = logging.getLogger(__name__)

_ALIGNED_BYTES = 64
_lock = threading.RLock()  # the collector may drop another piece while this thread is in here
_spare: list[mmap.mmap] = []
_is_refused = False


def aligned_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a piece that a tensor takes: a multiple of the alignment, and never 0, so that no two
    tensors begin alike.
    """
    return max(1, -(-tensor.nbytes // _ALIGNED_BYTES)) * _ALIGNED_BYTES


def page_locked_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors of the shapes and dtypes of others, in one new piece of page-locked memory; their values are
    not set.

    Where the driver locks no more memory it is pageable, which makes copies slower, and no others.
    """
    return list(_views(tensors, _piece(sum(map(aligned_bytes, tensors))))) if tensors else []


def _views(tensors: Sequence[Tensor], piece: NDArray[np.uint8]) -> Iterator[Tensor]:
    start = 0
    for tensor in tensors:
        part = torch.from_numpy(piece[start : start + tensor.nbytes])
        yield part.view(tensor.dtype).view(tensor.shape)
        start += aligned_bytes(tensor)


def _piece(size: int) -> NDArray[np.uint8]:
    """Memory of so many bytes; another piece may have it after the last tensor that uses a part of it is gone."""
    with _lock:
        memory = next((spare for spare in _spare if len(spare) == size), None)
        if memory is not None:
            _spare.remove(memory)
        while _spare:
            cuda.cudart().cudaHostUnregister(_address(_spare.pop()))
        if memory is None:
            memory = mmap.mmap(-1, size)
            if not _locked(memory):
                return np.frombuffer(memory, np.uint8)
    array = np.frombuffer(memory, np.uint8)
    weakref.finalize(array, _keep, memory).atexit = False
    return array


def _keep(memory: mmap.mmap) -> None:
    """Keeps a piece that nothing uses for the next that is asked for.

    Not unlocked here: the thread that drops a piece last may be one whose present device is another, which that would
    open.
    """
    with _lock:
        _spare.append(memory)


def _locked(memory: mmap.mmap) -> bool:
    global _is_refused
    if not _is_refused:
        error = int(cuda.cudart().cudaHostRegister(_address(memory), len(memory), 0))
        if not error:
            return True
        _is_refused = True
        logger.warning(
            "The driver locks no %d bytes of host memory (CUDA error %d); copies of the state take longer",
            len(memory),
            error,
        )
        with suppress(RuntimeError):  # the runtime reports the error once more, at the next kernel
            torch.ones(1, device="cuda")
    return False


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def copy_to_host(
    value: dict[str, Any], into: dict[str, Any] | None = None, whole: Callable[[Tensor], Tensor] = Tensor.detach
) -> dict[str, Any]:
    """A deep copy with tensors on the CPU, in the memory of those of `into` where they are alike.

    Args:
        value: Tensors in dictionaries, lists and tuples.
        into: What nobody needs any more.
        whole: Makes the tensor to copy of one that is found.
    """
    devices: set[torch.device] = set()
    found: dict[str, Any] = _copied(
        value, into, whole, devices, iter(page_locked_like(list(_without_memory(value, into))))
    )
    for device in devices:
        cuda.current_stream(device).synchronize()
    return found


def _without_memory(value: Any, into: Any) -> Iterator[Tensor]:
    """The tensors on a device that have no copy which is alike, in the order of `_copied`."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu" and not _is_alike(value, into):
            yield value
    elif isinstance(value, dict):
        known = into if isinstance(into, dict) else {}
        for k, v in value.items():
            yield from _without_memory(v, known.get(k))
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _without_memory(v, None)


def _is_alike(value: Tensor, into: Any) -> bool:
    return isinstance(into, Tensor) and (into.dtype, into.shape) == (value.dtype, value.shape)


def _copied(
    value: Any, into: Any, whole: Callable[[Tensor], Tensor], devices: set[torch.device], memory: Iterator[Tensor]
) -> Any:
    """The copy, which is not to be read before what these devices were given is done."""
    if isinstance(value, Tensor):
        room = next(memory) if value.device.type != "cpu" and not _is_alike(value, into) else into
        value = whole(value)
        if value.device.type == "cpu":
            return into.copy_(value) if _is_alike(value, into) else value.to("cpu", copy=True).contiguous()
        devices.add(value.device)
        return (room if _is_alike(value, room) else torch.empty(value.shape, dtype=value.dtype)).copy_(
            value, non_blocking=True
        )
    if isinstance(value, dict):
        known = into if isinstance(into, dict) else {}
        return {k: _copied(v, known.get(k), whole, devices, memory) for k, v in value.items()}
    if isinstance(
        value, np.float64 | np.integer | np.bool_
    ):  # as NumPy's functions make them, which no checkpoint is read with
        return value.item()
    if isinstance(value, list | tuple):
        return type(value)(_copied(v, None, whole, devices, memory) for v in value)
    return value
