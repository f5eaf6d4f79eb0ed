"""A stored configuration names classes, so one that others can write is refused before anything is imported."""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path

import pytest

from ray_app.cli import evaluate, report
from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.preflight.prepare import put_config
from ray_app.runlog import stored_config as module
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.stored_config import TRUSTED_RUNS, read_code_text, read_config, stored_config
from tests.support.paths import ROOT
from tests.support.run_directory import make_full_run
from tests.support.users import ROOT_ONLY


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    run = RunPaths(tmp_path / "runs" / "one")
    put_config(run, Config())
    return run


@pytest.mark.parametrize("secret", [{}, {"token": "canary-1"}])
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_only_the_owner_can_write_a_stored_configuration(paths: RunPaths, umask: int, secret: dict[str, str]) -> None:
    before = os.umask(umask)
    try:
        put_config(paths, Config().replace(task__init_args=secret))
    finally:
        os.umask(before)
    assert stat.S_IMODE(paths.config.stat().st_mode) == (0o600 if secret else 0o644) & ~umask
    assert read_config(paths).task.init_args == secret


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o777, 0o620])
def test_a_configuration_that_others_can_write_is_refused(
    paths: RunPaths, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths.config.chmod(mode)
    command = re.escape(f"chmod go-w {paths.config}, or {TRUSTED_RUNS}=")
    message = rf"can be written by other users \(mode {mode:o}\).*{command}"
    for read in (read_config, stored_config):
        with pytest.raises(ConfigError, match=message):
            read(paths)
    monkeypatch.setenv(TRUSTED_RUNS, f"/elsewhere:{paths.root}-2")
    with pytest.raises(ConfigError):
        read_config(paths)
    monkeypatch.setenv(TRUSTED_RUNS, f"/elsewhere:{paths.root.parent}")
    assert read_config(paths) == Config()
    monkeypatch.delenv(TRUSTED_RUNS)
    paths.config.chmod(mode & ~0o022)
    assert read_config(paths) == Config()


@ROOT_ONLY
@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_a_configuration_of_another_user_is_refused(
    paths: RunPaths, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(paths.config, 12345, -1)
    paths.config.chmod(mode)
    with pytest.raises(ConfigError, match=rf"belongs to another user \(uid 12345\).*{TRUSTED_RUNS}="):
        read_config(paths)
    # A configuration of root is no danger to others: root can do everything anyway.
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert read_config(paths) == Config()


@ROOT_ONLY
@pytest.mark.parametrize(("owner", "mode"), [(12345, 0o777), (65534, 0o644), (0, 0o777)])
def test_a_file_system_that_gives_all_files_one_owner_or_mode_is_no_reason_to_refuse(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, owner: int, mode: int
) -> None:
    """As SMB, exFAT and gcsfuse, and NFS with `all_squash`, show them; none can be mounted here."""
    os.chown(paths.config, owner, -1)
    paths.config.chmod(mode)
    with pytest.raises(ConfigError):
        read_config(paths)
    monkeypatch.setattr(module, "new_file_status", lambda folder: (folder / "config.yaml").stat())
    assert read_config(paths) == Config()


def test_a_folder_that_cannot_be_written_tells_nothing_of_its_file_system(paths: RunPaths, tmp_path: Path) -> None:
    status = module.new_file_status(paths.root)
    assert status is not None
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.geteuid(), 0o600)
    assert list(paths.root.iterdir()) == [paths.config]
    assert module.new_file_status(tmp_path / "missing") is None


@pytest.mark.parametrize("main", [report.main, evaluate.main])
def test_commands_import_nothing_that_a_refused_configuration_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], main: object
) -> None:
    run = make_full_run(tmp_path, "full", text="x")
    (tmp_path / "hostile.py").write_text("open('marker', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = run.paths.config.read_text()
    run.paths.config.write_text(re.sub(r"class_path: \S+", "class_path: hostile.Task", text))
    run.paths.config.chmod(0o666)
    assert main(["--run", str(run.paths.root)]) == 2
    assert "can be written by other users" in capsys.readouterr().err
    assert not (tmp_path / "marker").exists()
    assert "hostile" not in sys.modules


def test_each_reader_of_a_file_that_names_classes_looks_at_its_owner() -> None:
    pattern = re.compile(
        r"(?:\bconfig|paths\.task)\.(?:read_text|read_bytes|open)\(|read_json\(\S*paths\.(?:task|config)\)"
    )
    readers = {file.name for file in (ROOT / "ray_app").rglob("*.py") if pattern.search(file.read_text())}
    # It reads the values of secrets and makes no class.
    assert readers == {"redaction.py"}


def test_objects_in_buckets_have_no_owner() -> None:
    class Bucket:
        def read_text(self) -> str:
            return "x"

    assert read_code_text(Bucket()) == "x"
