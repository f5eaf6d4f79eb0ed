"""The command `ray-app train` in this process, and its arguments."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ray_app.cli.train import main
from tests.support.paths import ROOT


@dataclass(frozen=True)
class CommandResult:
    """The exit code and output of a call of the command."""

    code: int
    out: str
    err: str


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str]) -> Callable[[Sequence[str]], CommandResult]:
    """Returns a function that calls the command in this process."""

    def run(arguments: Sequence[str]) -> CommandResult:
        try:
            code: Any = main(list(arguments))
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        return CommandResult(code, captured.out, captured.err)

    return run


@pytest.fixture
def make_arguments(digits: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Returns a function that appends arguments to those of a valid command."""

    def make(*more: str) -> list[str]:
        fields = {
            "config": str(ROOT / "conf" / "digits.yaml"),
            "data.path": str(digits / "train"),
            "data.eval_path": str(digits / "eval"),
            "run.storage_path": str(tmp_path / "runs"),
            "run.name": "run",
            "tracking.enabled": "false",
        }
        return [*(f"--{name}={value}" for name, value in fields.items()), *more]

    return make


def write_images(folder: Path, count: int, group: int, bad: int) -> Path:
    """Writes JPEG images in row groups of `group` rows with alternating labels; image `bad` is cut off."""
    folder.mkdir()
    random = np.random.default_rng(0)
    files = [BytesIO() for _ in range(count)]
    for file in files:
        Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(file, "JPEG")
    images = [file.getvalue() for file in files]
    images[bad] = images[bad][:40]
    table = pa.table({"image": images, "label": [i % 2 for i in range(count)]})
    pq.write_table(table, folder / "images.parquet", row_group_size=group)
    return folder


def image_arguments(folder: Path) -> list[str]:
    return [
        "--task.class_path=ray_app.task.image.ImageClassification",
        "--task.init_args.pixel_max=255",
        "--task.init_args.size=16",
        f"--data.path={folder}",
        "--data.eval_path=null",
        "--data.cache=none",
        "--data.global_batch_size=8",
        "--data.shuffle_window_rows=96",
        "--scaling.max_workers=1",
    ]


def run_benchmark(*command: str) -> str:
    """Runs a benchmark in another process, as from a shell, and returns its output."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
