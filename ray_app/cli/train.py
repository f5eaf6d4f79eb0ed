"""The command `ray-app train`: parses, trains, and says by its exit code what came of it."""

from __future__ import annotations

import sys

import psutil
from rich.console import Console

from ray_app.driver.parsing import parse
from ray_app.driver.run import open_run
from ray_app.driver.signals import interrupt_at_sigterm
from ray_app.errors import is_refusal
from ray_app.runlog.redaction import redact

EXIT_CODES: dict[str, int] = {"finished": 0, "stopped_early": 0, "interrupted": 75, "failed": 1}


def main(arguments: list[str] | None = None, prog: str = "ray-app train") -> int:
    """The command `ray-app train`.

    Returns:
        Exit code: 0 done, 2 refused before anything started, 75 interrupted and resumable, 1 failed.
    """
    console, started = Console(), False
    try:
        with interrupt_at_sigterm():
            config = parse(arguments, prog)
            with open_run(config, console, since_s=psutil.Process().create_time()) as run:
                started = True
                result = run.run()
    except KeyboardInterrupt:
        print("Interrupted; starting it again continues the run, or begins it if it had not begun.", file=sys.stderr)
        return EXIT_CODES["interrupted"]
    except Exception as error:
        if is_refusal(error) and not started:
            print(redact(f"{type(error).__name__}: {error}"), file=sys.stderr)
            return 2
        print(redact(f"The run failed: {type(error).__name__}: {error}"), file=sys.stderr)
        if getattr(error, "retryable", True) and started:
            print("Starting it again continues from its newest checkpoint.", file=sys.stderr)
        return 1
    return EXIT_CODES[result.status]
