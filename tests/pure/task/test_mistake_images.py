"""Images and their masks in a configured task: stored or encoded, with and without transforms."""

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torch import Tensor

from ray_app.models.inputs import WithoutTargets
from ray_app.plan.manifest import ColumnFacts, DataFacts
from ray_app.task.images import decode_mask
from ray_app.task.losses import Losses
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
    """Returns three images in which each pixel has a different number."""
    return np.arange(3 * 64, dtype=np.uint8).reshape(3, 8, 8)


def files(images: npt.NDArray) -> list[bytes]:
    return [encoded(Image.fromarray(image)) for image in images]


@pytest.mark.parametrize(
    ("image", "target"), [*product(["files", "grey", "colours"], ["masks", "unsigned"]), ("grey", "files")]
)
def test_a_mask_gets_the_same_crop_as_its_image(image: str, target: str) -> None:
    rows: dict[str, Any] = {"grey": numbered(), "files": files(numbered()), "colours": np.stack([numbered()] * 3, -1)}
    rows |= {"masks": numbered().astype(np.int32), "unsigned": numbered().astype(np.uint16)}
    task = task_of(image, target, transforms=CROPS, evaluate_transforms=CENTER)
    columns = {name: rows[name] for name in task.columns()}
    epochs = [task.decode_training(columns, np.arange(3) + 10 * epoch) for epoch in range(4)]
    for decoded in [*epochs, task.decode(columns)]:
        assert decoded[target].shape == (3, 4, 4)
        assert np.array_equal(decoded[image][:, 0], decoded[target])
    assert not all(np.array_equal(epochs[0][target], decoded[target]) for decoded in epochs)


def test_without_transforms_stored_images_are_not_changed() -> None:
    task = task_of("colours", "unsigned")
    colours = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3)).astype(np.uint8)
    decoded = task.decode({"colours": colours, "unsigned": numbered().astype(np.uint16)})
    assert np.array_equal(decoded["colours"], colours.transpose(0, 3, 1, 2))
    assert decoded["unsigned"].dtype == np.int32
    batch = {name: torch.from_numpy(np.asarray(values)) for name, values in decoded.items()}
    assert torch.equal(
        task.forward(torch.nn.Identity(), batch), torch.from_numpy(colours.transpose(0, 3, 1, 2) / np.float32(255))
    )


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16"])
def test_a_decoded_mask_has_the_stored_numbers(mode: str) -> None:
    numbers = np.array([[0, 1], [1, 0]]) if mode == "1" else np.array([[0, 7], [255, 3]])
    image = Image.fromarray(numbers.astype({"1": bool, "I;16": np.uint16}.get(mode, np.uint8)))
    if mode == "P":
        image = Image.fromarray(numbers.astype(np.uint8), "P")
        # All entries have one colour, so that only the indices differ.
        image.putpalette([200, 10, 10] * 256)
    assert decode_mask(encoded(image)).tolist() == numbers.tolist()


@pytest.mark.parametrize(("mode", "kind"), [("RGB", "png"), ("L", "jpeg"), ("RGB", "webp")])
def test_an_image_that_is_not_a_mask_is_refused(mode: str, kind: str) -> None:
    with pytest.raises(ValueError, match="which is not a mask"):
        decode_mask(encoded(Image.new(mode, (4, 4)), kind))


@pytest.mark.parametrize("target", ["masks", "files", "numbers", "list"])
def test_a_prediction_needs_no_target(target: str) -> None:
    task = task_of("grey", target, transforms=CROPS, evaluate_transforms=CENTER)
    without = WithoutTargets(task)
    assert without.columns == ["grey"]
    decoded = without({"grey": numbered()})
    assert np.asarray(decoded["grey"]).shape == (3, 1, 4, 4)
    assert len(decoded[target]) == 3


def test_a_picture_may_be_its_own_target() -> None:
    task = task_of("grey", "grey", mean=[0.5])
    outputs, target = task._compared(torch.zeros(3, 1, 8, 8), {"grey": torch.from_numpy(numbered())[:, None]})
    assert outputs.shape == target.shape
    assert torch.equal(target, torch.from_numpy(numbered())[:, None] / 255 - 0.5)


def test_the_loss_of_pixels_is_the_mean_over_pixels_that_are_not_ignored() -> None:
    task = task_of("grey", "masks")
    masks = torch.randint(0, 4, (3, 8, 8), generator=torch.Generator().manual_seed(0))
    masks[0, :6], masks[1, 0] = 9, 9
    outputs = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    losses = task.loss(outputs, {"masks": masks.int()})
    assert isinstance(losses, Losses)
    assert losses.weights is not None
    assert losses.weights.tolist() == [16, 56, 64]
    expected = torch.nn.CrossEntropyLoss(ignore_index=9)(outputs, masks)
    torch.testing.assert_close(losses.values.sum() / losses.weights.sum(), expected)
    assert task.predictions(outputs, {"masks": masks})["predicted_index"].tolist() == outputs.argmax(1).tolist()


class Scores(torch.nn.Module):
    """Scores two classes by the brightness of a pixel."""

    def forward(self, images: Tensor) -> Tensor:
        """Returns the scores of both classes."""
        return torch.cat([0.5 - images, images - 0.5], 1)


def test_a_configured_metric_evaluates_pixels() -> None:
    accuracy = {
        "class_path": "torchmetrics.classification.MulticlassAccuracy",
        "init_args": {"num_classes": 2, "average": "micro"},
    }
    task = task_of("grey", "masks", metrics={"accuracy": accuracy})
    arrays = task.decode({"grey": numbered(), "masks": (numbered() > 127).astype(np.int32)})
    evaluation = combine(task, score(task, Scores(), arrays, 2, torch.device("cpu")))
    assert evaluation.values["accuracy"] == 1.0
