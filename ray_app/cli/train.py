"""The command `ray-app train`: trains a configuration, and reports the result by its exit code."""

from __future__ import annotations

import sys
import traceback

import psutil

from ray_app.driver.parsing import parse
from ray_app.driver.run import open_run
from ray_app.errors import RayAppError, is_refusal
from ray_app.process import interrupt_at_signals
from ray_app.runlog.output import TextConsole
from ray_app.runlog.redaction import redact

EXIT_CODES: dict[str, int] = {"finished": 0, "stopped_early": 0, "interrupted": 75, "failed": 1}


def main(arguments: list[str] | None = None, prog: str = "ray-app train") -> int:
    """Runs `ray-app train`; returns 0 if the run is done, 2 if it was refused before anything started.

    It returns 75 if the run was interrupted and can be resumed, 1 if it failed.
    """
    console, started = TextConsole(), False
    try:
        with interrupt_at_signals():
            config = parse(arguments, prog)
            with open_run(config, console, since_s=psutil.Process().create_time()) as run:
                started = True
                result = run.run()
    except KeyboardInterrupt:
        print("Interrupted; start the run again to continue or begin it.", file=sys.stderr)
        return EXIT_CODES["interrupted"]
    except Exception as error:
        if is_refusal(error) and not started:
            print(redact(f"{type(error).__name__}: {error}"), file=sys.stderr)
            return 2
        if not isinstance(error, RayAppError):
            # It is unexpected, so its text may not say where it comes from.
            print(redact(traceback.format_exc()), file=sys.stderr)
        print(redact(f"The run failed: {type(error).__name__}: {error}"), file=sys.stderr)
        if getattr(error, "retryable", True) and started:
            print("Starting it again continues from its newest checkpoint.", file=sys.stderr)
        return 1
    return EXIT_CODES[result.status]
