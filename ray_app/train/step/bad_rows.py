"""The list of the rows that a run skipped because they cannot be decoded: a file each, so that whoever meets one first may write it."""

from __future__ import annotations

import logging

from ray_app.data.feed.windows import MicroBatch
from ray_app.errors import DataError
from ray_app.record.files import names, put_json
from ray_app.train.job import Job

logger = logging.getLogger(__name__)


class BadRows:
    """What one worker adds to the list.

    Args:
        job: The run.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pending: dict[int, str] = {}
        self._listed: set[int] = set()

    def note(self, batches: list[MicroBatch]) -> None:
        """Lists the bad rows of a step that is about to be done; what cannot be written now is tried again at the next step.

        Raises:
            DataError: The run has met more of them than `data.max_bad_rows`.
        """
        for batch in batches:
            self._pending |= {position: why for position, why in batch.bad.items() if position not in self._listed}
        if not self._pending:
            return
        folder, most = self._job.paths.bad_rows, self._job.config.data.max_bad_rows
        try:
            for position, reason in self._pending.items():
                self._put(position, reason)
            self._listed |= self._pending.keys()
            self._pending = {}
            found = len(names(folder))
        except OSError as error:
            logger.warning("Bad rows could not be listed, will try again: %s", error)
            return
        if found > most:
            raise DataError(
                f"{found} rows cannot be decoded, more than data.max_bad_rows = {most}; {folder} lists them with the reasons. Start the run"
                " again with a higher limit, and it goes on where it was, or mend the data for a new run."
            )

    def _put(self, position: int, reason: str) -> None:
        path, row_group, row = self._job.plan.manifest.place_of(position)
        entry = {"position": position, "path": path, "row_group": row_group, "row": row, "reason": reason}
        put_json(self._job.paths.bad_rows / f"{position:012d}.json", entry)
