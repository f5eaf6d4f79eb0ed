"""Transfers of training states between ranks, and copies of states in host memory.

`transfer_snapshot` sends a state to the ranks that lack it, along a tree of ranks, tensor by tensor and in pieces of at
most `_PIECE_BYTES`. No large object is pickled or copied while Python's global lock is held, so heartbeats continue
however large the state is. A tensor is sent from the memory in which it is, and is received into the memory in which it
stays. Tensors on a device pass through host memory piece by piece, unless the devices have collectives of their own:
then they travel from device to device.

`copy_to_host` copies a state. It starts the copies of all device tensors before it waits for any. Their targets are in
page-locked memory, into which a device copies by itself while the host continues. PyTorch's page-locked memory
(`pin_memory=True`) rounds each tensor up to a power of two and is never freed, so each copy of a large model could take
twice the memory of the model. Here the targets of a copy are in one block of the size that they need. When no tensor
uses a block any more, the next copy reuses it, or frees it if it has another size; to lock a few gigabytes anew takes a
second. Each tensor is the whole of its storage, because `torch.save` writes the whole storage of a tensor, and refuses
tensors of different dtypes in one storage.

Ranks that only keep a copy make it like this, too, because the next step waits for the slowest rank. Tests run the code
for the CPU, and check the order of the calls of the code for the GPU.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import mmap
import pickle
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ray_app.checkpoint.format import Snapshot
from ray_app.devices import HOST, accelerator, kind_of
from ray_app.reduction.messages import broadcast, receive_value, start_send_value
from ray_app.reduction.peer_errors import check_device_errors, collective, launch_guard
from ray_app.reduction.reducer import state_checksum
from ray_app.reduction.transport import P2PWork, receive, start_send
from ray_app.reduction.world import World
from ray_app.torch_private import foreach_copy_

logger = logging.getLogger(__name__)

_PIECE_BYTES = 16 << 20
"""Maximum size of a message of `transfer_snapshot`."""
_SMALL_BYTES = 4096
"""Tensors up to this size are pickled with the rest of the state, because a message for each would take longer."""
_MAX_SENDS_PER_CHILD = 4
"""Maximum number of pieces that are being sent to one child at a time."""


class _TensorSpec(NamedTuple):
    """Takes the place of a tensor in a pickled state; the tensor itself travels separately."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def ranks_without_state(steps: Sequence[int], source: int) -> list[int]:
    """Returns the ranks that do not have the state of the rank `source`.

    Args:
        steps: The step of every rank; negative if the rank has no state.
        source: A rank.
    """
    return [rank for rank, step in enumerate(steps) if rank != source and (step < 0 or step != steps[source])]


def divergent_ranks(steps: Sequence[int], checksums: Sequence[object]) -> list[int]:
    """Returns the ranks at the highest step with another checksum of the parameters than the majority of these ranks.

    If no checksum has a majority, these are all ranks at the highest step.

    Args:
        steps: The step of every rank.
        checksums: The checksum of every rank; only those of ranks at the highest step are read.
    """
    newest = [rank for rank, step in enumerate(steps) if step == max(steps)]
    checksum, count = Counter(checksums[rank] for rank in newest).most_common(1)[0]
    return [rank for rank in newest if checksums[rank] != checksum or 2 * count <= len(newest)]


def snapshot_checksum(snapshot: Snapshot) -> tuple[int, bytes]:
    """Returns a checksum of a state without its step: that of its tensors, and the SHA-256 of all else.

    The second part may differ for equal states of several processes, for example by the order of a set.
    """
    tensors: list[Tensor] = []
    head = extract_tensors(_values_of(snapshot)[1:], tensors, lambda _: False)
    return state_checksum(tensors), hashlib.sha256(pickle.dumps(head)).digest()


def _values_of(snapshot: Snapshot) -> list[Any]:
    return [getattr(snapshot, part.name) for part in fields(Snapshot)]


def transfer_snapshot(
    snapshot: Snapshot | None, world: World, source: int, to: Sequence[int], device: torch.device | None = None
) -> Snapshot | None:
    """Sends the state of the rank `source` to the ranks `to`; a collective of all ranks.

    Args:
        snapshot: On the rank `source` its state; the tensors may be those that training changes, also on a device.
        world: The workers of the generation.
        source: The rank with the state.
        to: The ranks that receive the state, the same list on all ranks.
        device: The device that receives the state, if devices have collectives; None for host memory.

    Returns:
        On the ranks `to` the received state, in new memory; on all other ranks the argument `snapshot`.

    Raises:
        PeerLostError: A rank left meanwhile.
    """
    rank, order = world.rank, [source, *to]
    if to and device is not None and world.has_device_collectives:
        return _broadcast_snapshot(snapshot, world, source, to, device)
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
            node.pass_head(extract_tensors(_values_of(snapshot), tensors))
        else:
            snapshot = Snapshot(*insert_tensors(node.pass_head(None), tensors))
        for tensor in tensors:
            node.pass_tensor(tensor)
        node.wait()
    return snapshot


