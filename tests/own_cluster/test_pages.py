"""The commands and the Python of the pages succeed, in the order of the page, in the folder of a reader.

The folder has copies of `conf` and `datasets`, and the files that the reader of that page has. Every `epochs: N`, in
`conf` and in the files that the page writes, becomes `epochs: 1`, so that a page takes a minute; all else is unchanged.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import EXECUTED, blocks
from tests.support.paths import ROOT

_PAGE_S = 600
_STOP_S = 60


def with_one_epoch(text: str) -> str:
    """Returns a configuration that trains for one epoch."""
    return re.sub(r"\bepochs: \d+", "epochs: 1", text)


def readers_folder(page: str, folder: Path) -> None:
    """Makes a folder in which a reader follows a page."""
    for name in ("conf", "datasets"):
        shutil.copytree(ROOT / name, folder / name)
    for file in (folder / "conf").glob("*.yaml"):
        file.write_text(with_one_epoch(file.read_text()))
    EXECUTED[page](folder)
    for block in blocks(ROOT / page):
        if block.mark == "file":
            (folder / block.argument).write_text(with_one_epoch(block.text))


def script(page: str) -> str:
    """Returns the executed blocks of a page as one script, which prints its position."""
    pieces = []
    for block in blocks(ROOT / page):
        if block.is_executed():
            pieces.append(f"echo '--- {page}, line {block.line}'\n")
            pieces.append(
                f"python - <<'END OF BLOCK'\n{block.text}END OF BLOCK\n" if block.language == "python" else block.text
            )
    return "".join(pieces)


@pytest.mark.rest
@pytest.mark.timeout(_PAGE_S + 2 * _STOP_S)
@pytest.mark.parametrize("page", EXECUTED)
def test_the_blocks_of_a_page_run_without_error(page: str, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    readers_folder(page, folder)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(ROOT)
    }
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    output = tmp_path / "said"
    with output.open("w") as out:
        command = ["bash", "-euo", "pipefail", "-c", script(page)]
        done = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = done.wait(_PAGE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{page} takes longer than {_PAGE_S} s, and said so far:\n{output.read_text()}")
        finally:
            if done.poll() is None:
                os.killpg(done.pid, signal.SIGTERM)
                done.wait(_STOP_S)
    assert code == 0, output.read_text()
