"""Tar files: members and keys of the .json become columns; damaged and hostile archives are refused with a reason."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ray_app.ingest.readers import webdataset
from ray_app.ingest.readers.sources import expand_braces
from tests.support.encoded_images import encode
from tests.support.ingest_inputs import ingest_and_read, ingest_error, write_tar

Members = dict[str, bytes]
DEEP = b"[" * 100_000
SKIP = {"on_bad_row": "skip"}


def png(value: int) -> bytes:
    return encode(Image.new("RGB", (5, 4), (value, 0, 0)), "png")


def npy(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def sample(i: int) -> Members:
    return {
        f"a/{i:04d}.png": png(i),
        f"a/{i:04d}.cls": str(i % 2).encode(),
        f"a/{i:04d}.txt": f"row {i}".encode(),
        f"a/{i:04d}.json": json.dumps({"kind": i}).encode(),
        f"a/{i:04d}.features.npy": npy(np.full((2, 3), i, np.float32)),
    }


def texts(*contents: Any) -> Members:
    """Returns a row of a .txt and a .json for each content; bytes are written as they are."""
    members: Members = {}
    for number, content in enumerate(contents):
        encoded = content if isinstance(content, bytes) else json.dumps(content).encode()
        members |= {f"{number}.txt": b"text %d" % number, f"{number}.json": encoded}
    return members


def with_others(rows: int = 4) -> Members:
    """Returns rows of which some members become no column."""
    members: Members = {}
    for i in range(rows):
        members |= {f"{i}.png": png(i), f"{i}.cls": b"%d" % (i % 2), f"{i}.wnid": b"n01", f"{i}.json": b'{"k": 5}'}
    return members


def tar_bytes(members: Members, mode: str = "w") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def header(kind: bytes, size: int = 0, link: str = "") -> bytes:
    member = tarfile.TarInfo("0.txt")
    member.type, member.size = kind, size
    member.linkname = link
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("pattern", ["", "train-{000..001}.tar{,.gz}", "train-*"])
def test_tars_are_read(tmp_path: Path, pattern: str) -> None:
    folder = tmp_path / "in"
    write_tar(folder / "train-000.tar", sample(0) | sample(1))
    write_tar(folder / "train-001.tar.gz", sample(2), "w:gz")
    for name in ("train-001.tar", "train-000.tar.gz") if "{" in pattern else ():
        write_tar(folder / name, sample(3), "w:gz" if name.endswith("gz") else "w")
    columns = ingest_and_read(tmp_path, "webdataset", f"{folder}/{pattern}", split_bytes=1)
    order = [0, 1, 3, 3, 2] if "{" in pattern else [0, 1, 2]
    kinds = [json.loads(value)["kind"] for value in columns["json"]]
    rows = Counter(zip(kinds, columns["image"], columns["label"], columns["text"], strict=True))
    assert rows == Counter((i, png(i), i % 2, f"row {i}") for i in order)
    np.testing.assert_array_equal(columns["features"][:, 1, 1], kinds)
    assert {"train-000.tar:a/0000", "train-000.tar:a/0001"} < set(columns["row_id"])


READ: dict[str, tuple[Members, dict[str, Any], dict[str, Any]]] = {
    "image and label": (with_others(), {"columns": ["image", "label"]}, {"image": 4, "label": [0, 1, 0, 1]}),
    "image": (with_others(), {"columns": ["image"]}, {"image": 4, "label": [0, 1, 0, 1]}),
    "json": (with_others(), {"columns": ["json"]}, {"json": 4, "label": [0, 1, 0, 1]}),
    "a label of the json": (with_others(), {"columns": ["image"], "label": "k"}, {"image": 4, "label": [5] * 4}),
    "a label of both": (with_others(), {"columns": ["image", "label"], "label": "k"}, {"image": 4, "label": [5] * 4}),
    "json and its label": (
        with_others(),
        {"columns": ["image", "json"], "label": "k"},
        {"image": 4, "json": 4, "label": [5] * 4},
    ),
    "json and a key": (texts({"a": 1}), {"columns": ["json", "json.a"]}, {"json": ['{"a": 1}'], "a": [1]}),
    "a label and a column": (
        texts({"kind": 4}, {"kind": 2}),
        {"label": "kind", "columns": ["json.kind"]},
        {"label": [4, 2], "kind": [4, 2]},
    ),
    "no label in the first row": (
        texts({"kind": None}, {"kind": "wren"}),
        {"label": "kind", "columns": ["text"], **SKIP},
        {"text": ["text 1"], "label": [0]},
    ),
    "members of some rows": (
        {"0.txt": b"a", "0.cls": b"0", "0.xml": b"x", "1.txt": b"b", "1.cls": b"1", "2.txt": b"c", "2.xml": b"y"},
        {"columns": ["text"], **SKIP},
        {"text": ["a", "b"], "label": [0, 1]},
    ),
}


@pytest.mark.parametrize("case", READ)
def test_columns_are_members_and_keys(tmp_path: Path, case: str) -> None:
    members, options, columns = READ[case]
    write_tar(tmp_path / "in.tar", members)
    rows = ingest_and_read(tmp_path, "webdataset", tmp_path / "in.tar", **options)
    assert rows.keys() == {"row_id", *columns}
    assert {name: len(rows[name]) if isinstance(columns[name], int) else rows[name] for name in columns} == columns


def test_values_of_the_json_have_one_type_over_all_files(tmp_path: Path) -> None:
    """Integers and fractions of several files are one column of fractions, and a value may be missing."""
    rows = [
        {"caption": "ein Möwe", "width": 3, "x": 1, "is_new": True, "tags": ["a"], "box": [1, 2]},
        {"caption": None, "x": 2, "width": 4, "box": [3, 4]},
    ]
    write_tar(tmp_path / "in" / "0.tar", texts(*rows))
    write_tar(tmp_path / "in" / "1.tar", texts({"caption": "b", "width": 5, "x": 0.5, "is_new": False, "box": [5, 6]}))
    columns = ["text", "json.caption", "json.width", "json.x", "json.is_new", "json.box"]
    stored = ingest_and_read(tmp_path, "webdataset", tmp_path / "in", columns=columns, split_bytes=1)
    assert stored.pop("box").tolist() == [[1, 2], [3, 4], [5, 6]]
    assert stored == {
        "row_id": ["0.tar:0", "0.tar:1", "1.tar:0"],
        "text": ["text 0", "text 1", "text 0"],
        "caption": ["ein Möwe", None, "b"],
        "width": [3, 4, 5],
        "x": [1.0, 2.0, 0.5],
        "is_new": [True, None, False],
    }


A = {"columns": ["json.a"]}
Y = {"label": "y"}
REFUSED: dict[str, tuple[Members, dict[str, Any], str]] = {
    "a folder above": ({"../../etc/0.png": png(0)}, {}, "the member '../../etc/0.png' is refused"),
    "an absolute path": ({"/etc/0.png": png(0)}, {}, "the member '/etc/0.png' is refused"),
    "a label of text": ({"0.png": png(0), "0.cls": b"one"}, {}, "row x.tar:0: .cls holds 'one'; expected an integer"),
    "half an image": ({"0.png": png(0)[:-20], "0.cls": b"1"}, {}, "row x.tar:0: not an image that can be decoded"),
    "no label": ({"0.png": png(0), "0.cls": b"1", "1.png": png(1)}, {}, "row x.tar:1: the members are ['png'], but"),
    "another shape": (
        {"0.npy": npy(np.ones(2)), "1.npy": npy(np.ones(3))},
        {},
        "row x.tar:1: .npy is float64 (3,), in",
    ),
    "no number": ({"0.npy": npy(np.ones((2, 0)))}, {}, ".npy does not hold an array"),
    "objects": ({"0.npy": npy(np.array([{}], object))}, {}, "Object arrays cannot be loaded when allow_pickle=False"),
    "an empty array": ({"0.npy": npy(np.ones(1)), "1.npy": b""}, {}, "row x.tar:1: .npy cannot be read: No data left"),
    "no column": ({"0.mp4": b"x"}, {}, "the members ['.mp4'], which cannot become columns; allowed are"),
    "one column of two": ({"0.png": png(0), "0.jpg": png(0)}, {}, "two of which would become"),
    "no such key": ({"0.png": png(0), "0.json": b"{}"}, {"label": "kind"}, "no key 'kind'"),
    "no json for a label": ({"0.png": png(0), "0.cls": b"1"}, {"label": "kind"}, "--label 'kind' is for rows with a"),
    "no extension": ({"plain": b"x"}, {}, "no member in these tar files"),
    "members of no use": (with_others(), {}, "members ['.wnid'], which cannot become columns; allowed are"),
    "how to leave them out": (with_others(), {}, "--columns '[image, json, label]'"),
    "a column that is not there": (
        with_others(),
        {"columns": ["text"]},
        "no member for the column 'text'; its columns",
    ),
    "a column that is none": (with_others(), {"columns": ["wnid"]}, "its columns are ['image', 'json', 'label']"),
    "other members": ({"0.txt": b"a", "0.cls": b"0", "1.txt": b"b"}, {"columns": ["text"]}, "row x.tar:1: the members"),
    "text beside a number": (texts({"a": 1}, {"a": "x"}), A, "a number 1 times, first 1 in x.tar:0; text 1 times"),
    "a truth value": (texts({"a": 1}, {"a": True}), A, "the values of 'a' have several types"),
    "an object": (texts({"a": {"b": 1}}), A, "key 'a' holds objects"),
    "another key": (texts({"a": 1}), {"columns": ["json.b"]}, "no key 'b'"),
    "a rounded integer": (texts({"a": 2**53 + 1}, {"a": 0.5}), A, "holds 9007199254740993, which float64 would round"),
    "an enormous integer": (texts({"a": 0.5}, b'{"a": 1' + b"0" * 400 + b"}"), A, "which float64 would round"),
    "NaN": (texts({"a": 1}, b'{"a": NaN}'), A, "row x.tar:1: not JSON: 'a' holds NaN"),
    "half a character": (texts({"a": "b"}, b'{"a": "\\ud83d"}'), A, "row x.tar:1: JSON parse error"),
    "half a character as label": (texts({"y": "a"}, b'{"y": "\\ud83d"}'), Y, "row x.tar:1: JSON parse error"),
    "a list as label": (texts({"y": "a"}, {"y": ["a"]}), Y, "the values of 'y' have several types"),
    "a number as label": (texts({"y": "a"}, {"y": 1}), Y, "the values of 'y' have several types"),
    "a list": (texts({"a": 1}, b"[1]"), A, ".json is not an object"),
    "half an object": (texts({"a": 1}, b"{"), A, "row x.tar:1"),
    "a key and a member": (texts({"text": 1}), {"columns": ["text", "json.text"]}, "become the same column 'text'"),
    "a key and the label": (
        texts({"label": 1, "y": 1}),
        {"columns": ["json.label"], **Y},
        "become the same column 'label'",
    ),
    "a key json": (texts({"json": 1}), {"columns": ["json.json"]}, "become the same column 'json'"),
    "a key without a json": ({"0.txt": b"x"}, {"columns": ["text", "json.a"]}, "no .json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_members_that_are_no_columns_are_refused(tmp_path: Path, case: str) -> None:
    members, options, message = REFUSED[case]
    write_tar(tmp_path / "in" / "x.tar", members)
    assert message in ingest_error(tmp_path, "webdataset", tmp_path / "in", **options)


TWO, SIX = tar_bytes(sample(0) | sample(1)), tar_bytes({f"{i}.npy": npy(np.zeros(1000)) for i in range(6)})
THIRD = SIX.index(b"3.npy")
FLIPPED = SIX[:THIRD] + bytes([SIX[THIRD] ^ 1]) + SIX[THIRD + 1 :]
MANY = tar_bytes({f"{i}.txt": b"row" for i in range(60)})
GAP = MANY[:10240] + bytes(512) + MANY[10240:]
# Level 0 stores the bytes uncompressed, so that a flipped bit damages the content alone.
STORED = gzip.compress(tar_bytes({"0.txt": b"first", "1.txt": b"second"}), 0).replace(b"second", b"sec0nd")
DAMAGE, MORE = "The file is damaged or not a tar file", "there is data after the end of the archive"
LARGE = (1 << 20) + 1
DAMAGED: list[tuple[str, bytes, str]] = [
    *(("x.tar", TWO[:size], DAMAGE) for size in (512, 2048, 2600, 0)),
    # The members end in zeros, as the archive does; the next member is missing, or its header is damaged.
    *(("x.tar", data, DAMAGE) for data in (SIX[:THIRD], FLIPPED)),
    *(("x.tar.gz", gzip.compress(data), DAMAGE) for data in (SIX[:THIRD], FLIPPED)),
    *((name, STORED, "CRC check failed") for name in ("x.tar.gz", "x.tgz")),
    *(("x.tar", data, MORE) for data in (GAP, MANY + MANY)),
    *(("x.tar.gz", data, MORE) for data in (*map(gzip.compress, (GAP, MANY + MANY)), 2 * gzip.compress(MANY))),
    # `tarfile` would decompress them without checking a checksum.
    *(
        ("x.tar", tar_bytes({"0.txt": b"row"}, f"w:{kind}"), "only .tar.gz and .tgz are")
        for kind in ("gz", "bz2", "xz")
    ),
    # The file ends after the header: the announced data is missing.
    *(
        ("x.tar", header(kind, LARGE), "header of 1048577 bytes; allowed are 1048576")
        for kind in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
    ),
    ("x.tar", header(tarfile.GNUTYPE_LONGNAME) * 1000, "maximum recursion depth exceeded"),
    ("x.tar", header(tarfile.SYMTYPE, link="/etc/passwd"), "the member '0.txt' is refused"),
]


@pytest.mark.parametrize("case", range(len(DAMAGED)))
def test_damaged_and_hostile_archives_are_refused(tmp_path: Path, case: int) -> None:
    name, data, message = DAMAGED[case]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(data)
    assert message in ingest_error(tmp_path, "webdataset", tmp_path / "in")


HEAD = npy(np.ones(2))[:-9]


@pytest.mark.parametrize(
    ("bad", "options", "reason"),
    [
        ({"b.npy": npy(np.ones(2)), "b.cls": b"9" * 20}, {}, "label 99999999999999999999; expected an integer of"),
        ({"b.npy": npy(np.ones(2)), "b.json": b'{"y": null}'}, Y, "no label, or none of the classes"),
        ({"b.npy": npy(np.ones(2)), "b.json": b'{"y": %s' % DEEP}, {}, "maximum recursion depth exceeded"),
        ({"b.npy": HEAD.replace(b"(2,)", b"(2305843009213693951,)"), "b.cls": b"1"}, {}, ".npy cannot be read"),
        ({"b.npy": HEAD.replace(b"(2,)", b"(%s)" % DEEP), "b.cls": b"1"}, {}, ".npy cannot be read"),
    ],
    ids=["label", "null", "deep json", "large npy", "deep npy"],
)
def test_rows_that_cannot_be_used_are_skipped(
    tmp_path: Path, bad: Members, options: dict[str, Any], reason: str
) -> None:
    other = {"json": b'{"y": 1}'} if "b.json" in bad else {"cls": b"1"}
    good = [
        {f"{name}.npy": npy(np.ones(2))} | {f"{name}.{kind}": data for kind, data in other.items()} for name in "ac"
    ]
    write_tar(tmp_path / "in" / "x.tar", good[0] | bad | good[1])
    columns = ingest_and_read(tmp_path, "webdataset", tmp_path / "in", **SKIP, **options)
    assert columns["row_id"] == ["x.tar:a", "x.tar:c"]
    [refused] = (tmp_path / "out" / "_refused.jsonl").read_text().splitlines()
    assert json.loads(refused)["row_id"] == "x.tar:b"
    assert reason in json.loads(refused)["reason"]


@pytest.mark.parametrize(
    ("name", "options", "row_id"),
    [
        ("\xff", {"encoding": "latin-1", "format": tarfile.GNU_FORMAT}, "\\xff"),
        ("/".join(["x" * 200] * 20), {"format": tarfile.PAX_FORMAT}, "/".join(["x" * 200] * 20)),
        ("/".join(["x" * 200] * 20), {"format": tarfile.GNU_FORMAT}, "/".join(["x" * 200] * 20)),
    ],
    ids=["not UTF-8", "long in pax", "long of GNU"],
)
def test_names_of_members_are_ids_of_rows(tmp_path: Path, name: str, options: dict[str, Any], row_id: str) -> None:
    with tarfile.open(tmp_path / "x.tar", "w", **options) as archive:
        archive.addfile(tarfile.TarInfo(f"{name}.txt"))
    assert ingest_and_read(tmp_path, "webdataset", tmp_path / "x.tar")["row_id"] == [f"x.tar:{row_id}"]


@pytest.mark.parametrize("zeros", [0, 512, 3 << 20])
def test_a_tar_may_end_in_any_number_of_zeros(tmp_path: Path, zeros: int) -> None:
    (tmp_path / "x.tar").write_bytes(tar_bytes({"0.txt": b"row"}) + bytes(zeros))
    assert ingest_and_read(tmp_path, "webdataset", tmp_path / "x.tar")["text"] == ["row"]


@pytest.mark.parametrize("size", [300, 100])
def test_an_enormous_row_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(webdataset, "MAX_ROW_BYTES", 250)
    write_tar(tmp_path / "in" / "x.tar.gz", {f"0.{i}.npy": bytes(size) for i in range(3)}, "w:gz")
    assert "the row '0' has more than the allowed 250 bytes" in ingest_error(tmp_path, "webdataset", tmp_path / "in")


def test_the_row_size_limit_ignores_members_that_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset, "MAX_ROW_BYTES", 100)
    write_tar(tmp_path / "x.tar", {"0.txt": b"a", "0.mp4": bytes(1000)})
    assert ingest_and_read(tmp_path, "webdataset", tmp_path / "x.tar", columns=["text"])["text"] == ["a"]


def test_braces_expand_as_the_shell_does() -> None:
    assert expand_braces("s3://b/x-{08..10}-{a,b}") == [f"s3://b/x-{n}-{c}" for n in ("08", "09", "10") for c in "ab"]


@pytest.mark.parametrize("source", ["webdataset", "tfrecord"])
def test_a_pattern_of_too_many_names_is_refused(tmp_path: Path, source: str) -> None:
    message = ingest_error(tmp_path, source, tmp_path / "x{0..999999999999}.tar")
    assert "{0..999999999999} stands for more than the allowed 1000000 names" in message
