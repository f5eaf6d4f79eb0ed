"""The command `ray-app` and its subcommands, and the exit codes that they share.

Each subcommand is a module beside this one, which is imported when it is called, so that `--help` is quick. This module
imports little, so that commands without torch can use it.
"""

from __future__ import annotations

import atexit
import difflib
import importlib
import locale
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType

from ray_app.errors import is_refusal, unwrap_app_error
from ray_app.process import interrupt_at_signals, make_standard_streams_safe, without_gc
from ray_app.version import __version__

COMMANDS = {
    "demo": "train on the bundled handwritten digits, in a new folder",
    "init": "create a project: a task, data, a configuration, a test",
    "ingest": "turn raw data into folders of Parquet shards",
    "describe": "show the contents of a data set: columns, values, missing values",
    "check": "try a configuration on some rows, in seconds and without a cluster",
    "train": "train a configuration; the number of workers does not change the result",
    "launch": "form a Ray cluster of a scheduler's machines, and train on it: run on each machine",
    "submit": "submit a run or a study to a Ray cluster as a job, after checks",
    "evaluate": "evaluate the checkpoints of a run, during or after training",
    "watch": "show the state of runs or of a study, in the terminal and as a page",
    "report": "write the report page of a run in any state",
    "predict": "predict a data set with a trained model",
    "export": "write the model of a run to a folder, for machines without Ray",
    "register": "register the best checkpoint of a run in MLflow's model registry",
    "tune": "try settings on many trials, and find the best ones",
    "retrain": "train on new data if needed, and promote the model if it is better",
    "track": "send the missing record of an ended run to MLflow",
    "drill": "prove that failures and resizes do not change the result of a configuration",
}
"""Description of each subcommand, by the name of its module."""


def run(prog: str = "ray-app", name: str | None = None) -> int:
    """Runs a command as a process and returns its exit code; see `main`.

    The process ends without the shutdown of the interpreter, which takes a second, and can abort the process if a
    thread in C++ waits for the interpreter. By default the first argument of the command line names the subcommand.
    """
    # Python reads texts in the encoding of the locale, and chooses it at its start.
    if locale.getencoding().lower() not in ("utf-8", "utf8") and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    # The exit code of a subcommand reports its work, so a closed output must not change it.
    if name is not None or (sys.argv[1:2] and sys.argv[1] in COMMANDS):
        make_standard_streams_safe()
    codes: list[int] = []
    # The first registered function is called last.
    atexit.register(lambda: _exit_process(*codes))
    try:
        # A command takes seconds to import.
        with interrupt_at_signals():
            codes.append(main(prog=prog) if name is None else _import_command(name).main(prog=prog))
    except KeyboardInterrupt:
        print("Interrupted; the command can be started again.", file=sys.stderr)
        codes.append(75)
    return codes[0]


def _exit_process(*codes: int) -> None:
    """Flushes the output and ends the process with the exit code, if there is one."""
    logging.shutdown()
    # A standard stream that was closed before the start is None.
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (BrokenPipeError, ValueError):
            # The reader is gone, or the stream is closed.
            pass
        except OSError:
            # The disk is full: Python itself reports this, with its own exit code.
            return
    for code in codes:
        os._exit(code)


def main(arguments: list[str] | None = None, prog: str = "ray-app") -> int:
    """Runs the subcommand that the first argument names with the remaining ones; returns its exit code, 2 if unknown.

    `prog` is the program as the user typed it, for messages.
    """
    command_line = sys.argv[1:] if arguments is None else arguments
    name, rest = (command_line[0], command_line[1:]) if command_line else ("", [])
    if name in ("-h", "--help"):
        print(_help(prog))
    elif name == "--version":
        print(f"ray-app {__version__}")
    elif name in COMMANDS:
        # It imports psutil, which `--help` and `--version` do without.
        from ray_app.config.variables import bypass_proxies

        os.environ.update(bypass_proxies(os.environ))
        return int(_import_command(name).main(rest, f"{prog} {name}"))
    else:
        print(_refusal(prog, name), file=sys.stderr)
        return 2
    return 0


def _import_command(name: str) -> ModuleType:
    """Imports and returns the module of a subcommand."""
    with without_gc():
        return importlib.import_module(f"ray_app.cli.{name}")


def _help(prog: str) -> str:
    """Returns the text of `--help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {description}" for name, description in COMMANDS.items()]
    above = [
        f"usage: {prog} COMMAND [ARGUMENTS]",
        "",
        "Elastic, bit-exact PyTorch training on Ray clusters whose size changes.",
        "",
    ]
    below = ["", f"{prog} COMMAND --help explains a command and each field of its configuration; {prog} --version."]
    return "\n".join([*above, *lines, *below])


def _refusal(prog: str, name: str) -> str:
    """Returns the message for an unknown subcommand."""
    if not name:
        return _help(prog)
    near = difflib.get_close_matches(name, COMMANDS, 1)
    meant = f" Did you mean {near[0]}?" if near else ""
    return f"{prog}: {name!r} is not a command.{meant} Commands: {', '.join(COMMANDS)}; {prog} --help explains them."


def exit_code(
    work: Callable[[], int | None],
    failed: str,
    interrupted: tuple[str, int] = ("Interrupted; the command can be started again.", 75),
    is_started: Callable[[], bool] = lambda: False,
) -> int:
    """Does the work of a command and returns its exit code; an error is a line without secrets on standard error.

    Args:
        work: Does the work and prints its output; returns the exit code, None for 0.
        failed: The meaning of an error other than a refusal, as the beginning of a sentence.
        interrupted: The message and the exit code after SIGINT or SIGTERM.
        is_started: Returns whether the work has begun, so that an error is no refusal any more.

    Returns:
        0 if the work is done, 2 if it was refused, 75 if it was interrupted, 1 if it failed.
    """
    # It imports YAML and NumPy, which `--help` and `--version` do without.
    from ray_app.runlog.redaction import redact

    try:
        with interrupt_at_signals():
            return work() or 0
    except KeyboardInterrupt:
        message, code = interrupted
        print(message, file=sys.stderr)
        return code
    except Exception as error:
        app_error = unwrap_app_error(error)
        refused = is_refusal(app_error) and not is_started()
        print(redact(f"{'' if refused else failed + ': '}{type(app_error).__name__}: {app_error}"), file=sys.stderr)
        return 2 if refused else 1
