"""Models for the import paths of configurations."""

import os
from typing import Any

import torch
from torch import nn


def per_image(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, outputs))


def float32_dtype() -> torch.dtype:
    return torch.float32


def detector(num_classes: int, **sizes: Any) -> nn.Module:
    """Returns a Faster R-CNN with a backbone of three layers with batch-norm."""
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.ops import MultiScaleRoIAlign

    layers: list[nn.Module] = []
    for channels, outputs in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(channels, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    backbone = nn.Sequential(*layers)
    backbone.out_channels = 32
    return FasterRCNN(
        backbone,
        rpn_anchor_generator=AnchorGenerator(((16, 32),), ((1.0,),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 5, 2),
        box_head=TwoMLPHead(32 * 25, 32),
        box_predictor=FastRCNNPredictor(32, num_classes),
        rpn_post_nms_top_n_train=50,
        box_batch_size_per_image=32,
        **sizes,
    )


def count_calls() -> int:
    """Returns the number of calls in this process and its parents; the start sees what objects keep, but not this."""
    os.environ["TEST_CALLS"] = str(calls := 1 + int(os.environ.get("TEST_CALLS", "0")))
    return calls


class FlipEveryThird:
    """A transform with state: it flips every third image upside down."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        is_third = count_calls() % 3 == 0
        return {name: values.flip(-2) if is_third else values for name, values in sample.items()}
