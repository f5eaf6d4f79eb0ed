"""Storage on file systems that lack operations: without hard links a file is renamed, without both it is refused."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.preflight.prepare import check_storage
from ray_app.storage.files import put_atomic


def refuse_link(source: Any, target: Any, **_: Any) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), str(source), None, str(target))


def test_a_file_is_written_once_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse_link)
    file = tmp_path / "größe 1.json"
    assert [put_atomic(file, content, if_absent=True) for content in (b"first", b"second")] == [True, False]
    assert file.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [file], "a temporary file is left"
    check_storage(Config().replace(run__storage_path=str(tmp_path / "runs")))
    assert list(tmp_path.iterdir()) == [file]


class OldLibrary:
    """The C library on a file system with a rename that has no flags (NFS)."""

    def renameat2(self, *_: Any) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1


def test_storage_without_links_and_such_a_rename_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse_link)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: OldLibrary())
    with pytest.raises(ConfigError, match="neither hard links nor a rename that replaces no file"):
        check_storage(Config().replace(run__storage_path=str(tmp_path / "runs")))
    assert not list(tmp_path.iterdir())


def test_a_run_with_the_name_of_another_one_in_other_case_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without case opens `A` as `a` and lists `A`; macOS lists letters in parts."""
    config = Config().replace(run__storage_path=str(tmp_path), run__name="größe 1")
    (tmp_path / "größe 1").mkdir()
    monkeypatch.setattr(os, "listdir", lambda _: ["gro\u0308ße 1"])
    check_storage(config)
    monkeypatch.setattr(os, "listdir", lambda _: ["Größe 1"])
    with pytest.raises(ConfigError, match="has a run 'Größe 1'"):
        check_storage(config)


@pytest.mark.parametrize(
    ("name", "number", "refusal"),
    [
        ("fsync", errno.EINVAL, None),
        ("fsync", errno.EIO, "writing a file is refused"),
        ("replace", errno.EEXIST, "over"),
    ],
)
def test_an_operation_that_a_file_system_lacks_is_left_out_or_named(
    name: str, number: int, refusal: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, refuse)
    config = Config().replace(run__storage_path=str(tmp_path / "runs"))
    context: Any = pytest.raises(ConfigError, match=refusal) if refusal else nullcontext()
    with context:
        check_storage(config)
