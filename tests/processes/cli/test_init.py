"""`ray-app init` writes a project that trains and passes its test unchanged, and refuses unusable names and folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ray_app.cli.init import main
from tests.support.paths import ROOT

_PROCESS_S = 240


@pytest.mark.rest
def test_a_new_project_passes_its_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "surface"
    folder.mkdir()
    assert main([str(folder)]) == 0
    assert f"  cd {folder}\n" in capsys.readouterr().out
    assert not any("PACKAGE" in path.read_text() for path in folder.rglob("*") if path.is_file())
    assert len([line for line in (folder / "README.md").read_text().splitlines() if line]) <= 10

    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    tested = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        tested, cwd=folder, env=environment, capture_output=True, text=True, timeout=_PROCESS_S, check=False
    )
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.rest
def test_a_project_with_a_keras_model_passes_its_test_and_exports_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "surface"
    assert main([str(folder), "--keras"]) == 0
    assert {path.name for path in (folder / "surface").iterdir()} == {"__init__.py", "model.py"}

    def run(*command: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PROCESS_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "1 passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider")
    run("make_data.py")
    command = ("-m", "ray_app")
    here = ("--train.strategy", "single", "--evaluate.where", "workers", "--scaling.max_workers", "1")
    run(*command, "train", "--config", "train.yaml", "--run.name", "one", "--train.max_steps", "5", *here)
    run(*command, "export", "--run", "runs/one", "--out", "exported")
    assert (folder / "exported" / "model.keras").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["full"], "full is not empty (it has .hidden), and no file is overwritten. Name a new or an empty folder."),
        (["file"], "A project cannot be written to "),
        (["3d"], "called '3d', which Python cannot import. Set another name with --package"),
        (["class"], "called 'class', which Python cannot import"),
        (["new", "--package", "torch"], "called 'torch', as an installed module is, and one would hide the other"),
        (["random"], "called 'random', as an installed module is"),
        (["tests"], "called 'tests', as a part of the project is"),
    ],
)
def test_init_refuses_unusable_folders_and_package_names(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / ".hidden").touch()
    (tmp_path / "file").touch()
    assert main(arguments) == 2
    assert f"ConfigError: {expected}" in capsys.readouterr().err.replace(f"{tmp_path}/", "").replace(
        "The package would be ", ""
    )
    assert {path.name for path in tmp_path.iterdir()} == {"full", "file"}


def test_the_package_has_the_requested_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "My Project-2" / "deeper"), "--package", "waves"]) == 0
    assert "class_path: waves.task.Surface\n" in (tmp_path / "My Project-2" / "deeper" / "train.yaml").read_text()
    assert main([str(tmp_path / "My Project-3")]) == 0
    assert (tmp_path / "My Project-3" / "my_project_3" / "task.py").exists()
    assert f"  cd '{tmp_path}/My Project-3'\n" in capsys.readouterr().out
