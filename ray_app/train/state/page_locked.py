"""Page-locked host memory, from and to which a device copies by itself while the host goes on.

PyTorch's own (`pin_memory=True`) rounds each tensor up to a power of two and never gives memory back: what a snapshot of a big model takes
would be up to twice the model for each copy, and grow with each kind of copy. Here a copy is one piece of exactly its size. When no tensor
uses it any more, the next copy takes it, or gives it back if it is of another size: to lock memory takes a second for some gigabytes.

Each tensor has a storage of its own, which is its part of the piece: `torch.save` writes the whole storage of a tensor, and refuses tensors
of different types in one storage.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, cuda

logger = logging.getLogger(__name__)

_ALIGNED_BYTES = 64
_lock = threading.RLock()  # the collector may drop another piece while this thread is in here
_spare: list[mmap.mmap] = []
_is_refused = False


def bytes_of(tensor: Tensor) -> int:
    """Returns the bytes of a piece that a tensor takes: a multiple of the alignment, and never 0, so that no two tensors begin alike."""
    return max(1, -(-tensor.nbytes // _ALIGNED_BYTES)) * _ALIGNED_BYTES


def views_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors of the shapes and dtypes of others, in one new piece of page-locked memory; their values are not set.

    Where the driver locks no more memory it is pageable, which makes copies slower, and no others.
    """
    return list(_views(tensors, _piece(sum(map(bytes_of, tensors))))) if tensors else []


def _views(tensors: Sequence[Tensor], piece: NDArray[np.uint8]) -> Iterator[Tensor]:
    start = 0
    for tensor in tensors:
        part = torch.from_numpy(piece[start : start + tensor.nbytes])
        yield part.view(tensor.dtype).view(tensor.shape)
        start += bytes_of(tensor)


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

    Not unlocked here: the thread that drops a piece last may be one whose present device is another, which that would open.
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
        logger.warning("The driver locks no %d bytes of host memory (CUDA error %d); copies of the state take longer", len(memory), error)
        with suppress(RuntimeError):  # the runtime reports the error once more, at the next kernel
            torch.ones(1, device="cuda")
    return False


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
