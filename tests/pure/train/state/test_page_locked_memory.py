"""Page-locked memory is exactly as large as what it is for, and the next copy takes it or gives it back."""

from __future__ import annotations

import gc

import pytest
import torch

from ray_app.checkpoint.format import TRAINING, Snapshot, pack, unpack
from ray_app.train.state import transfer
from ray_app.train.state.transfer import aligned_bytes, page_locked_like


class Driver:
    """In the place of `torch.cuda`: knows which memory it has locked.

    Attributes:
        locked: Bytes by address.
        error: What it answers, 0 if it locks.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.locked: dict[int, int] = {}
        self.error = 0
        patch.setattr(transfer, "cuda", self)
        patch.setattr(transfer, "_free_blocks", [])
        patch.setattr(transfer, "_is_refused", False)

    def cudart(self) -> Driver:
        """See `torch.cuda.cudart`."""
        return self

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
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


STATE = [
    torch.zeros(33),
    torch.zeros((2, 3), dtype=torch.bfloat16),
    torch.tensor(7),
    torch.zeros(0),
    torch.zeros(5, dtype=torch.bool),
]


def test_copies_lie_in_one_piece_of_their_size(driver: Driver) -> None:
    found = page_locked_like(STATE)
    assert [(v.shape, v.dtype, v.is_contiguous()) for v in found] == [(v.shape, v.dtype, True) for v in STATE]
    assert sum(driver.locked.values()) == 192 + 64 + 64 + 64 + 64, "not rounded up to a power of two"
    for number, value in enumerate(found):
        value.fill_(number % 2)
    assert [v.float().unique().tolist() for v in found] == [[0.0], [1.0], [0.0], [], [0.0]]


def test_a_checkpoint_of_a_copy_holds_each_tensor_once_and_takes_all_types(driver: Driver) -> None:
    """`torch.save` writes the whole storage of a tensor: one that all tensors shared would put the model into
    `training.pt`, too.
    """
    model, moment, mask, empty, half = page_locked_like(
        [torch.zeros(9999), torch.zeros(9), torch.zeros(9, dtype=torch.bool), *STATE[3:0:-2]]
    )
    copy = Snapshot(
        1, {"weight": model}, {"state": {0: {"moment": moment, "mask": mask, "empty": empty, "half": half}}}, None
    )
    files = pack(copy)
    assert len(files[TRAINING]) < model.nbytes
    again = unpack(files)
    assert torch.equal(again.model["weight"], model)
    assert all(torch.equal(again.optimizer["state"][0][name], v) for name, v in copy.optimizer["state"][0].items())


def test_memory_is_used_again_once_nothing_uses_it(driver: Driver) -> None:
    first = page_locked_like(STATE)
    [address] = driver.locked
    last = first[-1]
    del first
    gc.collect()
    other = page_locked_like(STATE)
    assert len(driver.locked) == 2, "a part of the first is still used"
    del last
    gc.collect()
    again = page_locked_like(STATE)
    assert again[0].data_ptr() == address
    assert len(driver.locked) == 2
    del other, again
    gc.collect()
    kept = page_locked_like(STATE)
    assert [*driver.locked] == [kept[0].data_ptr()], "what the next copy does not take is given back"


@pytest.mark.rest
def test_memory_of_another_size_is_not_kept_beside_new_one(driver: Driver) -> None:
    for size in (100, 200, 300):
        views = page_locked_like([torch.zeros(size)])
        assert list(driver.locked.values()) == [aligned_bytes(views[0])]
        del views
        gc.collect()


def test_memory_is_pageable_where_the_driver_locks_none(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.error = 2
    for _ in range(2):
        [value] = page_locked_like([torch.zeros(3)])
        value.fill_(1)
    assert value.tolist() == [1.0, 1.0, 1.0]
    assert [record.getMessage() for record in caplog.records] == [
        "The driver locks no 64 bytes of host memory (CUDA error 2); copies of the state take longer"
    ]
