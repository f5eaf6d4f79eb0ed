"""What tasks make on the host goes to a device without the host's waiting for it, and constants go there once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ray_app.task.base import Batch, Task
from ray_app.task.device import constant_tensor, to_device
from ray_app.task.image import ImageClassification
from ray_app.task.tabular import TabularClassification
from tests.support.fake_cuda import DEVICE

ROWS, CLASSES = 6, 3
CPU = torch.device("cpu")


class Waits(TorchDispatchMode):
    """Notes the copies from the host to the device that the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.copies = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        given = kwargs or {}
        if str(operator).startswith("aten._to_copy") and args[0].device == CPU and given.get("device") == DEVICE:
            self.copies += 1
            if not given.get("non_blocking"):
                self.found.append(str(operator))
        elif str(operator).startswith("aten.copy_") and args[0].device == DEVICE and args[1].device == CPU:
            self.copies += 1
            if not (len(args) > 2 and args[2]):
                self.found.append(str(operator))
        return operator(*args, **given)


def image(**settings: Any) -> Task:
    task = ImageClassification(**settings)
    task.num_classes, task.channels = CLASSES, 3
    task.weights = [1.0, 2.0, 3.0]
    return task


def tabular(**settings: Any) -> Task:
    task = TabularClassification(**settings)
    task.num_classes, task.weights = CLASSES, [1.0, 2.0, 3.0]
    return task


TASKS = {
    "flip and shift": lambda: image(flip=True, crop_padding=2),
    "mixup and cutmix": lambda: image(mixup=0.2, cutmix=1.0, label_smoothing=0.1),
    "mean and deviation": lambda: image(mean=[0.4, 0.5, 0.6], std=[0.2, 0.2, 0.3]),
    "class weights": tabular,
}


def step(task: Task, device: torch.device) -> None:
    """What a step does with a task's rows before its model."""
    batch: Batch = {
        "image": torch.zeros(ROWS, 3, 8, 8, dtype=torch.uint8, device=device),
        "label": torch.zeros(ROWS, dtype=torch.int64, device=device),
    }
    fields = task.augment(batch, torch.arange(ROWS))
    if isinstance(task, ImageClassification):
        task.loss(task.forward(nn.Sequential(nn.Flatten(), nn.Linear(192, CLASSES, device=device)), fields), fields)


@pytest.mark.parametrize("make", TASKS.values(), ids=TASKS.keys())
def test_a_step_waits_for_no_copy_to_the_device(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Task]) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    task, waits = make(), Waits()
    step(task, DEVICE)  # makes the constants
    with waits:
        step(task, DEVICE)
    assert waits.found == []
    assert waits.copies > 0 or "mean" in str(vars(task)) or isinstance(task, TabularClassification), (
        "nothing was looked at"
    )


def test_a_plain_copy_is_noticed() -> None:
    waits = Waits()
    with waits:
        torch.zeros(2).to(DEVICE)
        torch.zeros(2, device=DEVICE).copy_(torch.zeros(2))
        torch.zeros(2).to(DEVICE, non_blocking=True)
    assert (len(waits.found), waits.copies) == (2, 3)


def test_a_constant_is_made_once_for_each_device_and_type() -> None:
    first = constant_tensor([0.5, 1.5], DEVICE)
    assert constant_tensor((0.5, 1.5), DEVICE) is first
    assert constant_tensor([0.5, 1.5], DEVICE, torch.float64) is not first
    assert constant_tensor([0.5, 1.5], CPU).tolist() == [0.5, 1.5]


def test_on_the_host_values_stay_where_they_are() -> None:
    values = torch.arange(3)
    assert to_device(values, CPU) is values
