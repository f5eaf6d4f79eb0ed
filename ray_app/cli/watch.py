"""The command `ray-app watch`: shows the present state of runs on the terminal and as a page."""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from functools import partial

from rich.console import Console
from rich.live import Live

from ray_app.cli.main import exit_code
from ray_app.errors import ConfigError
from ray_app.runlog.output import TextConsole
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import poll_interval_s, to_location
from ray_app.tune.record import StudyPaths, read_record
from ray_app.tune.report import StudyState
from ray_app.watch.live_views import PageServer, RunWatcher, can_redraw, format_line, is_over, render_screen


def main(arguments: list[str] | None = None, prog: str = "ray-app watch") -> int:
    """Runs `ray-app watch`; see `exit_code`."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Shows the state of runs, or of a study, on a disk or in a bucket, during and after training. The"
        " command only reads files and does not slow the runs.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="directory of a run, <run.storage_path>/<run.name>, on a disk or in a bucket; or of one study",
    )
    parser.add_argument("--port", type=int, help="also serve a page at this port until Ctrl-C; 0: any free port")
    parser.add_argument("--host", default="127.0.0.1", help="address of the page; default: only this machine")
    options = parser.parse_args(arguments)
    return exit_code(partial(_watch, options), "The runs could not be watched")


def _watch(options: argparse.Namespace) -> None:
    """Watches the runs and, with a port, serves the page."""
    console = TextConsole()
    studies = [paths for run in options.runs if read_record(paths := StudyPaths(to_location(run))) is not None]
    if studies:
        if len(options.runs) > 1 or options.port is not None:
            raise ConfigError(
                f"{studies[0].root} is a study, which is watched alone and without --port; its page is"
                f" {studies[0].report}."
            )
        _watch_study(console, studies[0])
        return
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


def _watch_study(console: Console, paths: StudyPaths) -> None:
    """Shows a study until it has ended."""
    last_line = ""
    with ExitStack() as stack:
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if can_redraw(console) else None
        while True:
            record = read_record(paths)
            assert record is not None, "the record is written whole"
            state = StudyState.read(paths, record)
            if live is not None:
                live.update(state.screen(), refresh=True)
            elif state.status == "finished":
                console.print(state.screen())
            elif state.line != last_line:
                last_line = state.line
                console.print(last_line, markup=False, highlight=False, soft_wrap=True)
            if state.status == "finished":
                return
            time.sleep(poll_interval_s(paths.root))


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
