"""What a prediction says of a row to a person: the name of its class with probabilities, a number, named values.

A class is `{"label": "cat", "probability": 0.93, "probabilities": {"cat": 0.93, "dog": 0.07}}`. Of labels that do not
exclude each other it is `{"labels": ["cat", "indoors"], "probabilities": {...}}`, with those above 0.5. Values are
plain Python, so that an answer can be printed, compared and written as JSON.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ray_app.task.ragged import Arrays, Ragged

_THRESHOLD = 0.5
"""Labels that do not exclude each other are those with a probability above it."""


def class_answers(probabilities: Tensor, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the most probable class of each row, from probabilities (rows, classes)."""
    answers = []
    for row in probabilities.tolist():
        best = max(range(len(row)), key=row.__getitem__)
        by_name = dict(zip(classes, row, strict=True))
        answers.append({"label": classes[best], "probability": row[best], "probabilities": by_name})
    return answers


def label_answers(probabilities: Tensor, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the labels of each row with a probability above 0.5, from probabilities (rows, classes)."""
    rows = [dict(zip(classes, row, strict=True)) for row in probabilities.tolist()]
    return [
        {"labels": [name for name, value in row.items() if value > _THRESHOLD], "probabilities": row} for row in rows
    ]


def row_answers(columns: Arrays) -> list[Any]:
    """Returns the only column `predicted` by row, or all columns of each row by name."""
    if columns.keys() == {"predicted"}:
        return _values(columns["predicted"])
    lists = {name: _values(column) for name, column in columns.items()}
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def _values(column: Any) -> list[Any]:
    """Returns a value of Python for each row of numbers or texts, and an array for each row of arrays or lists."""
    if isinstance(column, Ragged):
        return [column.row(row) for row in range(len(column))]
    return column.tolist() if column.ndim == 1 else list(column)
