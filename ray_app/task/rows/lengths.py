"""Lists of a row that go along with each other: classes along tokens, and what a model says of each of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ray_app.errors import DataError
from ray_app.task.rows.ragged import LENGTHS, Ragged


def need_as_long(rows: Mapping[str, Any], name: str, others: Sequence[str]) -> None:
    """Refuses rows with a list that is as long as none of some others of the same row.

    Args:
        rows: Columns as read.
        name: Which one; nothing is refused where it is no list, as what stands in for a target that was not read.
        others: Columns, of which the lists are compared.

    Raises:
        ValueError: There is such a row; it says what the first of them has.
    """
    one, lists = rows[name], {other: rows[other].lengths for other in others if isinstance(rows[other], Ragged)}
    if not isinstance(one, Ragged) or not lists:
        return
    fit = np.any([lengths == one.lengths for lengths in lists.values()], axis=0)
    if not fit.all():
        row = int(fit.argmin())
        said = " and ".join(f"{lengths[row]} in {other!r}" for other, lengths in lists.items())
        raise ValueError(f"{one.lengths[row]} numbers in {name!r}, {said}; there must be one for each of these")


def without_padding(outputs: Tensor, batch: dict[str, Tensor], names: Sequence[str]) -> Ragged:
    """What a model says of padded lists, each row as long as its own list.

    Args:
        outputs: Shape (rows, length), (rows, length, 1), or (rows, values, length), on the CPU.
        batch: What they were made of.
        names: Fields that the model takes; the first list that is padded to that length is the one that the outputs go along with.

    Returns:
        Rows of shape (length,) or (length, values).

    Raises:
        DataError: There is no such list, or several in which rows have other lengths.
    """
    padded = {name: batch[name].shape[1] for name in names if name + LENGTHS in batch}
    if outputs.ndim == 3:
        is_one = outputs.shape[2] == 1 and outputs.shape[1] in padded.values()
        outputs = outputs.squeeze(2) if is_one else outputs.movedim(1, 2)
    fits = [name for name, length in padded.items() if outputs.ndim > 1 and outputs.shape[1] == length]
    lengths = [batch[name + LENGTHS].cpu().numpy() for name in fits]
    if not fits or any((other != lengths[0]).any() for other in lengths):
        said = ", ".join(f"{name!r} to {length}" for name, length in padded.items())
        raise DataError(
            f"The outputs are of shape {tuple(outputs.shape)}, of rows whose lists are padded: {said or 'none'}; which of these they go"
            " along with cannot be told, so what they say of padding cannot be left out. Write Task.predicted."
        )
    there = np.arange(outputs.shape[1]) < lengths[0][:, None]
    return Ragged(outputs.numpy()[there], np.cumsum([0, *lengths[0]], dtype=np.int64))
