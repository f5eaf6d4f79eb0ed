"""Files for which parsers raise unusual errors are refused by name (exit code 2)."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_app.errors import is_refusal
from ray_app.ingest.ingest import IngestOptions, ingest


def write_encrypted_npz(path: Path) -> None:
    """Writes an .npz with the flag of a password in both headers of each member."""
    file = io.BytesIO()
    np.savez(file, x=np.zeros((3, 2)))
    data = bytearray(file.getvalue())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + offset] |= 1
    path.write_bytes(data)


def write_sparse_tar(path: Path) -> None:
    """Writes a tar with a sparse map without numbers in its first member."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("0.txt")
        member.size, member.pax_headers = 1, {"GNU.sparse.map": "a,b", "GNU.sparse.size": "1"}
        archive.addfile(member, io.BytesIO(b"x"))


def file_writer(content: bytes) -> Any:
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize(
    ("source", "name", "write", "expected"),
    [
        ("numpy", "a.npz", write_encrypted_npz, "encrypted"),
        ("webdataset", "a.tar", write_sparse_tar, "invalid literal"),
        ("jsonl", "a.jsonl", file_writer(b'{"a": 1}\n{"a": "\xff\xfe"}\n'), ""),
        ("jsonl", "a.jsonl", file_writer(b'{"a": 1}\n{"a": "\\ud800"}\n'), ""),
        ("jsonl", "a.jsonl", file_writer(b'{"a": 1, "a": 2}\n'), ""),
        ("jsonl", "a.jsonl", file_writer(b'{"a": 1}\n{"a": 1e999}\n'), "too big"),
        ("jsonl", "a.jsonl", file_writer(b'{"a": [1, {"b": 2}]}\n'), ""),
        ("jsonl", "a.jsonl", file_writer(b'{"a": 1}\n{"a": 1} {"a": 2}\n'), ""),
        ("jsonl", "a.jsonl", file_writer(b'\x00\x00{"a": 1}\n'), ""),
        ("jsonl", "a.jsonl", file_writer(b'{"\xff": 1}\n'), ""),
        ("jsonl", "a.jsonl", file_writer(b'oops\n{"a": 1}\n{"a": "x"}\n'), "values of one type"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, source: Any, name: str, write: Any, expected: str) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / name)
    skip: Any = "skip" if "one type" in expected else "fail"
    options = IngestOptions(
        source, str(tmp_path / "out"), str(tmp_path / "in" / (name if source == "numpy" else "")), on_bad_row=skip
    )
    with pytest.raises(Exception, match=name.partition(".")[0] + r"\.") as caught:
        ingest(options)
    assert is_refusal(caught.value)
    assert expected in str(caught.value)
