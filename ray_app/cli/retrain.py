"""The command `ray-app retrain`: retrains a model, shows its audit record, or rolls it back."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table

from ray_app.cli.main import exit_code
from ray_app.config.config import Config
from ray_app.driver.parsing import parse_with_sections
from ray_app.errors import ConfigError, LeaseLostError, RegistryError, RunHeldError
from ray_app.retrain.options import RetrainSection, check_section
from ray_app.retrain.retraining import EXIT_CODES, retrain
from ray_app.retrain.rounds import RetrainPaths, read_audit_entries
from ray_app.retrain.situation import roll_back
from ray_app.runlog.output import TextConsole
from ray_app.runlog.redaction import redact, register_secrets

_DESCRIPTION = "Trains on new data if needed, and promotes the model if it is better than the one that serves."
_INTERRUPTED = 75


def history(config: Config) -> Table:
    """Returns the audit record of a configuration's model as a table, oldest entry first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("when (UTC)", "what", "version", "why", "who"):
        table.add_column(column, overflow="fold")
    for entry in read_audit_entries(RetrainPaths.of(config)):
        version = entry.get("version")
        author = entry.get("by") or entry["who"]
        table.add_row(entry["when"][:19], entry["what"], str(version or "-"), redact(entry["why"]), author)
    return table


def _run(parser: argparse.ArgumentParser, arguments: list[str] | None, console: Console) -> int:
    """Retrains, or does what an option of the command requests, and returns the exit code."""
    options, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(rest):
        parser.print_help()
    config, sections = parse_with_sections(rest, {"retrain": RetrainSection}, parser.prog, description=_DESCRIPTION)
    section: RetrainSection = sections["retrain"]
    check_section(config, section)
    register_secrets(config.to_dict())
    if options.history:
        console.print(history(config))
        return 0
    if options.rollback is not None:
        try:
            rollback = roll_back(config, options.rollback)
        except RegistryError as error:
            raise ConfigError(f"The rollback was refused: {error}") from error
        console.print(
            f"rolled back to version {rollback.to} from version {rollback.version}: {rollback.reason}",
            markup=False,
            highlight=False,
        )
        return 0
    return EXIT_CODES[retrain(config, section, console).kind]


def main(arguments: list[str] | None = None, prog: str = "ray-app retrain") -> int:
    """Runs `ray-app retrain`; see `exit_code`. It also returns 75 if another scheduler is active."""
    console = TextConsole(file=sys.stdout, width=None if sys.stdout.isatty() else 150)
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument(
        "--rollback",
        metavar="REASON",
        help="Makes the previous champion serve again, without training. Repeating a reason goes back no further.",
    )
    parser.add_argument("--history", action="store_true", help="Shows the audit record and ends.")

    def work() -> int:
        try:
            return _run(parser, arguments, console)
        except (RunHeldError, LeaseLostError) as error:
            print(redact(f"Another process retrains this model; start again later: {error}"), file=sys.stderr)
            return _INTERRUPTED

    interrupted = "Interrupted; start again to continue.", _INTERRUPTED
    return exit_code(work, "The retraining failed; start again to continue", interrupted)
