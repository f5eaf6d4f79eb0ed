"""Page-locked memory is exactly as large as its tensors, and the next copy reuses it or releases it."""

from __future__ import annotations

import gc

import pytest
import torch

from ray_app.checkpoint.format import TRAINING, Snapshot, pack, unpack
from ray_app.train.state import transfer
from ray_app.train.state.transfer import aligned_bytes, page_locked_like


class FakeCuda:
    """Replaces `torch.cuda.cudart()`, and records which memory it has locked.

    Attributes:
        locked: Bytes by address.
        error: The error code of `cudaHostRegister`, 0 if it locks the memory.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.locked: dict[int, int] = {}
        self.error = 0
        patch.setattr(torch.cuda, "cudart", lambda: self)
        patch.setattr(transfer, "_free_blocks", [])
        patch.setattr(transfer, "_is_refused", False)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        """See CUDA's runtime."""
        del flags
        if not self.error:
            self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        """See CUDA's runtime."""
        del self.locked[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


STATE = [
    torch.zeros(33),
    torch.zeros((2, 3), dtype=torch.bfloat16),
    torch.tensor(7),
    torch.zeros(0),
    torch.zeros(5, dtype=torch.bool),
]


def test_copies_share_one_block_of_exactly_their_size(driver: FakeCuda) -> None:
    views = page_locked_like(STATE)
    assert [(v.shape, v.dtype, v.is_contiguous()) for v in views] == [(v.shape, v.dtype, True) for v in STATE]
    assert sum(driver.locked.values()) == 192 + 64 + 64 + 64 + 64, (
        "the block is not of the exact size; PyTorch rounds up to a power of two"
    )
    for number, value in enumerate(views):
        value.fill_(number % 2)
    assert [v.float().unique().tolist() for v in views] == [[0.0], [1.0], [0.0], [], [0.0]]


def test_a_checkpoint_of_a_copy_has_each_tensor_once_for_all_dtypes(driver: FakeCuda) -> None:
    """`torch.save` writes the whole storage of a tensor, so a storage that all tensors share would put the
    model into `training.pt` as well.
    """
    model, moment, mask, empty, half = page_locked_like(
        [torch.zeros(9999), torch.zeros(9), torch.zeros(9, dtype=torch.bool), *STATE[3:0:-2]]
    )
    copy = Snapshot(
        1, {"weight": model}, {"state": {0: {"moment": moment, "mask": mask, "empty": empty, "half": half}}}, None
    )
    files = pack(copy)
    assert len(files[TRAINING]) < model.nbytes
    unpacked = unpack(files)
    assert torch.equal(unpacked.model["weight"], model)
    assert all(torch.equal(unpacked.optimizer["state"][0][name], v) for name, v in copy.optimizer["state"][0].items())


@pytest.mark.rest
def test_a_block_is_reused_once_no_view_of_it_is_left(driver: FakeCuda) -> None:
    first = page_locked_like(STATE)
    [address] = driver.locked
    last = first[-1]
    del first
    gc.collect()
    second = page_locked_like(STATE)
    assert len(driver.locked) == 2, "the first block was reused although a view of it is left"
    del last
    gc.collect()
    third = page_locked_like(STATE)
    assert third[0].data_ptr() == address
    assert len(driver.locked) == 2
    del second, third
    gc.collect()
    fourth = page_locked_like(STATE)
    assert [*driver.locked] == [fourth[0].data_ptr()], "a free block that the next copy does not use was not released"


@pytest.mark.rest
def test_a_free_block_of_another_size_is_released(driver: FakeCuda) -> None:
    for size in (100, 200, 300):
        views = page_locked_like([torch.zeros(size)])
        assert list(driver.locked.values()) == [aligned_bytes(views[0])]
        del views
        gc.collect()


def test_copies_are_pageable_where_the_driver_locks_no_memory(
    driver: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    driver.error = 2
    for _ in range(2):
        [value] = page_locked_like([torch.zeros(3)])
        value.fill_(1)
    assert value.tolist() == [1.0, 1.0, 1.0]
    assert [record.getMessage() for record in caplog.records] == [
        "The driver cannot lock 64 bytes of host memory (CUDA error 2); copies of the state take longer"
    ]
