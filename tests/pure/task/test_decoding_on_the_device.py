"""Values that tasks make on the host are copied to the device asynchronously, and constants are copied once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ray_app import devices
from ray_app.devices import constant_tensor, to_device
from ray_app.task.base import Batch, Task
from ray_app.task.image import ImageClassification
from ray_app.task.tabular import TabularClassification
from tests.support.fake_cuda import DEVICE

ROWS, CLASSES = 6, 3
CPU = torch.device("cpu")


class CopyLog(TorchDispatchMode):
    """Records the copies from the host to the device, and those for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.blocking_copies: list[str] = []
        self.copies = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        options = kwargs or {}
        if str(operator).startswith("aten._to_copy") and args[0].device == CPU and options.get("device") == DEVICE:
            self.copies += 1
            if not options.get("non_blocking"):
                self.blocking_copies.append(str(operator))
        elif str(operator).startswith("aten.copy_") and args[0].device == DEVICE and args[1].device == CPU:
            self.copies += 1
            if not (len(args) > 2 and args[2]):
                self.blocking_copies.append(str(operator))
        return operator(*args, **options)


def image(**settings: Any) -> Task:
    task = ImageClassification(**settings)
    task.num_classes, task.channels = CLASSES, 3
    task.weights = [1.0, 2.0, 3.0]
    return task


def tabular(**settings: Any) -> Task:
    task = TabularClassification(**settings)
    task.num_classes, task.weights = CLASSES, [1.0, 2.0, 3.0]
    return task


# Each with the number of copies in a step, and of constants that the first step creates on the device.
TASKS: dict[str, tuple[Callable[[], Task], int, int]] = {
    "flip and shift": (lambda: image(flip=True, crop_padding=2), 4, 1),
    "mixup and cutmix": (lambda: image(mixup=0.2, cutmix=1.0, label_smoothing=0.1), 4, 1),
    "mean and deviation": (lambda: image(mean=[0.4, 0.5, 0.6], std=[0.2, 0.2, 0.3]), 0, 3),
    "class weights": (tabular, 0, 1),
}


def run_step(task: Task, device: torch.device) -> None:
    """Runs the operations of a step on the rows of a task."""
    batch: Batch = {
        "image": torch.zeros(ROWS, 3, 8, 8, dtype=torch.uint8, device=device),
        "label": torch.zeros(ROWS, dtype=torch.int64, device=device),
    }
    fields = task.augment(batch, torch.arange(ROWS))
    if isinstance(task, ImageClassification):
        task.loss(task.forward(nn.Sequential(nn.Flatten(), nn.Linear(192, CLASSES, device=device)), fields), fields)


@pytest.mark.parametrize(("make", "num_copies", "num_constants"), TASKS.values(), ids=TASKS.keys())
def test_a_step_waits_for_no_copy_to_the_device(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Task], num_copies: int, num_constants: int
) -> None:
    create, constants = torch.tensor, list[Any]()

    def create_and_record(values: Any, **options: Any) -> Tensor:
        if options.get("device") == DEVICE:
            constants.append(values)
        return create(values, **options)

    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    # The host waits for this copy, too, and `CopyLog` does not record it.
    monkeypatch.setattr(torch, "tensor", create_and_record)
    devices._constant.cache_clear()
    task, copy_log = make(), CopyLog()
    run_step(task, DEVICE)
    assert len(constants) == num_constants
    with copy_log:
        run_step(task, DEVICE)
    assert copy_log.blocking_copies == []
    assert copy_log.copies == num_copies
    assert len(constants) == num_constants, "the second step created a constant again"


def test_a_blocking_copy_is_recorded() -> None:
    copy_log = CopyLog()
    with copy_log:
        torch.zeros(2).to(DEVICE)
        torch.zeros(2, device=DEVICE).copy_(torch.zeros(2))
        torch.zeros(2).to(DEVICE, non_blocking=True)
    assert (len(copy_log.blocking_copies), copy_log.copies) == (2, 3)


def test_a_constant_is_created_once_per_device_and_type() -> None:
    first = constant_tensor([0.5, 1.5], DEVICE)
    assert constant_tensor((0.5, 1.5), DEVICE) is first
    assert constant_tensor([0.5, 1.5], CPU).tolist() == [0.5, 1.5]


def test_values_for_the_host_are_not_copied() -> None:
    values = torch.arange(3)
    assert to_device(values, CPU) is values
