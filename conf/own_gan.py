"""A GAN of images of 64 pixels with optimizers that take turns; see docs/own-task.md."""

import numpy as np
import torch
from torch import nn
from torch.nn.functional import softplus

from ray_app import Losses
from ray_app.task.base import Task


class Gan(Task):
    """A critic tells images of the data from those of a generator."""

    def columns(self):
        """Returns the column of images."""
        return ["image"]

    def decode(self, rows):
        """Returns the pixels of each image, from 0 to 1."""
        return {"image": rows["image"].reshape(len(rows["image"]), 64).astype(np.float32) / 255}

    def build_model(self):
        """Builds both networks."""
        generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
        critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1), nn.Flatten(0))
        return nn.ModuleDict({"generator": generator, "critic": critic})

    def loss_for_optimizer(self, turn, model, batch):
        """Returns the losses of the optimizer that is in turn."""
        scores = model["critic"](self.forward(model, batch))
        if turn == "generator":
            return Losses(softplus(-scores), metrics={"generator_loss": softplus(-scores)})
        losses = softplus(scores) + softplus(-model["critic"](batch["image"]))
        return Losses(losses, metrics={"critic_loss": losses, "caught": scores < 0})

    def forward(self, model, batch):
        """Returns as many new images as the batch has."""
        return model["generator"](torch.randn(len(batch["image"]), 8, device=batch["image"].device))

    def loss(self, outputs, batch):
        """Returns the difference of each image from the mean of the new ones, for evaluations."""
        return (outputs.mean(0) - batch["image"]).square().mean(1)
