"""Object detection: images of any size, boxes that go through their transforms, mean average precision, lists of
predictions.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from ray_app.data.arrays import ragged_lists, to_list_array
from ray_app.errors import ConfigError, DataError
from ray_app.models.inputs import WithoutTargets
from ray_app.plan.manifest import ColumnFacts, DataFacts
from ray_app.predict.actor import encode_part, find_non_finite_row
from ray_app.task.detection import ObjectDetection
from ray_app.task.losses import Losses
from ray_app.task.metrics import combine, resample, score
from ray_app.task.ragged import Ragged, concat_fields, to_batch
from tests.support.pictures import encoded

V2 = "torchvision.transforms.v2."
CROPS = [
    {"class_path": V2 + "RandomCrop", "init_args": {"size": [20, 24]}},
    {"class_path": V2 + "RandomHorizontalFlip"},
    {"class_path": V2 + "Resize", "init_args": {"size": [40, 48], "interpolation": 0}},
]
FACTS = {"image": ColumnFacts("bytes"), "boxes": ColumnFacts("list"), "labels": ColumnFacts("list")}
SPEC = {"class_path": "tests.pure.task.test_detection.Seeing", "init_args": {"num_classes": 3}}
CPU = torch.device("cpu")


class Seeing(nn.Module):
    """Detects one red object (class 1) and one green object (class 2) per image without error, and records the
    arguments of each call in training.
    """

    def __init__(self, num_classes: int = 3, blind: bool = False) -> None:
        super().__init__()
        self.blind, self.weight = blind, nn.Parameter(torch.ones(()))
        self.training_calls: list[tuple[list[Tensor], list[dict[str, Tensor]]]] = []

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        if self.training:
            assert targets is not None
            self.training_calls.append((images, targets))
            return {"loss_a": self.weight * len(images), "loss_b": self.weight * 0.5}
        return [self.detect(image) for image in images]

    def detect(self, image: Tensor) -> dict[str, Tensor]:
        boxes, labels = [], []
        for label in (1, 2):
            pixels = (image[label - 1] == 1).nonzero()
            if len(pixels) and not (self.blind and label == 2):
                (top, left), (bottom, right) = pixels.amin(0), pixels.amax(0) + 1
                boxes.append([left, top, right, bottom])
                labels.append(label)
        return {
            "boxes": torch.tensor(boxes).float().reshape(-1, 4),
            "labels": torch.tensor(labels).long(),
            "scores": torch.ones(len(labels)),
        }


def rows_of(*images: tuple[int, int, list[list[int]]]) -> dict[str, Any]:
    """Returns black images of (height, width, boxes); the first box is red and the second one green."""
    rows: dict[str, Any] = {"image": [], "boxes": [], "labels": []}
    for height, width, boxes in images:
        pixels = np.zeros((height, width, 3), np.uint8)
        for label, (left, top, right, bottom) in enumerate(boxes, 1):
            pixels[top:bottom, left:right, label - 1] = 255
        rows["image"].append(encoded(Image.fromarray(pixels)))
        rows["boxes"].append(np.array(boxes).reshape(-1, 4))
        rows["labels"].append(np.arange(1, len(boxes) + 1))
    files = np.empty(len(images), object)
    files[:] = rows["image"]
    return {
        "image": files,
        "boxes": Ragged.of(rows["boxes"], np.float32, row_shape=(4,)),
        "labels": Ragged.of(rows["labels"], np.int64),
    }


ROWS = rows_of((30, 40, [[3, 5, 9, 20], [20, 8, 33, 12]]), (50, 25, []), (33, 31, [[0, 0, 31, 33]]))


def task_of(**arguments: Any) -> ObjectDetection:
    return ObjectDetection(SPEC, **arguments).prepare(DataFacts("data", 3, FACTS))


def test_a_detector_gets_images_of_their_own_size_and_their_boxes() -> None:
    task, model = task_of(), Seeing()
    losses = task.training_loss(model, to_batch(task.decode(ROWS)))
    [(images, targets)] = model.training_calls
    assert [tuple(image.shape) for image in images] == [(3, 30, 40), (3, 50, 25), (3, 33, 31)]
    for image, target, row in zip(images, targets, range(3), strict=True):
        with Image.open(io.BytesIO(ROWS["image"][row])) as file:
            assert np.array_equal((image * 255).byte().permute(1, 2, 0).numpy(), np.array(file))
        assert target["boxes"].tolist() == ROWS["boxes"].row(row).tolist()
        assert target["labels"].tolist() == ROWS["labels"].row(row).tolist()
    assert isinstance(losses, Losses)
    assert losses.values.tolist() == [3.5] * 3, "each row has the sum of the mean losses"
    assert {name: values.tolist() for name, values in losses.metrics.items()} == {
        "loss_a": [3.0] * 3,
        "loss_b": [0.5] * 3,
    }


def test_boxes_go_through_the_transforms_of_their_images() -> None:
    """After crop, flip and resize the boxes in the data equal those that a detector sees in the pixels."""
    task, model = task_of(transforms=CROPS), Seeing().eval()
    removed_boxes, kept_boxes = 0, 0
    for epoch in range(12):
        keys = np.arange(3) + 10 * epoch
        rows = task.decode_training(ROWS, keys)
        assert rows["size"].tolist() == [[40, 48]] * 3
        batch = to_batch(rows)
        for row, image in enumerate(batch["image"].view(3, 3, 40, 48).float() / 255):
            detected = model.detect(image)
            assert detected["boxes"].tolist() == rows["boxes"].row(row).tolist(), (epoch, row)
            assert detected["labels"].tolist() == rows["labels"].row(row).tolist()
            kept_boxes += len(detected["labels"])
            removed_boxes += len(ROWS["labels"].row(row)) - len(detected["labels"])
        swapped = task.decode_training({name: values[np.array([1, 0])] for name, values in ROWS.items()}, keys[[1, 0]])
        assert np.array_equal(swapped["image"].row(1), rows["image"].row(0)), "a row is cropped by its key alone"
    assert removed_boxes > 3
    assert kept_boxes > 12


def test_each_epoch_crops_an_image_differently() -> None:
    task = task_of(transforms=CROPS)
    assert len({task.decode_training(ROWS, np.full(3, key))["image"].row(0).tobytes() for key in range(5)}) == 5


def score_chunks(model: nn.Module, size: int, chunk_rows: int | None = None) -> Any:
    task = task_of()
    return task, list(score(task, model, task.decode(ROWS), size, CPU, chunk_rows=chunk_rows))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_perfect_detector_has_a_precision_of_one(size: int) -> None:
    task, chunks = score_chunks(Seeing(), size)
    labels = [labels.tolist() for chunk in chunks for labels in chunk.states["map"]["detection_labels"]]
    assert labels == [[1, 2], [], [1]], "the padding of an output is not a detection"
    evaluation = combine(task, chunks)
    assert evaluation.values == {"map": 1.0, "map_50": 1.0, "map_75": 1.0, "mar_100": 1.0}, (
        "a detector in evaluation mode returns no loss"
    )


def test_a_class_that_is_never_detected_lowers_the_precision() -> None:
    assert combine(*score_chunks(Seeing(blind=True), 2)).values["map"] == 0.5


def test_precision_is_resampled_by_rows() -> None:
    task, chunks = score_chunks(Seeing(blind=True), 1)
    counts = np.array([[1, 1, 1], [0, 0, 2], [2, 1, 0]])
    assert resample(task, chunks, "map", counts).tolist() == [0.5, 1.0, 0.5]


def test_predictions_are_written_and_read_as_lists() -> None:
    task, model = task_of(), Seeing().eval()
    batches = [to_batch(task.decode(ROWS), slice(low, low + 2)) for low in (0, 2)]
    predictions = [task.predictions(task.forward(model, batch), batch) for batch in batches]
    whole = {name: concat_fields([prediction[name] for prediction in predictions]) for name in predictions[0]}
    table = pq.read_table(pa.BufferReader(encode_part(pa.table({"position": [0, 1, 2]}), whole, "made from")))
    assert table.column("boxes").to_pylist() == [ROWS["boxes"].row(i).tolist() for i in range(3)]
    assert table.column("labels").to_pylist() == [[1, 2], [], [1]]
    assert table.column("scores").to_pylist() == [[1.0, 1.0], [], [1.0]]
    assert to_list_array(ROWS["boxes"][2:]).to_pylist() == [[[0.0, 0.0, 31.0, 33.0]]], (
        "a slice converts only its own rows"
    )
    again = ragged_lists(table.column("boxes"))
    assert again is not None
    assert np.array_equal(again.values, ROWS["boxes"].values)


@pytest.mark.parametrize(("index", "row"), [(0, 0), (1, 0), (2, 2), (3, None)])
def test_the_row_of_the_first_non_finite_value_is_reported(index: int, row: int | None) -> None:
    values = np.array([1, 2, 3], np.float32)
    values[index:] = np.nan
    assert find_non_finite_row(Ragged(values, np.array([0, 2, 2, 3]))) == row

    assert find_non_finite_row(values[:, None]) == (index if index < 3 else None)


def test_predictions_without_objects_are_finite() -> None:
    assert find_non_finite_row(Ragged.of([[], []], np.float32, row_shape=(4,))) is None


def test_rows_without_any_object_are_read() -> None:
    empty = to_list_array(Ragged.of([[], []], np.float32, row_shape=(4,)))
    of_lists = pa.chunked_array([pa.array([[], []], pa.list_(pa.list_(pa.float32())))])
    for column in (pa.chunked_array([empty]), of_lists):
        boxes = ragged_lists(column)
        assert boxes is not None
        rows = ROWS | {"image": ROWS["image"][:2], "boxes": boxes, "labels": Ragged.of([[], []], np.int64)}
        assert task_of().decode(rows)["boxes"].row_shape == (4,)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"boxes": [[5, 5, 3, 9]]}, "object 1 has the box [5.0, 5.0, 3.0, 9.0] (left, top, right, bottom), which"),
        ({"boxes": [[5, 5, 45, 9]]}, "which lies outside the image, which is 40 wide and 30 high"),
        ({"boxes": [[5, 5, np.nan, 9]]}, "which has no size"),
        ({"labels": [0]}, "the row has the label 0; labels go from 1 (0 is the background) to num_classes - 1"),
        ({"labels": [3]}, "the row has the label 3"),
        ({"labels": [1, 2]}, "the row has 1 boxes and 2 labels"),
    ],
)
def test_a_row_with_invalid_boxes_or_labels_is_refused(changed: dict[str, Any], message: str) -> None:
    annotations: dict[str, Any] = {"boxes": [[1, 2, 3, 4]], "labels": [1]} | changed
    rows = {
        "image": ROWS["image"][:1],
        "boxes": Ragged.of([annotations["boxes"]], np.float32, row_shape=(4,)),
        "labels": Ragged.of([annotations["labels"]], np.int64),
    }
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is asserted below
        task_of().decode(rows)
    assert message in str(caught.value)


def test_transforms_that_make_float_images_are_refused() -> None:
    task = task_of(transforms=[{"class_path": V2 + "ConvertImageDtype"}])
    with pytest.raises(ValueError, match="return fractions"):
        task.decode_training(ROWS, np.arange(3))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"boxes": ColumnFacts("array", "<f4", (4,))}, "Column 'boxes' of data holds array <f4; the detector needs"),
        ({"image": ColumnFacts("array", "<f4", (8, 8))}, "holds arrays that are not images"),
    ],
)
def test_columns_of_the_wrong_type_are_refused(facts: dict[str, ColumnFacts], message: str) -> None:
    with pytest.raises(DataError) as caught:
        ObjectDetection(SPEC).prepare(DataFacts("data", 3, FACTS | facts))
    assert message in str(caught.value)


def test_a_class_that_is_not_a_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"makes a dict; it must make an nn.Module"):
        ObjectDetection({"class_path": "builtins.dict"}).build_model()


def test_a_prediction_needs_no_boxes() -> None:
    task = task_of()
    without = WithoutTargets(task)
    assert without.columns == ["image"]
    rows = without({"image": ROWS["image"]})
    assert task.forward(Seeing().eval(), to_batch(rows))["found"].tolist() == [2, 0, 1]


def test_grey_images_have_three_channels() -> None:
    grey: npt.NDArray = np.arange(24, dtype=np.uint8).reshape(1, 4, 6)
    rows = task_of().decode({"image": grey, "boxes": np.zeros(1, np.int64), "labels": np.zeros(1, np.int64)})
    assert np.array_equal(rows["image"].row(0).reshape(3, 4, 6), np.stack([grey[0]] * 3))
