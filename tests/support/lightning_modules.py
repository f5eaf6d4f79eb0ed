"""Lightning modules, and one that only looks like it, to be named in a configuration."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR, StepLR

CLASSES = 5


class Good(pl.LightningModule):
    """Dropout, batch-norm, a torchmetrics object, and a schedule that moves after every step."""

    def __init__(self, does: str = "") -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, CLASSES))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES, average="micro")
        self.does = does
        self.automatic_optimization = does != "manual"

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        images, labels = batch
        scores = self(images)
        loss = cross_entropy(scores, labels)
        match self.does:
            case "returns nothing":
                return None
            case "returns rows":
                return cross_entropy(scores, labels, reduction="none")
            case "asks":
                return loss / (1 + self.current_epoch)
            case "counts":
                return loss if batch_idx % 2 else loss * 2
            case "logs an object":
                self.log("train/accuracy", self.accuracy)
            case "sums":
                self.log("train/accuracy", 1.0, reduce_fx="sum")
        self.log("train/accuracy", self.accuracy(scores, labels), prog_bar=True, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: Any) -> Tensor | None:
        images, labels = batch
        scores = self(images)
        self.log_dict({"accuracy": self.accuracy(scores, labels), "rows": float(len(labels))}, sync_dist=True)
        return None if self.does == "has no validation loss" else cross_entropy(scores, labels)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        match self.does:
            case "alone":
                return optimizer
            case "in a list":
                return [optimizer]
            case "by epoch":
                return [optimizer], [StepLR(optimizer, 1)]
            case "asks for steps":
                return [optimizer], [OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)]
            case "several":
                return optimizer, torch.optim.SGD(self.layers.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": StepLR(optimizer, 3, 0.5), "interval": "step"}]


class Hooked(Good):
    """Has hooks of the trainer's."""

    def on_train_epoch_end(self) -> None:
        pass

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        pass


class Unvalidated(nn.Module):
    """Has what is needed to train and nothing of Lightning's; its step takes a dictionary and no number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(self(batch["images"]), batch["labels"])


def plain() -> nn.Module:
    return nn.Flatten()
