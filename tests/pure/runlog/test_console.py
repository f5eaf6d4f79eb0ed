"""Texts of data cannot act on a terminal, nor look like further lines of a log: names, errors, another run's events."""

import io
import logging
import pickle
import re
from pathlib import Path

import pytest
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ray_app.cli import ingest, report, watch
from ray_app.errors import BadRowError, ConfigError, RayAppError, TaskError, escape_controls
from ray_app.runlog.output import TextConsole, without_colors
from ray_app.runlog.redaction import redact
from ray_app.watch.terminal import Finding, SafeConsole, print_findings
from tests.support.paths import ROOT
from tests.support.run_directory import make_full_run

HOSTILE = "cat\x1b]52;c;AAAA\x07\x1b[2J\x9b31m\u202ecod\r!"
ESCAPED = r"cat\x1b]52;c;AAAA\x07\x1b[2J\x9b31m\u202ecod\x0d!"
_OF_RICH = re.compile(r"\x1b\[(?:[\d;]*[mA-K]|\?25[hl])|\r(?=\x1b)")


def is_harmless(text: str) -> bool:
    """Returns whether a text has no control characters but those that rich writes itself, and the ends of lines."""
    return not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", _OF_RICH.sub("", text))


def test_only_tabs_and_ends_of_lines_are_kept() -> None:
    controls = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]))
    escaped = escape_controls(controls)
    assert re.sub(r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}", "", escaped) == "\t\n"
    assert escaped.count("\\") == len(controls) - 2
    assert escape_controls("Zürich 猫 🐈\r\n\tא") == "Zürich 猫 🐈\r\n\tא"
    assert escape_controls(escaped) == escaped


@pytest.mark.parametrize(
    "error",
    [
        RayAppError(HOSTILE),
        ConfigError(HOSTILE),
        BadRowError(HOSTILE, 1, 2, HOSTILE),
        TaskError(HOSTILE, HOSTILE, HOSTILE),
    ],
)
def test_the_text_of_an_error_is_harmless(error: RayAppError) -> None:
    text = str(pickle.loads(pickle.dumps(error)))
    assert ESCAPED in text
    assert is_harmless(text)
    assert is_harmless(redact(f"x {HOSTILE}"))


def test_whatever_a_console_prints_is_harmless() -> None:
    file = io.StringIO()
    console = TextConsole(file=file, force_terminal=True, width=200, color_system="truecolor")
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(Text(HOSTILE, "red"))
    console.print(HOSTILE, Group(table, Panel(HOSTILE)), markup=False)
    with Live(console=console, auto_refresh=False) as live:
        live.update(Group(Text(HOSTILE), table), refresh=True)
    print_findings(console, [Finding("refused", HOSTILE, HOSTILE)])
    theirs = io.StringIO()
    SafeConsole(Console(file=theirs, force_terminal=True)).print(HOSTILE)
    for text in (file.getvalue(), theirs.getvalue()):
        assert ESCAPED in _OF_RICH.sub("", text)
        assert is_harmless(text)
    assert "\x1b[" in file.getvalue(), "rich has no colors any more"


def test_a_text_with_line_breaks_does_not_look_like_further_records(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("ray_app.some.module")
    logger.addHandler(handler)
    forged = f"no file\n2026-01-01 00:00:00,000 INFO ray_app.train: all is well\r2026 \x85 2026 \u2028 {HOSTILE}"
    try:
        logger.error("Cannot be read: %s", forged)
        raise ValueError(forged)
    except ValueError:
        logger.exception("Failed")
    finally:
        logger.removeHandler(handler)
    assert is_harmless(stream.getvalue())
    starts = [line for line in stream.getvalue().splitlines() if not line.startswith("  ")]
    assert [line.split(" ERROR ")[1].split(":")[0] for line in starts] == ["ray_app.some.module"] * 2


@pytest.mark.parametrize("options", [["--dry_run", "true"], []])
def test_names_of_a_data_set_do_not_act_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    name = HOSTILE.replace("\r", "")
    (tmp_path / "in.csv").write_text(f"x,{name}2,kind\n" + f"1,2,{name}\n3,4,dog\n" * 9, newline="")
    source = ["--source", "csv", "--input", str(tmp_path / "in.csv"), "--label", "kind"]
    ingest.main([*source, *options, "--out", str(tmp_path / "out")])
    output = capsys.readouterr()
    assert r"cat\x1b]52" in output.out + output.err
    assert is_harmless(output.out + output.err), repr(output)


def test_events_of_another_run_do_not_act_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_full_run(tmp_path, "full", text=HOSTILE)
    run.event("finished", 99.0, step=400)
    for main, option in ((watch.main, []), (report.main, ["--run"])):
        main([*option, str(run.paths.root)])
        output = capsys.readouterr()
        assert output.out
        assert is_harmless(output.out + output.err), repr(output)


def test_output_of_user_code_has_a_line_for_each_state_of_a_bar() -> None:
    assert without_colors("\x1b[1;31mred\x1b[0m\r\n1%\r2%\n") == "red\n1%\n2%\n"


def test_every_console_is_one_of_texts() -> None:
    pattern = re.compile(r"(?<![\w.])Console\(")
    assert [str(file) for file in (ROOT / "ray_app").rglob("*.py") if pattern.search(file.read_text())] == []
