"""A console that never ends a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from ray_app.record.safe_stream import SafeStream

logger = logging.getLogger(__name__)


class SafeConsole:
    """A console whose failures stay in it: a full disk, a closed pipe, a notebook that is gone. The first one is reported.

    Args:
        console: Where to print.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._failure: BaseException | None = None
        self._report: Callable[[str], object] | None = None
        self._is_reported = False

    def report_to(self, report: Callable[[str], object]) -> None:
        """Calls `report` with the reason of the first failure, once; at once if there was one before."""
        self._report = report
        self._report_failure()

    def print(self, text: str) -> None:
        """Prints a text as it is, without markup."""
        with self.guarded():
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """The time in which something is shown; whatever that raises is no matter of the run."""
        try:
            yield
        except SystemExit as error:  # rich exits where nobody reads a pipe any more; the code of a signal is another
            if error.code != 1:
                raise
            self._fail(BrokenPipeError("nobody reads standard output any more"))
        except Exception as error:
            self._fail(error)
        self._report_failure()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            logger.warning("The console fails, the run goes on: %s: %s", type(error).__name__, error)

    def _report_failure(self) -> None:
        stream = self.console.file
        failure = self._failure or (stream.failure if isinstance(stream, SafeStream) else None)
        if failure is not None:
            self._report_once(f"{type(failure).__name__}: {failure}")

    def _report_once(self, reason: str) -> None:
        if self._report is not None and not self._is_reported:
            self._is_reported = True
            self._report(reason)

    def as_plain(self) -> SafeConsole:
        """The same without a terminal's and a notebook's display, for plain lines."""
        plain = SafeConsole(Console(file=self.console.file, force_terminal=False, force_jupyter=False, quiet=self.console.quiet))
        plain._report = self._report_once
        return plain
