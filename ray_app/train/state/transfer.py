"""Transfers of training states between ranks, and copies of states in host memory.

`transfer_snapshot` sends a state to the ranks that lack it, tensor by tensor along a tree of ranks, in small pieces.
Nothing big is pickled or copied while Python's lock is held, so heartbeats continue however large the state is. A
tensor leaves from the memory that it has and arrives in the memory that it stays in; from a device it passes through
the host piece by piece.

`copy_to_host` copies a state. All copies of device tensors are given to the device before any is waited for, and go to
page-locked memory, into which a device copies by itself while the host continues. PyTorch's page-locked memory
(`pin_memory=True`) rounds each tensor up to a power of two and is never freed: for each copy a snapshot of a big model
would take up to twice the memory of the model, and more with each kind of copy. Here the memory of a copy is one block
of exactly its size. When no tensor uses a block any more, the next copy reuses it, or frees it if it is of another
size: to lock some gigabytes takes a second. Each tensor is the whole of its storage, because `torch.save` writes the
whole storage of a tensor, and refuses tensors of different types in one storage.

All ranks copy like this, also ranks that only keep a copy: the next step waits for the slowest of them. The CPU's part
has run; for the GPU's part tests examine the order of its calls.
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

logger = logging.getLogger(__name__)

_PIECE_BYTES = 16 << 20
_SMALL_BYTES = 4096
"""Tensors up to this size are pickled with everything else: a message for each would take longer."""
_MAX_SENDS_PER_CHILD = 4
"""Pieces that may be on their way to each child at a time."""


class _TensorSpec(NamedTuple):
    """Stands for a tensor that is sent by itself."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def ranks_without_state(steps: Sequence[int], source: int) -> list[int]:
    """Returns the ranks that do not have the state of a source.

    Args:
        steps: Every rank's step; below 0 it has no state.
        source: The rank with the state.
    """
    return [rank for rank, step in enumerate(steps) if rank != source and (step < 0 or step != steps[source])]


def divergent_ranks(steps: Sequence[int], digests: Sequence[str]) -> list[int]:
    """Returns the ranks at the highest step with another parameter digest than the majority of these ranks.

    These are all of them if no digest has a majority.

    Args:
        steps: Every rank's step.
        digests: Every rank's digest of its parameters; only those at the highest step count.
    """
    newest = [rank for rank, step in enumerate(steps) if step == max(steps)]
    digest, count = Counter(digests[rank] for rank in newest).most_common(1)[0]
    return [rank for rank in newest if digests[rank] != digest or 2 * count <= len(newest)]


