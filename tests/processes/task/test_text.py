"""docs/text.md and docs/language-model.md: ingest tokenizes texts, and configurations alone train on them
bit-identically.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ray_app import check_task, load_config
from ray_app.cli.ingest import main
from tests.support.pages import blocks
from tests.support.paths import ROOT
from tests.support.task_checks import all_ok, levels
from tests.support.texts import write_texts

PAGES = {"text": ROOT / "docs" / "text.md", "language_model": ROOT / "docs" / "language-model.md"}


@pytest.mark.rest
@pytest.mark.parametrize("name", PAGES)
def test_the_configuration_of_a_page_trains_on_texts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check_task` compares one worker with four, resumes midway on two, evaluates and exports, in bf16."""
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    [command] = [
        line
        for block in blocks(PAGES[name])
        for line in block.text.splitlines()
        if line.startswith("ray-app ingest") and "--tokenizer" in line
    ]
    assert main(shlex.split(command)[2:]) == 0
    check = check_task(load_config(ROOT / "conf" / f"{name}.yaml", run__storage_path=str(tmp_path / "runs")))
    assert levels(check) == all_ok(), check
