"""A row that a model predicted wrong, for people to look at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """A row that a model predicted wrong.

    Args:
        row: Which one: its place in the batch, later in the data set.
        truth: What it is.
        predicted: What the model said.
        confidence: How sure it was, 0 to 1.
        image: The row's `Task.picture`.
    """

    row: int
    truth: str
    predicted: str
    confidence: float
    image: bytes | None = None
