"""Class names out of the values of a label column."""

from __future__ import annotations

from ray_app.errors import DataError

MAX_CLASSES = 100_000


def sorted_classes(where: str, found: set[str], skip: bool) -> tuple[str, ...]:
    """The class names in sorted order.

    Args:
        where: The column, for messages.
        found: The values; "" stands for a row without one.
        skip: Whether rows without a value may be left out.

    Raises:
        DataError: Rows have no value, or there are too many different ones.
    """
    if ("" in found and not skip) or len(found) > MAX_CLASSES:
        wrong = f"more than {MAX_CLASSES} different strings" if len(found) > MAX_CLASSES else "rows without a value"
        raise DataError(f"{where} has {wrong}. Name another column or correct these rows.")
    return tuple(sorted(found - {""}))
