"""Columns as a task gets them that decodes nothing itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ray_app.task.rows.ragged import Field, Ragged


def plain(values: Any) -> Field:
    """A column of numbers, arrays or lists as read, in types that models are made of.

    Returns:
        Fractions as float32; integers and truth values as int64, (rows,) or ragged, and arrays of them as they are.

    Raises:
        ValueError: It holds something else.
    """
    array = values.values if isinstance(values, Ragged) else np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise ValueError("a column holds no numbers, or a missing value; write Task.decode")
    if array.dtype.kind == "f":
        array = np.asarray(array, np.float32)
    elif isinstance(values, Ragged) or array.ndim == 1:
        array = np.asarray(array, np.int64)
    return replace(values, values=array) if isinstance(values, Ragged) else array
