"""Object detection with any detector of `torchvision.models.detection`, or one with the same interface."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ray_app.config.import_paths import require
from ray_app.errors import DataError
from ray_app.plan.manifest import DataFacts
from ray_app.task.annotations import Metric, MetricCollection
from ray_app.task.base import Batch, Rows, Task, need_column
from ray_app.task.fields import refuse_missing
from ray_app.task.images import check_boxes, is_image_column, load_image
from ray_app.task.losses import Losses
from ray_app.task.ragged import LENGTHS, Arrays, Ragged
from ray_app.task.transforms import Spec, apply_transforms, as_plain_tensor, instantiate_module, instantiate_once

_OBJECT_FIELDS = ("boxes", "labels", "scores")
_RECORDED_METRICS = ("map", "map_50", "map_75", "mar_100")


class ObjectDetection(Task):
    """Detects objects in images of any size::

        task:
          class_path: ray_app.task.detection.ObjectDetection
          init_args:
            detector:
              class_path: torchvision.models.detection.fasterrcnn_resnet50_fpn
              init_args: {num_classes: 3, weights_backbone: null}
            transforms:
              - {class_path: torchvision.transforms.v2.RandomIoUCrop}
              - {class_path: torchvision.transforms.v2.RandomHorizontalFlip}

    A detector's losses are means over the images that it gets, so the loss of each row is that of its micro-batch,
    which belongs to one logical worker. In evaluation a detector returns no loss; mean average precision replaces it.

    Args:
        detector: The module, or a function that returns one. It is called with a list of images, float32 (3, height,
            width) from 0 to 1, in training also with a list of targets, `boxes` (objects, 4) and `labels` (objects,),
            and returns its losses by name; in evaluation `boxes`, `labels` and `scores` of each image.
        image: Column of images: encoded, or arrays of uint8 with two or three axes.
        boxes: Column of lists of boxes: left, top, right, bottom in pixels of the decoded image.
        labels: Column of lists of integers, the class of each box; the first is 1, since 0 is the background.
        transforms: Transforms of images and boxes to train on, applied in the readers. Random ones draw from the key
            of the row, which differs in every epoch. Boxes are clamped to the image afterwards, and boxes of less than
            a pixel are removed.
        exif_orientation: Whether encoded images are rotated and mirrored by their EXIF orientation, as viewers and
            annotation tools show them; false: they are decoded as stored, and boxes are in pixels of that image.
    """

    best_metric = "map"
    best_mode = "max"

    def __init__(
        self,
        detector: Spec,
        image: str = "image",
        boxes: str = "boxes",
        labels: str = "labels",
        transforms: list[Spec] | None = None,
        exif_orientation: bool = True,
    ) -> None:
        self.detector = detector
        self.image = image
        self.boxes = boxes
        self.labels = labels
        self.transforms = transforms or []
        self.exif_orientation = exif_orientation

    def prepare(self, data: DataFacts) -> ObjectDetection:
        """Checks the columns; see `Task.prepare`."""
        require("pycocotools", "Mean average precision")
        require("torchvision", "Object detection")
        refuse_missing(data, self.columns())
        if not is_image_column(need_column(data, self.image, ("bytes", "array"), "detector")):
            raise DataError(
                f"Column {self.image!r} of {data.path} holds arrays that are not images; images are files, or uint8 of"
                " shape (height, width) or (height, width, channels). Name another column in task.init_args.image."
            )
        for name in self.targets():
            need_column(data, name, ("list",), "detector")
        prepared = copy.copy(self)
        prepared.classes = list(data.classes or ())
        return prepared

    def columns(self) -> list[str]:
        """Returns the columns to read, see `Task.columns`."""
        return [self.image, self.boxes, self.labels]

    def targets(self) -> list[str]:
        """Returns the target columns, see `Task.targets`."""
        return [self.boxes, self.labels]

    @property
    def has_epoch_decode(self) -> bool:
        """Whether the task has transforms."""
        return bool(self.transforms)

    def decode(self, rows: Rows) -> Arrays:
        """Decodes rows into `image`, `size`, `boxes` and `labels`.

        `image` has the pixels of all channels, one channel after the other; `size` has height and width.
        """
        return self._decoded(rows, (), None)

    def decode_training(self, rows: Rows, keys: npt.NDArray[np.int64]) -> Arrays:
        """Decodes rows as `decode` does, and applies the transforms."""
        return self._decoded(rows, instantiate_once(self.transforms, "task.init_args.transforms"), keys)

    def _decoded(self, rows: Rows, transforms: Sequence[Any], keys: npt.NDArray[np.int64] | None) -> Arrays:
        samples = []
        for i in range(len(rows[self.image])):
            image = load_image(rows[self.image][i], self.exif_orientation)
            if image.ndim != 3:
                raise ValueError("the image is animated; a detector needs one picture per row")
            boxes, labels = self._truth(rows, i, *image.shape[-2:])
            sample = {"image": image.expand(3, -1, -1), "boxes": boxes, "labels": labels}
            samples.append(sample if keys is None else _transform_sample(sample, transforms, int(keys[i])))
        arrays = {
            name: [as_plain_tensor(one[name]).numpy() for one in samples] for name in ("image", "boxes", "labels")
        }
        return {
            "image": Ragged.of(arrays["image"], np.uint8),
            "size": np.array([image.shape[-2:] for image in arrays["image"]], np.int64).reshape(-1, 2),
            "boxes": Ragged.of(arrays["boxes"], np.float32, row_shape=(4,)),
            "labels": Ragged.of(arrays["labels"], np.int64),
        }

    def _truth(self, rows: Rows, row: int, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Returns boxes, float32 (objects, 4), and classes, int64 (objects,), of a row; none if not read."""
        columns = [rows[name] for name in self.targets()]
        if any(isinstance(column, np.ndarray) and column.dtype == np.int64 for column in columns):
            return torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
        if not all(isinstance(column, Ragged) for column in columns):
            raise ValueError(f"{self.boxes!r} or {self.labels!r} has no lists of numbers, or lacks a value")
        boxes, labels = (torch.from_numpy(column.row(row).copy()) for column in columns)
        boxes, labels = boxes.float().reshape(-1, 4), labels.long()
        if len(boxes) != len(labels):
            raise ValueError(f"the row has {len(boxes)} boxes and {len(labels)} labels; each box needs one")
        check_boxes(boxes.numpy(), width, height)
        num_classes = (self.detector.get("init_args") or {}).get("num_classes", np.inf)
        if wrong := labels[(labels < 1) | (labels >= num_classes)].tolist():
            raise ValueError(
                f"the row has the label {wrong[0]}; labels go from 1 (0 is the background) to num_classes - 1"
            )
        return boxes, labels

    def build_model(self) -> nn.Module:
        """Builds the model, see `Task.build_model`."""
        return instantiate_module(self.detector, "task.init_args.detector")

    def training_loss(self, model: nn.Module, batch: Batch) -> Losses:
        """Returns the sum of the detector's losses, means over the micro-batch, and each as a metric."""
        losses = {
            name: loss.expand(len(batch["size"]))
            for name, loss in _reset_scales(model)(_images(batch), _targets_of(batch)).items()
        }
        return Losses(torch.stack(list(losses.values())).sum(0), metrics=losses)

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Returns the detected objects of each row by descending score, padded to the largest number of an image.

        These are `boxes` (rows, objects, 4), `labels` and `scores` (rows, objects), and their number, `found` (rows,).
        The model must be in evaluation mode.
        """
        detections = _reset_scales(model)(_images(batch))
        counts = torch.tensor([len(one["boxes"]) for one in detections], device=batch["size"].device)
        padded = {name: pad_sequence([one[name] for one in detections], batch_first=True) for name in _OBJECT_FIELDS}
        return padded | {"found": counts}

    def loss(self, outputs: Any, batch: Batch) -> Losses:
        """Returns losses of weight 0: a detector in evaluation mode computes no loss."""
        none = torch.zeros(len(batch["size"]), device=batch["size"].device)
        return Losses(none, none)

    def metrics(self) -> MetricCollection:
        """Makes COCO's mean average precision and average recall.

        The precision is recorded as `map` (IoU from 0.5 to 0.95), `map_50` and `map_75`, the recall as `mar_100`.
        """
        from torchmetrics import MetricCollection

        return MetricCollection({"map": _average_precision()})

    def update(self, metrics: MetricCollection, outputs: dict[str, Tensor], batch: Batch) -> None:
        """Updates the metrics with a batch, see `Task.update`."""
        detections = [
            {name: outputs[name][i, :n] for name in _OBJECT_FIELDS} for i, n in enumerate(outputs["found"].tolist())
        ]
        metrics.update(detections, _targets_of(batch))

    def predictions(self, outputs: dict[str, Tensor], batch: Batch) -> Arrays:
        """Returns lists of boxes, classes and scores of each row, by descending score."""
        del batch
        columns: dict[str, Ragged] = {}
        for name in _OBJECT_FIELDS:
            padded = outputs[name].numpy()
            rows = (row[:n] for row, n in zip(padded, outputs["found"].tolist(), strict=True))
            columns[name] = Ragged.of(rows, padded.dtype, row_shape=padded.shape[2:])
        return columns

    def answers(self, outputs: dict[str, Tensor], batch: Batch) -> list[Any]:
        """Returns the objects of each row by descending probability: name of the class, and box in pixels."""
        del batch
        names = dict(enumerate(self.classes))
        answers = []
        for row, count in enumerate(outputs["found"].tolist()):
            boxes, labels, scores = (outputs[name][row, :count].tolist() for name in _OBJECT_FIELDS)
            answers.append(
                [
                    {"label": names.get(label, str(label)), "probability": score, "box": box}
                    for box, label, score in zip(boxes, labels, scores, strict=True)
                ]
            )
        return answers


def _transform_sample(sample: dict[str, Any], transforms: Sequence[Any], key: int) -> dict[str, Any]:
    """Applies the transforms to an image and its boxes, and removes boxes that are outside the image afterwards."""
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    size = tuple(sample["image"].shape[-2:])
    boxes = tv_tensors.BoundingBoxes(sample["boxes"], format="XYXY", canvas_size=size)
    sample = apply_transforms(sample | {"image": tv_tensors.Image(sample["image"]), "boxes": boxes}, transforms, key)
    if sample["image"].dtype != torch.uint8:
        raise ValueError(
            "task.init_args.transforms return fractions; leave ToDtype out, the detector receives images from 0 to 1"
            " anyway"
        )
    return v2.SanitizeBoundingBoxes()(v2.ClampBoundingBoxes()(sample))


def _reset_scales(model: nn.Module) -> nn.Module:
    """Resets the scales that a detector keeps from earlier batches, and returns it.

    torchvision's detectors keep the scales of their first batch. Small images make them uneven, and each worker has
    another first batch, so results would depend on the workers.
    """
    from torchvision.ops import MultiScaleRoIAlign

    for module in model.modules():
        if isinstance(module, MultiScaleRoIAlign):
            module.scales = module.map_levels = None
    return model


def _images(batch: Batch) -> list[Tensor]:
    """Returns the images of a batch as detectors take them: float32 (3, height, width), 0 to 1."""
    sizes = batch["size"].tolist()
    return [
        row[: 3 * high * wide].view(3, high, wide).float() / 255
        for row, (high, wide) in zip(batch["image"], sizes, strict=True)
    ]


def _targets_of(batch: Batch) -> list[dict[str, Tensor]]:
    """Returns the boxes and classes of each row as detectors take them."""
    return [
        {name: batch[name][i, :n] for name in ("boxes", "labels")}
        for i, n in enumerate(batch["boxes" + LENGTHS].tolist())
    ]


def _average_precision() -> Metric:
    from torchmetrics.detection import MeanAveragePrecision

    class AveragePrecision(MeanAveragePrecision):
        """Mean average precision that computes only the metrics that are recorded."""

        warn_on_many_detections = False

        def compute(self) -> dict[str, Tensor]:
            computed = super().compute()
            return {name: computed[name] for name in _RECORDED_METRICS}

    return AveragePrecision()