def _broadcast_snapshot(
    snapshot: Snapshot | None, world: World, source: int, to: Sequence[int], device: torch.device
) -> Snapshot | None:
    """Does what `transfer_snapshot` does, from device to device.

    All ranks take part in the broadcasts, since they have one group, and those not in `to` drop what they receive.
    """
    values, tensors = _values_of(snapshot) if snapshot is not None else [], list[Tensor]()
    head = broadcast(extract_tensors(values, tensors, lambda t: t.device != device), source, world)
    if world.rank != source:
        received = Snapshot(*insert_tensors(head, tensors, device if world.rank in to else torch.device("meta")))
        snapshot = received if world.rank in to else snapshot
    flat = [tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in tensors]
    pieces = [piece for whole in flat for piece in whole.split(_PIECE_BYTES)]
    ends = accumulate(map(len, pieces))
    with launch_guard(world)():
        for _, group in groupby(zip(pieces, ends, strict=True), lambda piece: piece[1] // _PIECE_BYTES):
            parts = [piece for piece, _ in group]
            lengths = [*map(len, parts)]
            is_source = world.rank == source
            packed = torch.cat(parts) if is_source else torch.empty(sum(lengths), dtype=torch.uint8, device=device)
            dist.broadcast(packed, source)
            if world.rank in to:
                foreach_copy_(parts, packed.split(lengths))
    # A failed broadcast leaves garbage.
    check_device_errors()
    return snapshot


class _TreeNode:
    """This rank in the tree along which a state travels.

    Args:
        parent: The rank from which this rank receives; None at the root.
        children: The ranks to which this rank sends.
    """

    def __init__(self, parent: int | None, children: Sequence[int]) -> None:
        self._parent, self._children = parent, children
        self._sent: deque[P2PWork] = deque()

    def pass_head(self, head: Any) -> Any:
        """Receives the state without its large tensors, unless this is the root; sends it to the children, returns it.

        Args:
            head: It at the root; not read on other ranks.
        """
        if self._parent is not None:
            head = receive_value(self._parent)
        for child in self._children:
            self._sent += start_send_value(head, child)
        return head

    def pass_tensor(self, tensor: Tensor) -> None:
        """Receives into a tensor, unless this is the root, and sends its bytes to the children."""
        flat = tensor.detach().reshape(-1)
        piece_numel = max(1, _PIECE_BYTES // flat.element_size())
        for low in range(0, flat.numel(), piece_numel):
            # For a contiguous tensor on the CPU these calls copy nothing, so ranks receive into the tensor itself.
            self._pass_piece(flat[low : low + piece_numel].cpu().contiguous().view(torch.uint8))

    def _pass_piece(self, piece: Tensor) -> None:
        """Receives into a piece, unless this is the root, and starts to send it to the children."""
        if self._parent is not None:
            receive(piece, self._parent)
        for child in self._children:
            self._sent.append(start_send(piece, child))
        while len(self._sent) > _MAX_SENDS_PER_CHILD * len(self._children):
            self._sent.popleft().wait()

    def wait(self) -> None:
        """Waits until all pieces have been sent."""
        while self._sent:
            self._sent.popleft().wait()


def is_small(tensor: Tensor) -> bool:
    """Returns whether a tensor travels with the rest of the state, see `_SMALL_BYTES`."""
    return tensor.nbytes <= _SMALL_BYTES


def extract_tensors(value: Any, tensors: list[Tensor], stays: Callable[[Tensor], bool] = is_small) -> Any:
    """Returns a copy of a state with a `_TensorSpec` in place of each tensor, unless it `stays`.

    It appends these tensors to `tensors`.
    """
    if isinstance(value, Tensor):
        if stays(value):
            # The tensor is cloned, because pickle writes the whole storage of a view.
            return value.detach().cpu().clone()
        tensors.append(value)
        return _TensorSpec(value.dtype, tuple(value.shape))
    if isinstance(value, dict):
        return {k: extract_tensors(v, tensors, stays) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(extract_tensors(v, tensors, stays) for v in value)
    return copy.deepcopy(value)


def insert_tensors(value: Any, tensors: list[Tensor], device: torch.device = HOST) -> Any:
    """Returns the result of `extract_tensors` with an uninitialized tensor in place of each `_TensorSpec`.

    It also appends these tensors to `tensors`, in the order of `extract_tensors`.
    """
    if isinstance(value, _TensorSpec):
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device=device))
        return tensors[-1]
    if isinstance(value, dict):
        return {k: insert_tensors(v, tensors, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(insert_tensors(v, tensors, device) for v in value)
    return value


def copy_to_host(value: dict[str, Any], into: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns a deep copy of a value with its tensors on the CPU.

    Args:
        value: Tensors and other values in dictionaries, lists and tuples.
        into: An older copy that is no longer needed. A tensor in a dictionary is copied into the older copy's tensor if
            that has the same dtype and shape.
    """
    devices: set[torch.device] = set()
    memory = iter(page_locked_like(list(_tensors_without_memory(value, into))))
    copy: dict[str, Any] = _start_copy(value, into, devices, memory)
    for device in devices:
        kind_of(device).synchronize_stream(device)
    return copy


def _tensors_without_memory(value: Any, into: Any) -> Iterator[Tensor]:
    """Yields the tensors on a device for which the older copy has no memory, in the order of `_start_copy`."""
    if isinstance(value, Tensor):
        if not kind_of(value.device).is_host and not _is_alike(value, into):
            yield value
    elif isinstance(value, dict):
        old_values = into if isinstance(into, dict) else {}
        for k, v in value.items():
            yield from _tensors_without_memory(v, old_values.get(k))
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _tensors_without_memory(v, None)


def _is_alike(value: Tensor, into: Any) -> bool:
    """Returns whether `into` is a tensor of the same dtype and shape."""
    return isinstance(into, Tensor) and (into.dtype, into.shape) == (value.dtype, value.shape)


def _start_copy(value: Any, into: Any, devices: set[torch.device], memory: Iterator[Tensor]) -> Any:
    """Starts to copy a value and returns the copy, which is complete when the queued work of `devices` is done.

    Args:
        value: See `copy_to_host`.
        into: See `copy_to_host`.
        devices: The function adds each device that copies.
        memory: Page-locked targets for the tensors of `_tensors_without_memory`, in the same order.
    """
    if isinstance(value, Tensor):
        value = value.detach()
        if kind_of(value.device).is_host:
            return into.copy_(value) if _is_alike(value, into) else value.to(HOST, copy=True).contiguous()
        devices.add(value.device)
        target = into if _is_alike(value, into) else next(memory)
        return target.copy_(value, non_blocking=True)
    if isinstance(value, dict):
        old_values = into if isinstance(into, dict) else {}
        return {k: _start_copy(v, old_values.get(k), devices, memory) for k, v in value.items()}
    # A checkpoint with scalars of NumPy could not be loaded, so they become numbers of Python.
    if isinstance(value, np.float64 | np.integer | np.bool_):
        return value.item()
    if isinstance(value, list | tuple):
        return type(value)(_start_copy(v, None, devices, memory) for v in value)
    return value


_ALIGNED_BYTES = 64
_lock = threading.RLock()
"""Guards `_free_blocks`.

It is reentrant, because the garbage collector may release another block while a thread holds the lock.
"""
_free_blocks: list[mmap.mmap] = []
"""Page-locked blocks that no tensor uses."""
_is_refused = False
"""Whether the driver has refused to lock memory; then it is not asked again."""


def aligned_bytes(tensor: Tensor) -> int:
    """Returns the number of bytes that a tensor takes in a block.

    It is a multiple of the alignment, and never 0, so that no two tensors have the same address.
    """
    return max(1, -(-tensor.nbytes // _ALIGNED_BYTES)) * _ALIGNED_BYTES


def page_locked_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns contiguous uninitialized tensors of the shapes and dtypes of others, in one block of page-locked memory.

    If the driver refuses to lock memory, the block is pageable, which only makes copies slower.
    """
    return list(make_views(tensors, _take_block(sum(map(aligned_bytes, tensors))))) if tensors else []


def make_views(tensors: Sequence[Tensor], block: NDArray[np.uint8]) -> Iterator[Tensor]:
    """Yields a tensor in a block for each of other tensors, of the same shape and dtype."""
    start = 0
    for tensor in tensors:
        part = torch.from_numpy(block[start : start + tensor.nbytes])
        yield part.view(tensor.dtype).view(tensor.shape)
        start += aligned_bytes(tensor)


def _take_block(size: int) -> NDArray[np.uint8]:
    """Returns a block of `size` bytes, which goes to `_free_blocks` when no tensor uses a part of it any more.

    All other free blocks are given back to the operating system.
    """
    with _lock:
        memory = next((block for block in _free_blocks if len(block) == size), None)
        if memory is not None:
            _free_blocks.remove(memory)
        while _free_blocks:
            accelerator().unlock_pages(_address(_free_blocks.pop()))
        if memory is None:
            memory = mmap.mmap(-1, size)
            # A pageable block is not kept for reuse.
            if not _lock_pages(memory):
                return np.frombuffer(memory, np.uint8)
    array = np.frombuffer(memory, np.uint8)
    weakref.finalize(array, _release_block, memory).atexit = False
    return array


def _release_block(memory: mmap.mmap) -> None:
    """Keeps an unused block for the next copy.

    The block is not unlocked here, because any thread may drop the last reference to it, and in a thread with another
    current device the unlocking would create a context on that device.
    """
    with _lock:
        _free_blocks.append(memory)


def _lock_pages(memory: mmap.mmap) -> bool:
    """Asks the driver of the devices to page-lock a block; returns whether it did."""
    global _is_refused
    if not _is_refused:
        reason = accelerator().lock_pages(_address(memory), len(memory))
        if reason is None:
            return True
        _is_refused = True
        logger.warning(
            "The driver cannot lock %d bytes of host memory (%s); copies of the state take longer", len(memory), reason
        )
    return False


def _address(memory: mmap.mmap) -> int:
    """Returns the address of a block in the memory of this process."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
