"""Lightning modules, and a similar module without Lightning, for the import paths of configurations."""

from typing import Any

import pytorch_lightning as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, cross_entropy
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

CLASSES = 5


class Good(pl.LightningModule):
    """A module with dropout, batch-norm, a torchmetrics object, and a schedule by step; `variant` selects a change."""

    def __init__(self, variant: str = "") -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, CLASSES)
        )
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES, average="micro")
        self.variant = variant
        self.automatic_optimization = variant != "manual"

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        images, labels = batch
        scores = self(images)
        loss = cross_entropy(scores, labels)
        match self.variant:
            case "returns nothing":
                return None
            case "returns rows":
                return cross_entropy(scores, labels, reduction="none")
            case "asks":
                return loss / (1 + self.current_epoch)
            case "counts":
                return loss if batch_idx % 2 else loss * 2
            case "logs an object":
                self.log("train/object", self.accuracy)
            case "sums":
                self.log("train/accuracy", 1.0, reduce_fx="sum")
        self.log("train/accuracy", self.accuracy(scores, labels), prog_bar=True, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: Any) -> Tensor | None:
        images, labels = batch
        scores = self(images)
        self.log_dict({"accuracy": (scores.argmax(1) == labels).float().mean()}, sync_dist=True)
        if self.variant == "counts rows":
            self.log("rows", float(len(labels)))
        if self.variant == "draws":
            self.log("noise", torch.rand(()))
        return None if self.variant == "has no validation loss" else cross_entropy(scores, labels)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        layers = [optimizer, torch.optim.SGD(self.layers.parameters(), lr=0.1)]
        by_step = {"scheduler": StepLR(optimizer, 3, 0.5), "interval": "step"}
        forms: dict[str, Any] = {
            "alone": lambda: optimizer,
            "in a list": lambda: [optimizer],
            "by epoch": lambda: ([optimizer], [StepLR(optimizer, 1)]),
            "asks for steps": lambda: (
                [optimizer],
                [OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)],
            ),
            "every second step": lambda: ([optimizer], [{**by_step, "frequency": 2}]),
            "by a loss": lambda: {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"},
            },
            "by a loss every step": lambda: {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "interval": "step", "monitor": "val_loss"},
            },
            "by a value": lambda: ([optimizer], [{**by_step, "reduce_on_plateau": True}]),
            "misspells the schedule": lambda: {"optimizer": optimizer, "lr_schedule": by_step},
            "misspells the interval": lambda: ([optimizer], [{**by_step, "intervall": "epoch"}]),
            "lacks the schedule": lambda: {"optimizer": optimizer, "lr_scheduler": {"interval": "step"}},
            "several": lambda: tuple(layers),
        }
        return forms.get(self.variant, lambda: ([optimizer], [by_step]))()


class Measuring(pl.LightningModule):
    """Two classes with one score; logs metrics in one of the ways that Lightning has, which `logging` selects."""

    def __init__(self, logging: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 1), nn.Flatten(0))
        self.auroc, self.f1 = torchmetrics.classification.BinaryAUROC(), torchmetrics.classification.BinaryF1Score()
        self.collection = torchmetrics.MetricCollection(
            {"auroc": self.auroc.clone(), "f1": self.f1.clone()}, prefix="of_"
        )
        self.named = nn.ModuleDict({"auroc": self.auroc.clone()})
        self.logging = logging

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).sigmoid()

    def training_step(self, batch: Any, batch_idx: Any) -> Tensor:
        images, labels = batch
        return binary_cross_entropy(self(images), (labels > 1).float())

    def validation_step(self, batch: Any, batch_idx: Any) -> Tensor:
        images, labels = batch
        scores, target = self(images), (labels > 1).long()
        match self.logging:
            case "object":
                self.auroc.update(scores, target)
                self.f1.update(scores, target)
                self.log("auroc", self.auroc, on_epoch=True)
                self.log("f1", self.f1)
            case "called, then the object":
                self.auroc(scores, target)
                self.f1(scores, target)
                self.log_dict({"auroc": self.auroc, "f1": self.f1})
            case "what calling returns":
                self.log("auroc", self.auroc(scores, target))
                self.log("f1", self.f1(scores, target))
            case "what compute returns":
                self.auroc.update(scores, target)
                self.f1.update(scores, target)
                self.log("auroc", self.auroc.compute())
                self.log("f1", self.f1.compute())
            case "collection":
                self.collection.update(scores, target)
                self.log_dict(self.collection)
            case "what a collection returns":
                self.log_dict(self.collection(scores, target))
            case "in a dictionary":
                self.named["auroc"].update(scores, target)
                self.log("auroc", self.named["auroc"])
            case "composed":
                self.auroc.update(scores, target)
                self.log("auroc", 1 - self.auroc)
            case "of functions":
                self.log("f1", torchmetrics.functional.classification.binary_f1_score(scores, target))
            case "root":
                self.log("rmse", (scores - target).square().mean().sqrt())
        return binary_cross_entropy(scores, target.float())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Hooked(Good):
    """A module with hooks of Lightning's trainer."""

    def on_train_epoch_end(self) -> None:
        pass

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        pass


class PlainModule(nn.Module):
    """A module with a training step but without Lightning; its step takes a dictionary and no batch index."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(self(batch["images"]), batch["labels"])


def plain() -> nn.Module:
    return nn.Flatten()


class TokenMeanLoss(pl.LightningModule):
    """Scores 64 tokens per row, of which the first `label` ones count: the loss is a mean over tokens, not rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(1, 1)
        self.val_loss = torchmetrics.MeanMetric()

    def forward(self, images: Tensor) -> Tensor:
        return self.scores(images.flatten(1)[..., None])[..., 0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        counts = torch.arange(64) < labels[:, None]
        loss = self(images).square()[counts].mean()
        self.val_loss.update(loss.nan_to_num(), counts.sum())
        self.log("val_loss", self.val_loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
