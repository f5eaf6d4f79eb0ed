"""The simulated devices (`tests/device`) do what a GPU does where code could get it wrong."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_app.testing import KilledError, WorkerPool


@contextmanager
def race(message: str) -> Iterator[None]:
    """Expects one access out of order in its block, raised there or at the next synchronization."""
    from tests.device.sim import SIM

    before = len(SIM.races())
    with suppress(RuntimeError):
        yield
    [text] = SIM.races()[before:]
    assert message in text


def side_stream() -> torch.Stream:
    from tests.device.sim import DEVICE

    return torch.Stream(DEVICE)


def test_operators_refuse_tensors_of_several_devices(device_pool: WorkerPool) -> None:
    device_pool.run(1, mix_devices)


def mix_devices(rank: int, store: Path) -> None:
    from tests.device.sim import DEVICE

    here = torch.ones(3, device=DEVICE)
    for other in (torch.ones(3), torch.ones(3, device="sim:1")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            here + other
    assert (here + torch.tensor(2.0)).tolist() == [3.0] * 3
    assert here[torch.tensor([1])].tolist() == [1.0]
    with pytest.raises(TypeError, match="can't convert sim:0"):
        here.numpy()


def test_the_host_cannot_read_the_memory_of_a_device(device_pool: WorkerPool) -> None:
    [outcome] = device_pool.call(1, read_by_address)
    assert isinstance(outcome.error, KilledError), outcome.value


def read_by_address(rank: int, store: Path) -> bytes:
    from tests.device.sim import DEVICE

    return ctypes.string_at(torch.ones(3, device=DEVICE).data_ptr(), 4)


def test_a_device_draws_other_numbers_than_the_host_from_the_same_seed(device_pool: WorkerPool) -> None:
    device_pool.run(1, draw)


def draw(rank: int, store: Path) -> None:
    from tests.device.sim import DEVICE

    def numbers(device: Any, seed: int) -> list[list[float]]:
        torch.manual_seed(seed)
        tensors = [torch.rand(4, device=device), nn.functional.dropout(torch.ones(64, device=device), 0.5)]
        return [tensor.tolist() for tensor in tensors]

    assert numbers(DEVICE, 5) == numbers(DEVICE, 5) == numbers("sim:1", 5)
    assert all(a != b for a, b in zip(numbers(DEVICE, 5), numbers("cpu", 5), strict=True))
    assert all(a != b for a, b in zip(numbers(DEVICE, 5), numbers(DEVICE, 6), strict=True))
    host = torch.get_rng_state()
    torch.rand(4, device=DEVICE)
    assert torch.equal(host, torch.get_rng_state()), "the device has drawn from the generator of the host"


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("case", ["read", "write", "free", "reuse of pinned memory", "read too early"])
def test_work_of_several_streams_and_the_host_is_ordered_by_events_and_waits_alone(
    device_pool: WorkerPool, case: str, ordered: bool
) -> None:
    [calls] = device_pool.run(1, run_case, case, ordered)
    assert calls == []


def run_case(rank: int, store: Path, case: str, ordered: bool) -> list[str]:
    from tests.device.sim import DEVICE, SIM

    cases: dict[str, tuple[Callable[[bool, torch.Stream], None], str]] = {
        "read": (read_on_another_stream, "reads memory that aten::fill_ on stream"),
        "write": (write_on_another_stream, "writes memory that aten::"),
        "free": (free_while_another_stream_uses_it, "record_stream was not called"),
        "reuse of pinned memory": (change_a_source, "has changed page-locked memory"),
        "read too early": (read_a_copy, ""),
    }
    act, message = cases[case]
    before = SIM.races()
    if ordered or not message:
        act(ordered, side_stream())
    else:
        with race(message):
            act(ordered, side_stream())
    torch.accelerator.synchronize(DEVICE)
    return SIM.races()[len(before) :] if ordered else []


def read_on_another_stream(ordered: bool, side: torch.Stream) -> None:
    from tests.device.sim import DEVICE

    values = torch.ones(3, device=DEVICE)
    if ordered:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        assert values.sum() == 3


def write_on_another_stream(ordered: bool, side: torch.Stream) -> None:
    from tests.device.sim import DEVICE

    values, computing = torch.ones(3, device=DEVICE), torch.accelerator.current_stream()
    before_read = computing.record_event()
    values.sum()
    side.wait_event(computing.record_event() if ordered else before_read)
    with side:
        values.add_(1)
    computing.wait_stream(side)


def free_while_another_stream_uses_it(ordered: bool, side: torch.Stream) -> None:
    from tests.device.sim import DEVICE

    values = torch.ones(3, device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        values.sum()
    if ordered:
        values.record_stream(side)
    del values
    torch.ones(5, device=DEVICE)


def change_a_source(ordered: bool, side: torch.Stream) -> None:
    from tests.device.sim import DEVICE

    source = torch.ones(3).pin_memory()
    copied = source.to(DEVICE, non_blocking=True)
    if ordered:
        torch.accelerator.current_stream().synchronize()
    source.fill_(2)
    assert copied.tolist() == [1.0] * 3


def read_a_copy(ordered: bool, side: torch.Stream) -> None:
    from tests.device.sim import DEVICE

    copied = torch.ones(3, device=DEVICE).to("cpu", non_blocking=True)
    if ordered:
        torch.accelerator.current_stream().synchronize()
    assert copied.isnan().all() != ordered


def test_memory_is_poisoned_counted_and_limited(device_pool: WorkerPool) -> None:
    device_pool.run(1, use_memory)


def use_memory(rank: int, store: Path) -> None:
    from tests.device.sim import DEVICE, SIM

    before = torch.accelerator.memory_allocated(DEVICE)
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    address = torch.ones(1000, device=DEVICE).data_ptr()
    values = torch.empty(1000, device=DEVICE)
    assert values.data_ptr() == address, "the freed block was not used again at once"
    assert values.isnan().all()
    assert torch.accelerator.memory_allocated(DEVICE) == before + 4000
    assert torch.accelerator.max_memory_allocated(DEVICE) >= before + 4000
    SIM.fail_allocation(2)
    torch.empty(1, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(1, device=DEVICE)
    torch.empty(1, device=DEVICE)


def test_an_error_of_a_device_is_raised_at_the_next_synchronization_and_ever_after(device_pool: WorkerPool) -> None:
    [outcome] = device_pool.call(1, break_device)
    assert isinstance(outcome.error, torch.AcceleratorError), outcome.trace


def break_device(rank: int, store: Path) -> None:
    """Ends with an error, so that the pool replaces the process."""
    from tests.device.sim import SIM

    values = torch.ones(3, device="sim:1")
    SIM.fail_device(1, "an illegal memory access was encountered")
    values += 1
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        values.sum().item()
    assert torch.ones(3, device="sim:0").sum() == 3
    values.add_(1)


def test_a_new_thread_computes_on_the_first_device(device_pool: WorkerPool) -> None:
    device_pool.run(1, compute_in_a_thread)


def compute_in_a_thread(rank: int, store: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from tests.device.sim import NAME

    torch.accelerator.set_device_index(2)
    assert torch.ones(1, device=NAME).device.index == 2
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(lambda: torch.ones(1, device=NAME)).result().device.index == 0
    torch.accelerator.set_device_index(0)


def test_an_optimizer_and_a_convolution_compute_the_bits_of_the_cpu(device_pool: WorkerPool) -> None:
    device_pool.run(1, train_alike)


def train_alike(rank: int, store: Path) -> None:
    from tests.device.sim import DEVICE

    def train(device: Any) -> list[Tensor]:
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)]
        model = nn.Sequential(*layers).to(device)
        x, y = torch.randn(16, 1, 8, 8), torch.arange(16) % 10
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        return [value.cpu() for value in model.state_dict().values()]

    assert all(torch.equal(a, b) for a, b in zip(train(DEVICE), train("cpu"), strict=True))
