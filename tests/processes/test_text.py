"""docs/text.md: texts become tokens, and a configuration alone tells them apart, with the bits that are promised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ray_app import check_task, load_config
from ray_app.cli.ingest import main
from tests.support.pages import blocks
from tests.support.places import ROOT
from tests.support.texts import write_texts

PAGE = ROOT / "docs" / "text.md"


def lines_of(name: str) -> str:
    """A shipped configuration without its header."""
    return "".join(line for line in (ROOT / "conf" / name).read_text().splitlines(True) if not line.startswith("#"))


def test_the_page_shows_the_configuration_and_counts_its_lines() -> None:
    [shown] = [block.text for block in blocks(PAGE) if block.language == "yaml"]
    assert shown == lines_of("text.yaml")
    counted = re.search(r"\*\*(\d+) lines of YAML, no Python\*\*", PAGE.read_text())
    assert counted is not None
    assert int(counted[1]) == len(shown.splitlines()) <= 25


@pytest.mark.rest
def test_the_page_tells_texts_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker against four, a resume in the middle on two, evaluation and export, in bf16."""
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    [command] = [line for block in blocks(PAGE) for line in block.text.splitlines() if line.startswith("ray-app ingest")]
    assert main(command.split()[2:]) == 0
    found = check_task(load_config(ROOT / "conf" / "text.yaml", run__storage_path=str(tmp_path / "runs")))
    assert [(f.level, f.topic) for f in found.findings] == [
        ("ok", topic) for topic in ("one row", "randomness", "workers", "resume", "evaluation", "export")
    ], found
