"""How a command ends: what its exit code means, for all of them alike. It imports little, so that a command without torch can use it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ray_app.errors import is_refusal, own_error
from ray_app.record.redact import redact
from ray_app.runs.signals import ending_at_sigterm


def exit_code(work: Callable[[], object], failed: str) -> int:
    """Does the work of a command and says by the exit code what came of it; an error is a line without secrets on standard error.

    Args:
        work: The work, which prints what it has to say.
        failed: What an error other than a refusal means, as the beginning of a sentence.

    Returns:
        0 done, 2 refused, 75 interrupted, 1 failed.
    """
    try:
        with ending_at_sigterm():
            work()
    except KeyboardInterrupt:
        print("Interrupted; it can be started again.", file=sys.stderr)
        return 75
    except Exception as error:
        found = own_error(error)
        refused = is_refusal(found)
        print(redact(f"{'' if refused else failed + ': '}{type(found).__name__}: {found}"), file=sys.stderr)
        return 2 if refused else 1
    return 0
