"""Training loops for the import paths of configurations."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR

from ray_app.task.losses import Losses
from ray_app.task.user_loop import Loop

CLASSES = 5


def net() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, CLASSES)
    )


def loss_and_accuracy(model: nn.Module, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    scores = model(rows["image"])
    correct = (scores.argmax(1) == rows["label"]).float()
    return {"loss": cross_entropy(scores, rows["label"]), "accuracy": correct.mean()}


def without_loss(model: nn.Module, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"accuracy": loss_and_accuracy(model, rows)["accuracy"]}


def compute_outputs(model: nn.Module, rows: dict[str, Tensor], variant: str) -> dict[str, Any]:
    outputs: dict[str, Any] = dict(loss_and_accuracy(model, rows))
    if variant == "needs bf16" and model(rows["image"]).dtype != torch.bfloat16:
        raise ValueError("the loop computes in another precision than is configured")
    if variant == "a loss between rows":
        outputs["loss"] = model(rows["image"]).std(0).sum()
    if variant in ("one for each", "as losses"):
        outputs["loss"] = cross_entropy(model(rows["image"]), rows["label"], reduction="none")
    if variant == "as losses":
        outputs["loss"] = Losses(outputs["loss"] * 2, torch.full_like(outputs["loss"], 2.0))
    return outputs


def train(loop: Loop, variant: str = "", log_file: str | None = None) -> None:
    model = loop.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = StepLR(optimizer, 3, 0.5)
    if variant != "keeps nothing":
        loop.keep(optimizer, schedule)
    if variant == "has no loop":
        return
    for step in loop:
        for rows in step:
            if variant == "adds nothing":
                continue
            outputs = compute_outputs(model, rows, variant)
            step.add(**outputs)
            if variant == "adds twice":
                step.add(**outputs)
            if variant == "leaves the rows":
                break
        if variant == "breaks":
            break
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for _ in range({"never moves": 0, "moves twice": 2}.get(variant, 1)):
            optimizer.step()
        if variant == "moves the schedule":
            schedule.step()
    if log_file is not None:
        with Path(log_file).open("a") as file:
            file.write("after the loop\n")
