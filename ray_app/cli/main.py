"""The command `ray-app`: a table of what it does; each is a module beside this one, imported when it is called, so that
help is quick.

How a command ends: what its exit code means, for all of them alike. It imports little, so that a command without torch
can use it.
"""

from __future__ import annotations

import atexit
import difflib
import importlib
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType

from ray_app.errors import is_refusal, unwrap_app_error
from ray_app.process import make_standard_streams_safe, without_gc
from ray_app.version import __version__

COMMANDS = {
    "init": "begin a project of your own: a task, data, a configuration, a test",
    "ingest": "turn raw data into folders of Parquet shards",
    "check": "try a task on some rows, in seconds and without a cluster",
    "train": "train a configuration; the number of workers does not change the result",
    "submit": "submit a run to a Ray cluster, after checks that find what would stop it there",
    "evaluate": "evaluate the checkpoints of a run, also while it trains",
    "watch": "show runs as they are now, on the terminal and as a page",
    "report": "make the page about a run, whatever state it is in",
    "predict": "predict a data set with a trained model",
    "export": "write the model of a run to a folder, for machines without Ray",
    "register": "make the best checkpoint of a run a version in MLflow's model registry",
    "retrain": "train on new data if there is a reason to, and promote the model if it is better",
    "track": "send what MLflow lacks of a run that has ended",
    "drill": "prove on a configuration that failures and resizes change nothing",
}
"""What each subcommand does, by the name of its module."""


def run(prog: str = "ray-app", name: str | None = None) -> int:
    """A command as a process; see `main`.

    It ends without taking Python apart, which takes a second and can abort the process (the code is then SIGABRT's)
    where a thread is still at work in C++: one that has to wait for the interpreter then is ended there.

    Args:
        prog: What the user typed to get here, for messages.
        name: The subcommand; not given: the first argument of the command line names it.
    """
    if name is not None or (sys.argv[1:2] and sys.argv[1] in COMMANDS):  # their exit code says what came of their work
        make_standard_streams_safe()
    codes: list[int] = []
    atexit.register(lambda: _leave(*codes))  # registered first, called last
    codes.append(main(prog=prog) if name is None else _imported(name).main(prog=prog))
    return codes[0]


def _leave(*codes: int) -> None:
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed from the beginning
        try:
            stream.flush()
        except (BrokenPipeError, ValueError):  # nobody reads, or it is closed
            pass
        except OSError:  # a full disk: Python says so and has a code of its own for it
            return
    for code in codes:
        os._exit(code)


def main(arguments: list[str] | None = None, prog: str = "ray-app") -> int:
    """Runs the subcommand that the first argument names with the others.

    Args:
        arguments: The command line without the program; not given: that of this process.
        prog: What the user typed to get here, for messages.

    Returns:
        The subcommand's exit code; 2 if there is no such subcommand.
    """
    given = sys.argv[1:] if arguments is None else arguments
    name, rest = (given[0], given[1:]) if given else ("", [])
    if name in ("-h", "--help"):
        print(_help(prog))
    elif name == "--version":
        print(f"ray-app {__version__}")
    elif name in COMMANDS:
        return int(_imported(name).main(rest, f"{prog} {name}"))
    else:
        print(_refusal(prog, name), file=sys.stderr)
        return 2
    return 0


def _imported(name: str) -> ModuleType:
    """The module of a subcommand."""
    with without_gc():
        return importlib.import_module(f"ray_app.cli.{name}")


def _help(prog: str) -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    above = [
        f"usage: {prog} COMMAND [ARGUMENTS]",
        "",
        "Elastic, bit-exact PyTorch training on Ray clusters whose size changes.",
        "",
    ]
    below = ["", f"{prog} COMMAND --help explains a command and every field of its configuration; {prog} --version."]
    return "\n".join([*above, *lines, *below])


def _refusal(prog: str, name: str) -> str:
    if not name:
        return _help(prog)
    near = difflib.get_close_matches(name, COMMANDS, 1)
    meant = f" Did you mean {near[0]}?" if near else ""
    return f"{prog}: {name!r} is no command.{meant} There are {', '.join(COMMANDS)}; {prog} --help says what each does."


def exit_code(work: Callable[[], object], failed: str) -> int:
    """Does the work of a command and says by the exit code what came of it; an error is a line without secrets on
    standard error.

    Args:
        work: The work, which prints what it has to say.
        failed: What an error other than a refusal means, as the beginning of a sentence.

    Returns:
        0 done, 2 refused, 75 interrupted, 1 failed.
    """
    # These import YAML and NumPy, which `--help` and `--version` do without.
    from ray_app.driver.signals import interrupt_at_sigterm
    from ray_app.runlog.redaction import redact

    try:
        with interrupt_at_sigterm():
            work()
    except KeyboardInterrupt:
        print("Interrupted; it can be started again.", file=sys.stderr)
        return 75
    except Exception as error:
        found = unwrap_app_error(error)
        refused = is_refusal(found)
        print(redact(f"{'' if refused else failed + ': '}{type(found).__name__}: {found}"), file=sys.stderr)
        return 2 if refused else 1
    return 0