def transfer_snapshot(snapshot: Snapshot | None, rank: int, source: int, to: Sequence[int]) -> Snapshot | None:
    """Sends the state of a source to the ranks that lack it; a collective of these ranks.

    Args:
        snapshot: The source's state; it may be the memory in which it trains, also on a device.
        rank: This rank.
        source: The rank with the state.
        to: The ranks that get it, the same on all ranks.

    Returns:
        On the ranks `to` the state, on the CPU and in memory of its own; on the others the argument.

    Raises:
        PeerLostError: One of the ranks left meanwhile.
    """
    order = [source, *to]
    if rank not in order or not to:
        return snapshot
    # The ranks form a binary tree in this order, with the source at its root.
    position = order.index(rank)
    parent = order[(position - 1) // 2] if position else None
    node = _TreeNode(parent, order[2 * position + 1 : 2 * position + 3])
    tensors: list[Tensor] = []
    with collective():
        if parent is None:
            assert snapshot is not None
            values = [getattr(snapshot, part.name) for part in fields(Snapshot)]
            node.pass_head(pickle.dumps(extract_tensors(values, tensors)))
        else:
            snapshot = Snapshot(*insert_tensors(pickle.loads(node.pass_head(b"")), tensors))
        for tensor in tensors:
            node.pass_tensor(tensor)
        node.wait()
    return snapshot


class _TreeNode:
    """A rank in the tree along which a state travels.

    Args:
        parent: The rank to receive from; None at the root.
        children: The ranks to send to.
    """

    def __init__(self, parent: int | None, children: Sequence[int]) -> None:
        self._parent, self._children = parent, children
        self._sent: deque[P2PWork] = deque()

    def pass_head(self, head: bytes) -> bytes:
        """Passes on the pickled part, which precedes the tensors; returns it. Only the root has it before."""
        size = torch.tensor([len(head)])
        self._pass_piece(size)
        data = torch.frombuffer(bytearray(head or bytes(int(size))), dtype=torch.uint8)
        self.pass_tensor(data)
        return data.numpy().tobytes()

    def pass_tensor(self, tensor: Tensor) -> None:
        """Passes on the bytes of a tensor; ranks other than the root receive into it."""
        flat = tensor.detach().reshape(-1)
        step = max(1, _PIECE_BYTES // flat.element_size())
        for low in range(0, flat.numel(), step):
            self._pass_piece(flat[low : low + step].cpu().contiguous().view(torch.uint8))

    def _pass_piece(self, piece: Tensor) -> None:
        if self._parent is not None:
            receive(piece, self._parent)
        for child in self._children:
            self._sent.append(start_send(piece, child))
        while len(self._sent) > _MAX_SENDS_PER_CHILD * len(self._children):
            self._sent.popleft().wait()

    def wait(self) -> None:
        """Waits until everything is sent."""
        while self._sent:
            self._sent.popleft().wait()


def extract_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Returns a value with descriptions in place of its large tensors, which are appended to `tensors`."""
    if isinstance(value, Tensor):
        if value.nbytes <= _SMALL_BYTES:
            # A clone, because pickle sends the whole storage of a view.
            return value.detach().cpu().clone()
        tensors.append(value)
        return _TensorSpec(value.dtype, tuple(value.shape))
    if isinstance(value, dict):
        return {k: extract_tensors(v, tensors) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(extract_tensors(v, tensors) for v in value)
    return value


def insert_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Returns the result of `extract_tensors` with uninitialized tensors in place of the descriptions.

    The tensors are also appended to `tensors`, in the order of `extract_tensors`.
    """
    if isinstance(value, _TensorSpec):
        tensors.append(torch.empty(value.shape, dtype=value.dtype))
        return tensors[-1]
    if isinstance(value, dict):
        return {k: insert_tensors(v, tensors) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(insert_tensors(v, tensors) for v in value)
    return value


def copy_to_host(
    value: dict[str, Any], into: dict[str, Any] | None = None, whole: Callable[[Tensor], Tensor] = Tensor.detach
) -> dict[str, Any]:
    """Returns a deep copy of a value with its tensors on the CPU, reusing the memory of an older copy where it fits.

    Args:
        value: Tensors in dictionaries, lists and tuples.
        into: An older copy that is no longer needed.
        whole: Returns the tensor to copy for one in `value`, for example the whole of a shard.
    """
    devices: set[torch.device] = set()
    memory = iter(page_locked_like(list(_without_memory(value, into))))
    copy: dict[str, Any] = _start_copy(value, into, whole, devices, memory)
    for device in devices:
        cuda.current_stream(device).synchronize()
    return copy


def _without_memory(value: Any, into: Any) -> Iterator[Tensor]:
    """Yields the tensors on a device for which the older copy has no memory, in the order of `_start_copy`."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu" and not _is_alike(value, into):
            yield value
    elif isinstance(value, dict):
        old_values = into if isinstance(into, dict) else {}
        for k, v in value.items():
            yield from _without_memory(v, old_values.get(k))
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _without_memory(v, None)


def _is_alike(value: Tensor, into: Any) -> bool:
    """Returns whether `into` is a tensor of the same dtype and shape."""
    return isinstance(into, Tensor) and (into.dtype, into.shape) == (value.dtype, value.shape)


def _start_copy(
    value: Any, into: Any, whole: Callable[[Tensor], Tensor], devices: set[torch.device], memory: Iterator[Tensor]
) -> Any:
    """Returns the copy, which must not be read before the `devices` have done their copies; adds to `devices`."""
    if isinstance(value, Tensor):
        target = next(memory) if value.device.type != "cpu" and not _is_alike(value, into) else into
        value = whole(value)
        if value.device.type == "cpu":
            return into.copy_(value) if _is_alike(value, into) else value.to("cpu", copy=True).contiguous()
        devices.add(value.device)
        if not _is_alike(value, target):
            target = torch.empty(value.shape, dtype=value.dtype)
        return target.copy_(value, non_blocking=True)
    if isinstance(value, dict):
        old_values = into if isinstance(into, dict) else {}
        return {k: _start_copy(v, old_values.get(k), whole, devices, memory) for k, v in value.items()}
    # A checkpoint with NumPy's scalars could not be loaded.
    if isinstance(value, np.float64 | np.integer | np.bool_):
        return value.item()
    if isinstance(value, list | tuple):
        return type(value)(_start_copy(v, None, whole, devices, memory) for v in value)
    return value


_ALIGNED_BYTES = 64
# The lock is reentrant: the garbage collector may free another block while this thread has the lock.
_lock = threading.RLock()
_free_blocks: list[mmap.mmap] = []
_is_refused = False
"""Whether the driver has refused to lock memory; then it is not asked again."""


def aligned_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a block that a tensor takes.

    They are a multiple of the alignment, and never 0, so that no two tensors have the same address.
    """
    return max(1, -(-tensor.nbytes // _ALIGNED_BYTES)) * _ALIGNED_BYTES


def page_locked_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns contiguous uninitialized tensors of the shapes and dtypes of others, in one block of page-locked memory.

    If the driver does not lock more memory, the block is pageable: copies are then slower, but the same.
    """
    return list(_make_views(tensors, _take_block(sum(map(aligned_bytes, tensors))))) if tensors else []


def _make_views(tensors: Sequence[Tensor], block: NDArray[np.uint8]) -> Iterator[Tensor]:
    start = 0
    for tensor in tensors:
        part = torch.from_numpy(block[start : start + tensor.nbytes])
        yield part.view(tensor.dtype).view(tensor.shape)
        start += aligned_bytes(tensor)


def _take_block(size: int) -> NDArray[np.uint8]:
    """Returns a block of `size` bytes, which can be reused when no tensor uses a part of it any more."""
    with _lock:
        memory = next((block for block in _free_blocks if len(block) == size), None)
        if memory is not None:
            _free_blocks.remove(memory)
        while _free_blocks:
            cuda.cudart().cudaHostUnregister(_address(_free_blocks.pop()))
        if memory is None:
            memory = mmap.mmap(-1, size)
            if not _lock_pages(memory):
                return np.frombuffer(memory, np.uint8)
    array = np.frombuffer(memory, np.uint8)
    weakref.finalize(array, _release_block, memory).atexit = False
    return array


def _release_block(memory: mmap.mmap) -> None:
    """Keeps an unused block for the next copy.

    It is not unlocked here: the thread that drops a block last may have another present device, on which the unlocking
    would create a context.
    """
    with _lock:
        _free_blocks.append(memory)


def _lock_pages(memory: mmap.mmap) -> bool:
    """Page-locks a block; returns whether the driver did it."""
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
        # The runtime reports the error once more, at the next kernel.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return False


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
