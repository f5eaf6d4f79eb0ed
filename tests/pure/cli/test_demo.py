"""`ray-app demo`: the folder that it writes, and the training that it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ray_app import load_config
from ray_app.cli import demo, train
from ray_app.data.dataset import open_dataset
from tests.support.paths import ROOT


@pytest.mark.parametrize("code", [0, 75])
def test_the_demo_trains_the_digits_in_its_folder(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[list[str], Path]] = []

    def record(arguments: list[str]) -> int:
        started.append((arguments, Path.cwd()))
        return code

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "main", record)
    folder = tmp_path / "ray_app-demo"
    assert demo.main([]) == code
    assert started == [(["--config", "digits.yaml", "--run.name", "demo"], folder)]
    assert sorted(os.listdir(folder)) == ["data", "digits.yaml"]
    assert [open_dataset(f"data/{part}").manifest.num_rows for part in ("train", "eval")] == [1438, 359]
    expected = load_config(ROOT / "conf" / "digits.yaml").replace(
        data__path="data/train", data__eval_path="data/eval", tracking__enabled=False
    )
    assert load_config("digits.yaml") == expected
    assert "--out data && ray-app train --config digits.yaml\n" in (folder / "digits.yaml").read_text()
    output = capsys.readouterr().out
    assert output.startswith(f"{folder} has\n")
    assert ("What to try next:\n  cd ray_app-demo\n" in output) == (code == 0)


def test_a_folder_with_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert demo.main(["--out", str(tmp_path)]) == 2
    assert f"{tmp_path} is not empty, and no file is overwritten. Name a new" in capsys.readouterr().err
    assert demo.main(["--out", str(tmp_path / "file" / "demo")]) == 2
    assert "Name a new, writable folder with --out." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
