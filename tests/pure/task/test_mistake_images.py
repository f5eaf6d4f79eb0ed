"""Images and their masks, as a model without a class gets them: stored or encoded, cropped together or not."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torch import Tensor

from ray_app.plan.manifest import ColumnFacts, DataFacts
from ray_app.task.base import Losses, WithoutTargets
from ray_app.task.images import decode_mask
from ray_app.task.metrics import combine, score
from ray_app.task.module import ModuleTask
from tests.support.pictures import encoded

CROPS = [{"class_path": "torchvision.transforms.v2.RandomCrop", "init_args": {"size": [4, 4]}}]
CENTER = [{"class_path": "torchvision.transforms.v2.CenterCrop", "init_args": {"size": [4, 4]}}]
KINDS: dict[str, ColumnFacts] = {
    "files": ColumnFacts("bytes"),
    "grey": ColumnFacts("array", "|u1", (8, 8)),
    "colours": ColumnFacts("array", "|u1", (8, 8, 3)),
    "masks": ColumnFacts("array", "<i4", (8, 8)),
    "unsigned": ColumnFacts("array", "<u2", (8, 8)),
    "numbers": ColumnFacts("array", "<f4", (8, 8)),
    "list": ColumnFacts("list", "<i8"),
}


def task_of(image: str, target: str, **arguments: Any) -> ModuleTask:
    loss = {"class_path": "torch.nn.CrossEntropyLoss", "init_args": {"ignore_index": 9}}
    task = ModuleTask({"class_path": "torch.nn.Identity"}, [image], target, loss, **arguments)
    return task.prepare(DataFacts("data", 3, KINDS))


def numbered() -> npt.NDArray[np.uint8]:
    """Three pictures whose every pixel is another number."""
    return np.arange(3 * 64, dtype=np.uint8).reshape(3, 8, 8)


def files(images: npt.NDArray) -> list[bytes]:
    return [encoded(Image.fromarray(image)) for image in images]


@pytest.mark.parametrize(
    ("image", "target"), [*product(["files", "grey", "colours"], ["masks", "unsigned"]), ("grey", "files")]
)
def test_a_mask_is_cropped_as_its_image(image: str, target: str) -> None:
    rows: dict[str, Any] = {"grey": numbered(), "files": files(numbered()), "colours": np.stack([numbered()] * 3, -1)}
    rows |= {"masks": numbered().astype(np.int32), "unsigned": numbered().astype(np.uint16)}
    task = task_of(image, target, transforms=CROPS, evaluate_transforms=CENTER)
    given = {name: rows[name] for name in task.columns()}
    epochs = [task.decode_training(given, np.arange(3) + 10 * epoch) for epoch in range(4)]
    for found in [*epochs, task.decode(given)]:
        assert found[target].shape == (3, 4, 4)
        assert np.array_equal(found[image][:, 0], found[target])
    assert not all(np.array_equal(epochs[0][target], found[target]) for found in epochs)


def test_without_transforms_stored_images_are_taken_as_they_are() -> None:
    task = task_of("colours", "unsigned")
    colours = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3)).astype(np.uint8)
    found = task.decode({"colours": colours, "unsigned": numbered().astype(np.uint16)})
    assert np.array_equal(found["colours"], colours.transpose(0, 3, 1, 2))
    assert found["unsigned"].dtype == np.int32
    batch = {name: torch.from_numpy(np.asarray(values)) for name, values in found.items()}
    assert torch.equal(
        task.forward(torch.nn.Identity(), batch), torch.from_numpy(colours.transpose(0, 3, 1, 2) / np.float32(255))
    )


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16"])
def test_the_numbers_of_a_mask_are_those_that_are_stored(mode: str) -> None:
    numbers = np.array([[0, 1], [1, 0]]) if mode == "1" else np.array([[0, 7], [255, 3]])
    image = Image.fromarray(numbers.astype({"1": bool, "I;16": np.uint16}.get(mode, np.uint8)))
    if mode == "P":
        image = Image.fromarray(numbers.astype(np.uint8), "P")
        image.putpalette([200, 10, 10] * 256)  # all of one colour: only the indices tell them apart
    assert decode_mask(encoded(image)).tolist() == numbers.tolist()


@pytest.mark.parametrize(("mode", "kind"), [("RGB", "png"), ("L", "jpeg"), ("RGB", "webp")])
def test_what_is_no_mask_is_refused(mode: str, kind: str) -> None:
    with pytest.raises(ValueError, match="which is not a mask"):
        decode_mask(encoded(Image.new(mode, (4, 4)), kind))


@pytest.mark.parametrize("target", ["masks", "files", "numbers", "list"])
def test_a_prediction_needs_no_target(target: str) -> None:
    task = task_of("grey", target, transforms=CROPS, evaluate_transforms=CENTER)
    without = WithoutTargets(task)
    assert without.columns == ["grey"]
    found = without({"grey": numbered()})
    assert np.asarray(found["grey"]).shape == (3, 1, 4, 4)
    assert len(found[target]) == 3


def test_a_picture_may_be_its_own_target() -> None:
    task = task_of("grey", "grey", mean=[0.5])
    outputs, target = task._compared(torch.zeros(3, 1, 8, 8), {"grey": torch.from_numpy(numbered())[:, None]})
    assert outputs.shape == target.shape
    assert torch.equal(target, torch.from_numpy(numbered())[:, None] / 255 - 0.5)


def test_the_loss_of_pixels_is_a_mean_over_those_that_count() -> None:
    task = task_of("grey", "masks")
    masks = torch.randint(0, 4, (3, 8, 8), generator=torch.Generator().manual_seed(0))
    masks[0, :6], masks[1, 0] = 9, 9
    outputs = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    found = task.loss(outputs, {"masks": masks.int()})
    assert isinstance(found, Losses)
    assert found.weights is not None
    assert found.weights.tolist() == [16, 56, 64]
    expected = torch.nn.CrossEntropyLoss(ignore_index=9)(outputs, masks)
    torch.testing.assert_close(found.values.sum() / found.weights.sum(), expected)
    assert task.predictions(outputs, {"masks": masks})["predicted_index"].tolist() == outputs.argmax(1).tolist()


class Scores(torch.nn.Module):
    """Two classes by the brightness of a pixel."""

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        return torch.cat([0.5 - images, images - 0.5], 1)


def test_pixels_are_evaluated_by_configuration() -> None:
    accuracy = {
        "class_path": "torchmetrics.classification.MulticlassAccuracy",
        "init_args": {"num_classes": 2, "average": "micro"},
    }
    task = task_of("grey", "masks", metrics={"accuracy": accuracy})
    arrays = task.decode({"grey": numbered(), "masks": (numbered() > 127).astype(np.int32)})
    found = combine(task, score(task, Scores(), arrays, 2, torch.device("cpu")))
    assert found.values["accuracy"] == 1.0
