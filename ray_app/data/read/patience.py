"""Reading of stored data that does not give up at the first error of the storage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa

from ray_app.data.dataset.files import Place, unusable
from ray_app.errors import DataError, StorageError

logger = logging.getLogger(__name__)

T = TypeVar("T")
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Between the tries, each of which is some of the client's own."""
_LASTING = ("ACCESS_DENIED", "NO_SUCH_", "INVALID_ACCESS_KEY", "SIGNATURE_DOES_NOT_MATCH")


def patiently(place: Place, read: Callable[[], T]) -> T:
    """What `read` gives of a place; where the storage fails in a way that may pass, it is tried again for about half a minute.

    Raises:
        StorageError: The disk, the network or S3 still fails.
        DataError: What is stored is to blame, it is gone, or may not be read.
    """
    pauses = iter(PAUSES_S)
    while True:
        try:
            return read()
        except (OSError, pa.ArrowException) as error:
            if isinstance(error, FileNotFoundError | PermissionError) or any(code in str(error) for code in _LASTING):
                raise DataError(f"{place} is gone or may not be read: {error}. Restore it, or allow it.") from error
            found = unusable(place, error, "It cannot be read as Parquet; restore it or ingest the data again.")
            pause = next(pauses, None)
            if not isinstance(found, StorageError) or pause is None:
                raise found from error
            logger.warning("%s cannot be read now, trying again in %.1f s: %s", place, pause, error)
        time.sleep(pause)
