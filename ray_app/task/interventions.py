"""Interventions: what code in the driver's process changes about a run between two epochs.

Callbacks of Keras are such code. At the start and after each epoch all workers wait until it has answered. The answer
is on storage before it takes effect, so a resume repeats it and does not ask again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn


@dataclass(frozen=True)
class EpochEnd:
    """A run between two epochs, while no worker steps.

    Args:
        step: Number of finished steps; 0 before the first epoch.
        epoch: Number of finished epochs, of which the last one may have ended early.
        epochs: Number of epochs of the run.
        steps_per_epoch: Steps of an epoch.
        lr: The learning rate of the last step, or the first one.
        batches: For each step of the last epoch the means of loss and metrics from the beginning of the epoch on; empty
            where `at_batch` was called after each step.
        logs: The means over the last epoch.
        scores: The evaluation of this step by the names of the metrics; None if none is planned here.
        eval_batches: Number of batches of an evaluation.
        is_live: Whether the calling process trains, so that `Intervener.at_batch` is called.
        parameters: Parameters and persistent buffers of the model by name.
        build_model: Builds the model of the run, with other parameters.
        has_ended: Whether the epoch has ended before, as the last one of a run that has more epochs now; then only the
            next one begins.
        before: The newest intervention of an earlier process, at the first call in this one; None if there is none.
    """

    step: int
    epoch: int
    epochs: int
    steps_per_epoch: int
    lr: float
    batches: Sequence[Mapping[str, float]]
    logs: Mapping[str, float]
    scores: Mapping[str, float] | None
    eval_batches: int
    is_live: bool
    parameters: Mapping[str, Tensor]
    build_model: Callable[[], nn.Module]
    has_ended: bool = False
    before: Intervention | None = None

    @property
    def is_last(self) -> bool:
        """Whether no epoch follows."""
        return self.epoch >= self.epochs


@dataclass(frozen=True)
class Intervention:
    """A change of a run between two epochs.

    Args:
        stops: Whether training is over.
        is_last: Whether the code took the epoch for the last one.
        lr: The learning rate of the next steps; None leaves it as it is.
        parameters: New parameters and persistent buffers of the model by name; None leaves them as they are.
        logs: Values of the epoch that the run itself does not have.
        state: What another process needs to know for the next intervention: a text without code.
        arrays: Tensors that belong to `state`, by name.
    """

    stops: bool = False
    is_last: bool = False
    lr: float | None = None
    parameters: Mapping[str, Tensor] | None = None
    logs: Mapping[str, float] = field(default_factory=dict)
    state: str = ""
    arrays: Mapping[str, Tensor] = field(default_factory=dict)


class Intervener(Protocol):
    """Code that changes a run between two epochs; the driver's process calls it once for each of them."""

    def __call__(self, end: EpochEnd) -> Intervention:
        """Returns the change; an exception ends the run."""

    def resume(self, end: EpochEnd) -> None:
        """Is called before the steps of a run that goes on within an epoch in the calling process."""

    def at_batch(self, number: int, logs: Mapping[str, float]) -> bool:
        """Is called after each step of a run that trains in the calling process; returns whether the epoch ends there.

        Args:
            number: Number of the step in its epoch, from 0.
            logs: The means from the beginning of the epoch on.
        """
