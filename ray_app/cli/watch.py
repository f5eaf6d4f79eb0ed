"""The command `ray-app watch`: shows the present state of runs on the terminal and as a page."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial

from rich.console import Console
from rich.live import Live

from ray_app.cli.main import exit_code
from ray_app.runlog.output import TextConsole
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import to_location
from ray_app.watch.live_views import PageServer, RunWatcher, can_redraw, format_line, is_over, render_screen


def main(arguments: list[str] | None = None, prog: str = "ray-app watch") -> int:
    """Runs `ray-app watch`; see `exit_code`."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Shows the state of runs, on a disk or in a bucket, during and after training. The command only"
        " reads files and does not slow the runs.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="directory of a run, <run.storage_path>/<run.name>, on a disk or in a bucket",
    )
    parser.add_argument("--port", type=int, help="also serve a page at this port until Ctrl-C; 0: any free port")
    parser.add_argument("--host", default="127.0.0.1", help="address of the page; default: only this machine")
    options = parser.parse_args(arguments)
    return exit_code(partial(_watch, options), "The runs could not be watched")


def _watch(options: argparse.Namespace) -> None:
    """Watches the runs and, with a port, serves the page."""
    console = TextConsole()
    with ExitStack() as stack:
        looking = stack.enter_context(RunWatcher([RunPaths(to_location(run)) for run in options.runs]))
        if options.port is not None:
            server = stack.enter_context(PageServer(looking, options.host, options.port))
            console.print(f"The page: {server.url}", markup=False, highlight=False, soft_wrap=True)
            if not server.is_private:
                console.print(
                    f"The page listens on {options.host} without encryption: the network can read its token and the"
                    " page. Safer: keep the default, and use ssh -L PORT:127.0.0.1:PORT MACHINE from elsewhere.",
                    style="yellow",
                )
        _show(console, looking, for_ever=options.port is not None)


def _show(console: Console, looking: RunWatcher, for_ever: bool) -> None:
    """Shows the runs until all have ended, or for ever."""
    last_lines: list[str] = []
    with ExitStack() as stack:
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if can_redraw(console) else None
        while True:
            with looking.changed:
                sights = looking.sights
                if live is not None:
                    live.update(render_screen(sights), refresh=True)
                elif (lines := [format_line(sight) for sight in sights]) != last_lines:
                    last_lines = lines
                    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
                if not for_ever and all(sight.facts is not None and is_over(sight.facts) for sight in sights):
                    return
                looking.changed.wait(1.0)
