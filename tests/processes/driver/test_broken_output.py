"""A run with an unwritable standard output or standard error finishes, and records the failure once."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable

import pytest

from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import read_json, to_location
from tests.support.paths import ROOT

_PROCESS_S = 240


@pytest.mark.rest
@pytest.mark.parametrize(
    ("redirected", "settings", "failures"),
    [
        pytest.param("> /dev/full", {}, 1, id="full disk"),
        pytest.param("> /dev/full 2>&1", {}, 1, id="full disk, standard error as well"),
        pytest.param("2> /dev/full", {}, 0, id="standard error alone"),
        pytest.param("> >(exec true)", {}, 1, id="closed pipe"),
        pytest.param(">&- 2>&-", {}, 0, id="closed from the beginning"),
        pytest.param("> /dev/null", {"PYTHONIOENCODING": "ascii"}, 0, id="ascii"),
    ],
)
def test_a_run_with_broken_output_finishes(
    make_arguments: Callable[..., list[str]], redirected: str, settings: dict[str, str], failures: int
) -> None:
    arguments = make_arguments(
        "--train.strategy=single", "--scaling.max_workers=1", "--train.max_steps=6", "--data.eval_path=null"
    )
    storage = next(part.partition("=")[2] for part in arguments if part.startswith("--run.storage_path"))
    arguments = [*arguments, f"--run.storage_path={storage}/Läufe ✓"]
    line = f"exec {shlex.join([sys.executable, '-m', 'ray_app', 'train', *arguments])} {redirected}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=os.environ | settings, timeout=_PROCESS_S, check=False)
    paths = RunPaths(to_location(f"{storage}/Läufe ✓/run"))
    assert done.returncode == 0
    assert read_json(paths.summary)["status"] == "finished"
    assert len(read_events(paths, "console_failed")) == failures
