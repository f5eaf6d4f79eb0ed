"""The token of Ray's clusters: only its owner may read it, and a launch needs one."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_app.cli import launch
from ray_app.cluster import ray_private
from ray_app.cluster.ray_private import (
    private_files,
    read_token,
    require_shared_token,
    require_token,
    restore_auth_mode,
)
from ray_app.errors import ConfigError
from ray_app.runlog.redaction import redact
from tests.support.paths import ROOT

TOKEN = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def home(tmp_path: Path) -> Iterator[Path]:
    """A home folder without a token, and no umask.

    Ray itself does not read the variables again: this process may be connected to a cluster with another token.
    """
    umask = os.umask(0)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("READ_AUTH_MODE", "TOKEN_LOADER"):
            patch.setattr(ray_private, name, SimpleNamespace(find=lambda: None))
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            patch.delenv(name, raising=False)
        patch.setenv("HOME", str(tmp_path))
        with restore_auth_mode():
            yield tmp_path
    os.umask(umask)


@pytest.mark.parametrize(("length", "variables"), [(36, {"RAY_TMPDIR": "/" + 35 * "x"}), (37, {})])
def test_files_of_ray_are_in_the_private_folder_if_its_sockets_fit(
    monkeypatch: pytest.MonkeyPatch, length: int, variables: dict[str, str]
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(ray_private, "temporary_folder", lambda: Path("/" + (length - 1) * "x"))
    assert private_files() == variables


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_new_token_is_never_readable_by_others(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    linked, link = list[int](), os.link

    def look_and_link(source: Path, target: Path) -> None:
        linked.append(mode_of(source))
        link(source, target)

    monkeypatch.setattr(os, "link", look_and_link)
    require_token()
    file = home / ".ray" / "auth_token"
    assert (linked, mode_of(file), mode_of(file.parent)) == ([0o600], 0o600, 0o700)
    token = file.read_text()
    assert len(token) == 64
    assert token not in redact(f"error: {token}")
    require_token()
    assert file.read_text() == token


def test_an_open_file_in_the_home_is_closed_and_another_one_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in (".ray", "mounted"):
        (home / folder).mkdir()
        (home / folder / "auth_token").write_text(f"{TOKEN}\n")
    assert read_token() == TOKEN
    assert mode_of(home / ".ray" / "auth_token") == 0o600
    assert caplog.messages == []
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "mounted" / "auth_token"))
    assert read_token() == TOKEN
    assert [message for message in caplog.messages if "(mode 666)" in message and TOKEN not in message]
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "nowhere"))
    with pytest.raises(ConfigError, match=r"RAY_AUTH_TOKEN_PATH is .*nowhere.* cannot be read"):
        read_token()


def test_a_launch_without_a_token_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    spec = {"cluster": {"worker": ["a:1234", "b:1234"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(spec))
    monkeypatch.setattr(subprocess, "Popen", None)
    assert launch.main(["--config", str(ROOT / "conf" / "digits.yaml")]) == 2
    text = capsys.readouterr().err + caplog.text
    for part in ("2 machines needs the same token", "ray get-auth-token --generate", "RAY_AUTH_TOKEN_PATH"):
        assert part in text


def test_a_launch_starts_ray_with_tokens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    environments = list[dict[str, str]]()

    def record(command: list[str], **options: Any) -> None:
        environments.append(options["env"])
        raise InterruptedError

    monkeypatch.setattr(subprocess, "Popen", record)
    assert require_shared_token(2) == TOKEN
    with pytest.raises(InterruptedError), launch.ray_node(["--head"]):
        pass
    assert [environment["RAY_AUTH_MODE"] for environment in environments] == ["token"]


def test_a_launch_without_tokens_goes_on_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with caplog.at_level(logging.WARNING):
        assert require_shared_token(2) == ""
    assert "every process that reaches a port of this cluster can run code" in caplog.text
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
