"""The networks of the tabular tasks, and how the default one is trained.

`TableNetwork` turns the fields of a row into inputs, calls a network, and returns outputs in the unit of the target.
`MemberNetwork` is the default network: several small ones that share most of their parameters and are averaged.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

DROPOUT = 0.3
"""Probability of a zeroed activation of the default network."""
_WIDTH, _LAYERS = 96, 2
_MEMBERS = 8
_MIN_BATCH, _MAX_BATCH = 16, 256
_MIN_PASS_STEPS = 16
"""Steps of a pass over the data, unless the batch would have fewer rows than the smallest one."""
_MIN_STEPS, _MAX_STEPS = 1200, 6000
_PASSES = 40
_LEARNING_RATE, _WEIGHT_DECAY = 0.002, 2.0
_EVALUATIONS = 5
"""Checkpoints of a run with the default network, each of which is evaluated."""


class TableNetwork(nn.Module):
    """Puts a row's numbers and its categories, one-hot or embedded, in front of a network.

    Args:
        network: Takes float32 (rows, inputs).
        sizes: The number of codes of each category column.
        embedding: The width of an embedding of each category; None: one-hot.
        knots: For each number the ends of its intervals; see `PiecewiseLinear`. None: the numbers alone.
        target: Mean and standard deviation of the target, by which the outputs become numbers in its unit.
    """

    def __init__(
        self,
        network: nn.Module,
        sizes: Sequence[int],
        embedding: int | None,
        knots: Sequence[Sequence[float]] | None = None,
        target: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.embeddings = nn.ModuleList([nn.Embedding(size, embedding) for size in sizes] if embedding else [])
        self.intervals = PiecewiseLinear(knots) if knots is not None and any(knots) else None
        self.network = network
        self.target = dict(target) if target is not None else None

    def forward(self, fields: Tensor, features: Tensor | None = None) -> Tensor:
        """Computes the outputs, (rows, outputs); those of `MemberNetwork` in training are (members, rows, outputs).

        Args:
            fields: The codes of the categories, int64 (rows, columns); without categories the numbers.
            features: The numbers, float32 (rows, inputs), if there are both.
        """
        parts = list[Tensor]()
        if not self.sizes:
            features = fields
        elif self.embeddings:
            parts = [embed(fields[:, i]) for i, embed in enumerate(self.embeddings)]
        else:
            codes = (torch.arange(size, device=fields.device) for size in self.sizes)
            parts = [(fields[:, i, None] == code).to(torch.float32) for i, code in enumerate(codes)]
        if features is not None:
            parts += [features, *([self.intervals(features)] if self.intervals is not None else [])]
        outputs = self.network(torch.cat(parts, 1))
        if outputs.ndim == 3 and not self.training:
            # The mean of the members' numbers, or the logarithm of the mean of their probabilities.
            is_regression = self.target is not None or outputs.shape[-1] == 1
            outputs = outputs.mean(0) if is_regression else outputs.float().log_softmax(-1).logsumexp(0)
        return outputs if self.target is None else outputs.float() * self.target["std"] + self.target["mean"]


class PiecewiseLinear(nn.Module):
    """Encodes a number by how far it is through each interval between its knots, from 0 to 1.

    Gorishniy et al., "On Embeddings for Numerical Features in Tabular Deep Learning", NeurIPS 2022. A network then sees
    steps and bends of a column, whatever its distribution is.

    Args:
        knots: For each number the ends of its intervals, ascending; none: the number is not encoded.
    """

    numbers: Tensor
    lows: Tensor
    widths: Tensor

    def __init__(self, knots: Sequence[Sequence[float]]) -> None:
        super().__init__()
        pairs = [(i, low, high) for i, ends in enumerate(knots) for low, high in itertools.pairwise(ends)]
        lows, highs = (torch.tensor([pair[i] for pair in pairs]) for i in (1, 2))
        self.register_buffer("numbers", torch.tensor([pair[0] for pair in pairs]), persistent=False)
        self.register_buffer("lows", lows, persistent=False)
        self.register_buffer("widths", highs - lows, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Encodes numbers, (rows, inputs), as (rows, intervals)."""
        return ((features[:, self.numbers] - self.lows) / self.widths).clamp(0, 1)


class MemberNetwork(nn.Module):
    """Networks with common weights, which differ in the scale of their first layer and in their last layer.

    Each is trained by its own loss, and their mean predicts: an ensemble at little more than the cost of one network
    (Gorishniy et al., "TabM", ICLR 2025).

    Args:
        inputs: Number of inputs.
        outputs: Number of outputs of each member.
        dropout: Probability of a zeroed activation after every hidden layer.
    """

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.first = nn.Linear(inputs, _WIDTH, bias=False)
        self.scales = nn.Parameter(0.5 * torch.randn(_MEMBERS, 1, _WIDTH))
        self.shifts = nn.Parameter(torch.empty(_MEMBERS, 1, _WIDTH).uniform_(-1, 1) / math.sqrt(inputs))
        self.hidden = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS - 1))
        self.last = nn.Parameter(torch.randn(_MEMBERS, _WIDTH, outputs) / math.sqrt(_WIDTH))
        self.last_shifts = nn.Parameter(torch.zeros(_MEMBERS, 1, outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        """Computes the outputs of all members, (members, rows, outputs)."""
        values = self.first(inputs) * (1 + self.scales) + self.shifts
        values = functional.dropout(functional.relu(values), self.dropout, self.training)
        for layer in self.hidden:
            values = functional.dropout(functional.relu(layer(values)), self.dropout, self.training)
        return torch.baddbmm(self.last_shifts, values, self.last)


def training_fields(rows: int) -> dict[str, Any]:
    """Returns the fields of the configuration with which the default network is trained on a number of rows."""
    batch = 2 ** round(math.log2(max(1, rows / _MIN_PASS_STEPS)))
    batch = max(_MIN_BATCH, min(_MAX_BATCH, batch))
    # A task that is not prepared does not know its rows, which are 0 then.
    pass_steps = max(1, math.ceil(rows / batch))
    epochs = max(1, round(min(max(_MIN_STEPS, _PASSES * pass_steps), _MAX_STEPS) / pass_steps))
    return {
        "data.global_batch_size": batch,
        "data.cache": "memory",
        "train.epochs": epochs,
        "checkpoint.every_epochs": math.ceil(epochs / _EVALUATIONS),
    }


def optimizer_fields(rows: int) -> dict[str, Any]:
    """Returns the optimizer of the default network, and its schedule: warmup and a cosine over the whole run.

    A large weight decay keeps the network from learning small tables by heart. It falls with the number of steps, so
    all of them shrink a weight about equally.
    """
    fields = training_fields(rows)
    steps = fields["train.epochs"] * math.ceil(rows / fields["data.global_batch_size"])
    decay = round(_WEIGHT_DECAY * min(1.0, _MIN_STEPS / max(1, steps)), 3)
    return {
        "optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": _LEARNING_RATE, "weight_decay": decay},
            "groups": [{"names": ["*scales", "*shifts", "*.bias"], "weight_decay": 0.0}],
        },
        "schedule": {
            "class_path": "torch.optim.lr_scheduler.OneCycleLR",
            "init_args": {"max_lr": _LEARNING_RATE, "pct_start": 0.05, "cycle_momentum": False},
        },
    }
