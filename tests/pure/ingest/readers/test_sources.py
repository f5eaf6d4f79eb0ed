"""Readers of other formats store the values of the source, and refuse damaged or hostile input with a reason."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import struct
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ray_app.errors import ConfigError, DataError
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.ingest.readers import base
from ray_app.ingest.readers import json_lines as raw_jsonl
from ray_app.ingest.readers import webdataset as raw_tar
from ray_app.ingest.readers.base import expand_braces
from ray_app.ingest.shards import Shards
from tests.support.ingest_inputs import (
    RNG,
    ingest_and_read,
    ingest_error,
    read_columns,
    write_tar,
)
from tests.support.paths import ROOT, SUPPORT

HF = SUPPORT / "hf"


DEEP = b"[" * 100_000
LINES = [
    {"x": 1, "kind": "wasp", "when": "2020-01-01", "vector": [1, 2.5], "on": True, "grid": [[1, 2], [3, 4]]},
    {"x": 2.5, "kind": "ant", "when": "never", "vector": [3, 4], "grid": [[5, 6], [7, 8]]},
    {"kind": "bee", "on": False, "when": None, "vector": [0.5, 0], "grid": [[0, 0], [0, 0]], "x": None},
]


def test_each_json_key_has_one_type_over_all_files(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, LINES[:1])) + "\n\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, LINES[1:])).encode()))
    columns = ingest_and_read(tmp_path, "jsonl", folder, label="kind", split_bytes=1)
    assert columns["row_id"] == ["a.jsonl:1", "b.jsonl.gz:1", "b.jsonl.gz:2"]
    assert columns["x"] == [1.0, 2.5, None]
    assert (columns["label"], columns["when"], columns["on"]) == (
        [2, 0, 1],
        ["2020-01-01", "never", None],
        [True, None, False],
    )
    np.testing.assert_array_equal(columns["vector"], [[1, 2.5], [3, 4], [0.5, 0]])
    np.testing.assert_array_equal(columns["grid"], [line["grid"] for line in LINES])
    about = json.loads((tmp_path / "out" / "_dataset.json").read_text())
    assert (about["classes"], about["class_counts"]) == (["ant", "bee", "wasp"], {"ant": 1, "bee": 1, "wasp": 1})


@pytest.mark.parametrize(
    ("lines", "options", "expected"),
    [
        (['{"a": 1}', '{"a": '], {}, "row f.jsonl:2: not JSON"),
        (['{"a": 1}', "[1]"], {}, "row f.jsonl:2: a JSON list where an object is expected"),
        (['{"a": 1}', '{"a": "x"}'], {}, "values of one type"),
        (['{"a": {"b": 1}}'], {}, "'a' holds objects"),
        (['{"a": null}'], {}, "'a' has no value at all"),
        (['{"a": ["x"]}'], {}, "'a' holds lists that are not of numbers"),
        (['{"a": []}'], {}, "'a' holds lists that are not of numbers, or all empty"),
        (['{"a": [[], [1]]}', '{"a": [[], []]}'], {}, "'a' has no value at all"),
        ([], {}, "no rows"),
    ],
)
def test_bad_json_lines_are_refused(tmp_path: Path, lines: list[str], options: dict[str, Any], expected: str) -> None:
    (tmp_path / "f.jsonl").write_text("\n".join(lines))
    assert expected in ingest_error(tmp_path, "jsonl", tmp_path / "f.jsonl", **options)


@pytest.mark.parametrize("empty", ["[]", "[[], []]", "[[1, 2], []]"])
@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
def test_an_empty_list_in_the_first_json_line_is_a_bad_row(tmp_path: Path, empty: str, split_bytes: int) -> None:
    (tmp_path / "in").mkdir()
    other = "[1, 2]" if empty == "[]" else "[[1, 2], [3, 4]]"
    for name, value in {"a": empty, "b": other}.items():
        (tmp_path / "in" / f"{name}.jsonl").write_text(f'{{"a": {value}}}')
    assert "row a.jsonl:1: 'a' is no list of shape [2" in ingest_error(
        tmp_path, "jsonl", tmp_path / "in", split_bytes=split_bytes
    )
    columns = ingest_and_read(tmp_path, "jsonl", tmp_path / "in", split_bytes=split_bytes, on_bad_row="skip")
    assert (columns["row_id"], columns["a"].tolist()) == (["b.jsonl:1"], [json.loads(other)])


@pytest.mark.parametrize("indent", [None, 1])
def test_a_file_of_one_json_list_is_read_as_lines_are(tmp_path: Path, indent: int | None) -> None:
    items = [{"a": n, "v": [n, 0.5], "t": "\n]"} for n in range(3)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text(json.dumps(items, indent=indent))
    rows = ingest_and_read(tmp_path, "jsonl", tmp_path / "in")
    assert (rows["row_id"], rows["a"], rows["t"]) == (["a.json:1", "a.json:2", "a.json:3"], [0, 1, 2], ["\n]"] * 3)
    (tmp_path / "in" / "b.jsonl").write_text('{"a": 7}\n')
    (tmp_path / "out").rename(tmp_path / "before")
    assert ingest_and_read(tmp_path, "jsonl", tmp_path / "in")["a"] == [7]


def test_a_column_that_parquet_rejects_is_not_a_storage_error(tmp_path: Path) -> None:
    """pyarrow raises an OSError for both, so ingest has to distinguish them."""
    shards = Shards(tmp_path / "out", "part-", tmp_path / "scratch", (9, 9, 9), None)
    shards.write(base.make_table(["a"], {"x": np.ones((1, 2, 0))}))
    with pytest.raises(DataError, match=r"the columns .* cannot be written: Invalid FIXED_LEN_BYTE_ARRAY length: 0"):
        shards.close()


def test_a_long_json_line_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is truncated within the line, so reading the whole line would fail in another way."""
    monkeypatch.setattr(raw_jsonl, "MAX_LINE_BYTES", 1 << 20)
    line = b'{"a": "' + RNG.bytes(2 << 20).hex().encode()
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress(line)[:-1_000_000])
    assert "line 1 has more than 1048576 bytes" in ingest_error(tmp_path, "jsonl", tmp_path / "f.jsonl.gz")


def test_damaged_gzip_of_json_lines_is_refused(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(b'{"a": 1}'))
    # The header has 10 bytes; the next one belongs to the first block.
    data[10] = 0xFF
    (tmp_path / "f.jsonl.gz").write_bytes(data)
    assert "invalid block type" in ingest_error(tmp_path, "jsonl", tmp_path / "f.jsonl.gz")


def test_a_json_line_that_is_nested_too_deeply_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_bytes(b'{"a": 1}\n{"a": ' + DEEP + b'\n{"a": 2}\n')
    assert ingest_and_read(tmp_path, "jsonl", tmp_path / "f.jsonl", on_bad_row="skip")["a"] == [1, 2]


@pytest.mark.parametrize(
    "days", [["2020-01-02", "2020-01-01"], ["2020-01-01T00:00:00Z", "2020-01-01"], ["2021-01-01 10:00:00.5", "other"]]
)
@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
def test_json_labels_that_look_like_dates_are_text(tmp_path: Path, days: list[str], split_bytes: int) -> None:
    (tmp_path / "in").mkdir()
    for i in range(2):
        (tmp_path / "in" / f"{i}.jsonl").write_text(
            "".join(f'{{"a": 1, "day": "{day}"}}\n' for day in (days[i], days[i]))
        )
    columns = ingest_and_read(tmp_path, "jsonl", tmp_path / "in", label="day", split_bytes=split_bytes)
    assert json.loads((tmp_path / "out" / "_dataset.json").read_text())["classes"] == sorted(days)
    assert columns["label"] == [sorted(days).index(day) for day in days for _ in range(2)]


@pytest.mark.parametrize(
    ("values", "line", "rounded"),
    [
        ((7, 12345678901234567890), 2, "12345678901234567890"),
        ((9007199254740993, 1.5), 1, "9007199254740993"),
        (([1.5, 2], [-9007199254740993, 0]), 2, "-9007199254740993"),
        ((0.5, 10**400 + 1), 2, "1" + "0" * 39),
    ],
)
@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
def test_integers_in_json_that_would_be_rounded_are_refused(
    tmp_path: Path, values: Any, line: int, rounded: str, split_bytes: int
) -> None:
    (tmp_path / "in").mkdir()
    files = [[value] for value in values] if split_bytes == 1 else [values]
    for i, lines in enumerate(files):
        (tmp_path / "in" / f"{i}.jsonl").write_text("\n".join(json.dumps({"id": value}) for value in lines))
    message = ingest_error(tmp_path, "jsonl", tmp_path / "in", split_bytes=split_bytes, on_bad_row="skip")
    where = f"row {line - 1}.jsonl:1" if split_bytes == 1 else f"row 0.jsonl:{line}"
    assert f"{where}: key 'id' holds {rounded}, which float64 would round" in message
    assert "Write them as text" in message


def test_large_json_numbers_without_rounding_are_allowed(tmp_path: Path) -> None:
    columns = {
        "id": [2**63 - 1, -(2**63)],
        "x": [1e300, 10**18],
        "v": [[2**60, 0.1], [9007199254740993.0, 3]],
        "text": ["9" * 30, "1"],
    }
    (tmp_path / "f.jsonl").write_text(
        "\n".join(json.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True))
    )
    output = ingest_and_read(tmp_path, "jsonl", tmp_path / "f.jsonl")
    assert {name: output[name] for name in ("id", "x", "text")} == {name: columns[name] for name in ("id", "x", "text")}
    np.testing.assert_array_equal(output["v"], columns["v"])


def run_in_subprocess(code: str) -> None:
    """Runs Python code in a subprocess, because a crash in C would end the test process."""
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert process.returncode == 0, f"exit code {process.returncode}: {process.stdout}{process.stderr}"


def nested_line(depth: int) -> str:
    """Returns a JSON line that is nested `depth` deep."""
    return '{"a": ' + "[" * (depth - 1) + "1" + "]" * (depth - 1) + "}"


@pytest.mark.rest
def test_json_lines_that_crash_the_parser_are_skipped(tmp_path: Path) -> None:
    """The lines are nested too deeply, in one line or over several, or are not objects; some of them crashed the parser
    in C.
    """
    cases = [
        [nested_line(3000)],
        [nested_line(500)],
        [nested_line(33)],
        ['{"a": ' + '{"b": ' * 100 + "1" + "}" * 101],
        ["null"],
        ['{"a": ' + "[" * 30, *(["[" * 30] * 100), "1", *(["]" * 30] * 101), "}"],
        ['{"a": ' + '["]",' * 30, *(['["]",' * 30] * 100), "1", *(["]" * 30] * 101), "}"],
    ]
    options = []
    for number, lines in enumerate(cases):
        source = tmp_path / f"{number}.jsonl"
        source.write_text("\n".join([*lines, '{"b": 1}']))
        options.append(
            IngestOptions("jsonl", str(tmp_path / f"out{number}"), str(source), on_bad_row="skip", max_bad_rows=1000)
        )
    run_in_subprocess(
        f"from ray_app.ingest.ingest import *\nfor each in {options!r}: print(each.input, flush=True), ingest(each)"
    )
    for number, lines in enumerate(cases):
        out = tmp_path / f"out{number}"
        assert read_columns(out) == {"row_id": [f"{number}.jsonl:{len(lines) + 1}"], "b": [1]}
        assert len((out / "_refused.jsonl").read_text().splitlines()) == len(lines)


def test_a_json_line_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text(f'{{"a": 1}}\n{nested_line(33)}\n')
    assert "row f.jsonl:2: nested more than 32 deep" in ingest_error(tmp_path, "jsonl", tmp_path / "f.jsonl")


def test_brackets_in_text_and_sibling_lists_do_not_count_as_depth(tmp_path: Path) -> None:
    lines = [{"a": '[{"\\' * 100, "grid": [[i] for i in range(100)]}, {"a": "x", "grid": [[0]] * 100}]
    (tmp_path / "f.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(map(json.dumps, lines)).encode())
    assert ingest_and_read(tmp_path / "flat", "jsonl", tmp_path / "f.jsonl")["a"] == [line["a"] for line in lines]
    (tmp_path / "g.jsonl").write_text(nested_line(32))
    assert ingest_and_read(tmp_path / "deep", "jsonl", tmp_path / "g.jsonl")["a"].shape == (1,) * 32


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (5, 4), (value, 0, 0)).save(file, "png")
    return file.getvalue()


def npy(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def sample(i: int) -> dict[str, bytes]:
    return {
        f"a/{i:04d}.png": png(i),
        f"a/{i:04d}.cls": str(i % 2).encode(),
        f"a/{i:04d}.txt": f"row {i}".encode(),
        f"a/{i:04d}.json": json.dumps({"kind": i}).encode(),
        f"a/{i:04d}.features.npy": npy(np.full((2, 3), i, np.float32)),
    }


@pytest.mark.parametrize("pattern", ["", "train-{000..001}.tar{,.gz}", "train-*"])
def test_webdataset_tars_are_read(tmp_path: Path, pattern: str) -> None:
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


@pytest.mark.parametrize(
    ("bad", "options", "reason"),
    [
        ({"b.npy": npy(np.ones(2)), "b.cls": b"9" * 20}, {}, "label 99999999999999999999; expected an integer of"),
        ({"b.npy": npy(np.ones(2)), "b.json": b'{"y": null}'}, {"label": "y"}, "no label, or none of the classes"),
        ({"b.npy": npy(np.ones(2)), "b.json": b'{"y": %s' % DEEP}, {}, "maximum recursion depth exceeded"),
        (
            {"b.npy": npy(np.ones(2))[:-9].replace(b"(2,)", b"(2305843009213693951,)"), "b.cls": b"1"},
            {},
            ".npy cannot be read",
        ),
        ({"b.npy": npy(np.ones(2))[:-9].replace(b"(2,)", b"(%s)" % DEEP), "b.cls": b"1"}, {}, ".npy cannot be read"),
    ],
)
def test_webdataset_rows_that_cannot_be_used_are_skipped(
    tmp_path: Path, bad: dict[str, bytes], options: dict[str, Any], reason: str
) -> None:
    other = {"json": b'{"y": 1}'} if "b.json" in bad else {"cls": b"1"}
    good = [
        {f"{name}.npy": npy(np.ones(2))} | {f"{name}.{kind}": data for kind, data in other.items()} for name in "ac"
    ]
    write_tar(tmp_path / "in" / "x.tar", good[0] | bad | good[1])
    columns = ingest_and_read(tmp_path, "webdataset", tmp_path / "in", on_bad_row="skip", **options)
    assert columns["row_id"] == ["x.tar:a", "x.tar:c"]
    [refused] = (tmp_path / "out" / "_refused.jsonl").read_text().splitlines()
    assert json.loads(refused)["row_id"] == "x.tar:b"
    assert reason in json.loads(refused)["reason"]


def test_member_names_need_not_be_utf8(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "x.tar", "w", encoding="latin-1", format=tarfile.GNU_FORMAT) as archive:
        member = tarfile.TarInfo("\xff.txt")
        archive.addfile(member)
    assert ingest_and_read(tmp_path, "webdataset", tmp_path / "in")["row_id"] == ["x.tar:\\xff"]


def test_braces_expand_as_the_shell_does() -> None:
    assert expand_braces("s3://b/x-{08..10}-{a,b}") == [f"s3://b/x-{n}-{c}" for n in ("08", "09", "10") for c in "ab"]


@pytest.mark.parametrize(
    ("members", "options", "expected"),
    [
        ({"../../etc/0.png": png(0)}, {}, "the member '../../etc/0.png' is refused"),
        ({"/etc/0.png": png(0)}, {}, "the member '/etc/0.png' is refused"),
        ({"0.png": png(0), "0.cls": b"one"}, {}, "row x.tar:0: .cls holds 'one'; expected an integer"),
        ({"0.png": png(0)[:-20], "0.cls": b"1"}, {}, "row x.tar:0: not an image that can be decoded"),
        ({"0.png": png(0), "0.cls": b"1", "1.png": png(1)}, {}, "row x.tar:1: the members are ['png'], of the"),
        ({"0.npy": npy(np.ones(2)), "1.npy": npy(np.ones(3))}, {}, "row x.tar:1: .npy is float64 (3,), in the"),
        ({"0.npy": npy(np.ones((2, 0)))}, {}, ".npy holds no array of numbers"),
        ({"0.npy": npy(np.array([{}], dtype=object))}, {}, "Object arrays cannot be loaded when allow_pickle=False"),
        ({"0.npy": npy(np.ones(1)), "1.npy": b""}, {}, "row x.tar:1: .npy cannot be read: No data left in file"),
        ({"0.mp4": b"x"}, {}, "the members ['.mp4'], of which no column is made; allowed are"),
        ({"0.png": png(0), "0.jpg": png(0)}, {}, "two would be the same column"),
        ({"0.png": png(0), "0.json": b"{}"}, {"label": "kind"}, "no key 'kind'"),
        ({"0.png": png(0), "0.cls": b"1"}, {"label": "kind"}, "--label 'kind' is for rows with a .json"),
        ({"plain": b"x"}, {}, "no member in these tar files"),
    ],
)
def test_bad_tars_are_refused(
    tmp_path: Path, members: dict[str, bytes], options: dict[str, Any], expected: str
) -> None:
    write_tar(tmp_path / "in" / "x.tar", members)
    assert expected in ingest_error(tmp_path, "webdataset", tmp_path / "in", **options)


@pytest.mark.parametrize("size", [512, 2048, 2600, 0])
def test_a_tar_that_was_cut_off_is_refused(tmp_path: Path, size: int) -> None:
    write_tar(tmp_path / "in" / "x.tar", sample(0) | sample(1))
    data = (tmp_path / "in" / "x.tar").read_bytes()
    (tmp_path / "in" / "x.tar").write_bytes(data[:size])
    assert "The file is damaged or no tar file" in ingest_error(tmp_path, "webdataset", tmp_path / "in")


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz"])
@pytest.mark.parametrize("fault", ["cut off", "flipped bit"])
def test_a_tar_that_is_damaged_between_members_is_refused(tmp_path: Path, name: str, fault: str) -> None:
    """The members end in zeros, as the archive does; the next member is missing, or its header is damaged."""
    write_tar(tmp_path / "in" / "x.tar", {f"{i}.npy": npy(np.zeros(1000)) for i in range(6)})
    data = bytearray((tmp_path / "in" / "x.tar").read_bytes())
    third = data.index(b"3.npy")
    if fault == "cut off":
        del data[third:]
    else:
        data[third] ^= 1
    (tmp_path / "in" / "x.tar").unlink()
    (tmp_path / "in" / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert "The file is damaged or no tar file" in ingest_error(tmp_path, "webdataset", tmp_path / "in")


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz"])
def test_a_gzipped_tar_is_checked_against_its_checksum(tmp_path: Path, name: str) -> None:
    write_tar(tmp_path / "x.tar", {"0.txt": b"first", "1.txt": b"second"})
    # Level 0 stores the bytes uncompressed, so that a flipped bit damages the content alone.
    data = bytearray(gzip.compress((tmp_path / "x.tar").read_bytes(), 0))
    data[data.index(b"second")] ^= 1
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(data)
    assert "CRC check failed" in ingest_error(tmp_path, "webdataset", tmp_path / "in")


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz"])
@pytest.mark.parametrize("fault", ["zeros between members", "two archives", "two archives packed apart"])
def test_a_tar_with_rows_after_its_end_marker_is_refused(tmp_path: Path, name: str, fault: str) -> None:
    write_tar(tmp_path / "one.tar", {f"{i}.txt": b"row" for i in range(60)})
    one = (tmp_path / "one.tar").read_bytes()
    whole = one[:10240] + bytes(512) + one[10240:] if fault == "zeros between members" else one + one
    if name.endswith("gz"):
        whole = gzip.compress(one) + gzip.compress(one) if "apart" in fault else gzip.compress(whole)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(whole)
    assert "there is more behind the end of the archive" in ingest_error(tmp_path, "webdataset", tmp_path / "in")


@pytest.mark.parametrize("zeros", [0, 512, 3 << 20])
def test_a_tar_may_end_in_any_number_of_zeros(tmp_path: Path, zeros: int) -> None:
    write_tar(tmp_path / "in" / "x.tar", {"0.txt": b"row"})
    with (tmp_path / "in" / "x.tar").open("ab") as file:
        file.write(bytes(zeros))
    assert ingest_and_read(tmp_path, "webdataset", tmp_path / "in")["text"] == ["row"]


@pytest.mark.parametrize("packing", ["gz", "bz2", "xz"])
def test_a_compressed_tar_with_the_suffix_of_a_plain_one_is_refused(tmp_path: Path, packing: str) -> None:
    """`tarfile` would decompress it without checking a checksum."""
    write_tar(tmp_path / "in" / "x.tar", {"0.txt": b"row"}, f"w:{packing}")
    assert "only .tar.gz and .tgz are unpacked" in ingest_error(tmp_path, "webdataset", tmp_path / "in")


@pytest.mark.parametrize("size", [300, 100])
def test_an_enormous_row_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(raw_tar, "MAX_ROW_BYTES", 250)
    write_tar(tmp_path / "in" / "x.tar.gz", {f"0.{i}.npy": bytes(size) for i in range(3)}, "w:gz")
    assert "the row '0' has more than 250 bytes" in ingest_error(tmp_path, "webdataset", tmp_path / "in")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
def test_an_enormous_header_in_a_tar_is_refused_before_it_is_read(tmp_path: Path, kind: bytes) -> None:
    """The file ends after the header: the announced data is missing."""
    header = tarfile.TarInfo("0.txt")
    header.type, header.size = kind, (1 << 20) + 1
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT))
    assert "header of 1048577 bytes; allowed are 1048576" in ingest_error(tmp_path, "webdataset", tmp_path / "in")


def test_a_long_chain_of_tar_headers_is_refused(tmp_path: Path) -> None:
    header = tarfile.TarInfo("0.txt")
    header.type = tarfile.GNUTYPE_LONGNAME
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) * 1000)
    assert "maximum recursion depth exceeded" in ingest_error(tmp_path, "webdataset", tmp_path / "in")


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_in_a_tar_are_read(tmp_path: Path, form: int) -> None:
    name = "/".join(["x" * 200] * 20)
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "x.tar", "w", format=form) as archive:
        archive.addfile(tarfile.TarInfo(f"{name}.txt"))
    assert ingest_and_read(tmp_path, "webdataset", tmp_path / "in")["row_id"] == [f"x.tar:{name}"]


def test_a_link_in_a_tar_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "x.tar", "w") as archive:
        link = tarfile.TarInfo("0.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    assert "the member '0.txt' is refused" in ingest_error(tmp_path, "webdataset", tmp_path / "in")


@pytest.mark.parametrize("kind", ["saved", "saved/train", "loaded", "parquet", "parquet/train-00000-of-00001.parquet"])
def test_hugging_face_data_is_read_without_its_library(tmp_path: Path, kind: str) -> None:
    """The real library wrote the files in `hf/`, see `hf/make.py`."""
    ingest(IngestOptions("hf", str(tmp_path / "out"), str(HF / kind), split_bytes=1))
    sides = {"": 7} if "train" in kind else {"train": 7, "test": 3}
    for side, rows in sides.items():
        columns = read_columns(tmp_path / "out" / side)
        assert list(columns) == ["row_id", "image", "label", "text", "vector", "grid"]
        assert [np.asarray(Image.open(io.BytesIO(image)))[0, 0, 0] for image in columns["image"]] == [
            10 * i for i in range(rows)
        ]
        assert (columns["label"], columns["text"]) == ([i % 3 for i in range(rows)], [f"row {i}" for i in range(rows)])
        np.testing.assert_array_equal(columns["vector"], [[i, 1, 2] for i in range(rows)])
        np.testing.assert_array_equal(columns["grid"], np.array([[[i, 1], [2, 3]] for i in range(rows)], np.float32))
        assert json.loads((tmp_path / "out" / side / "_dataset.json").read_text())["classes"] == ["ant", "bee", "cat"]


def write_saved_dataset(folder: Path, table: pa.Table, features: dict[str, Any]) -> Path:
    """Writes a data set in the layout of `save_to_disk` and returns its folder."""
    folder.mkdir()
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None})
    )
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


CLASSES = {"y": {"names": ["u", "v"], "_type": "ClassLabel"}}


def test_hugging_face_rows_without_a_label_can_be_skipped(tmp_path: Path) -> None:
    folder = write_saved_dataset(
        tmp_path / "in", pa.table({"a": [1, 2, 3], "y": [1, -1, 0], "more": [{"b": 1}] * 3}), CLASSES
    )
    columns = ingest_and_read(tmp_path, "hf", folder, label="y", columns=["a"], on_bad_row="skip")
    assert (columns["a"], columns["label"]) == ([1, 3], [1, 0])
    about = json.loads((tmp_path / "out" / "_dataset.json").read_text())
    assert (about["classes"], about["refused"]) == (["u", "v"], 1)


@pytest.mark.parametrize(
    ("table", "options", "expected"),
    [
        ({"a": [1], "y": [-1]}, {"label": "y"}, "row data-00000-of-00001.arrow:0: no label"),
        ({"a": [1], "y": [b"u"]}, {"label": "y"}, "a label is a ClassLabel, an integer, text, a truth value"),
        ({"a": [[{"b": 1}]]}, {}, "column 'a' holds lists that are not of numbers"),
        ({"a": [{"bytes": None, "path": "x.png"}]}, {}, "has no bytes, only a path"),
        ({"a": [{"bytes": b"x", "path": None}]}, {}, "not an image that can be decoded"),
        ({"a": [1]}, {"columns": ["b"]}, "no column 'b'; the columns are ['a']"),
    ],
)
def test_bad_hugging_face_data_is_refused(
    tmp_path: Path, table: dict[str, Any], options: dict[str, Any], expected: str
) -> None:
    assert expected in ingest_error(
        tmp_path, "hf", write_saved_dataset(tmp_path / "in", pa.table(table), CLASSES), **options
    )


def test_incomplete_hugging_face_folders_are_refused(tmp_path: Path) -> None:
    folder = write_saved_dataset(tmp_path / "in", pa.table({"a": list(range(1000))}), {})
    file = folder / "data-00000-of-00001.arrow"
    data = file.read_bytes()
    file.write_bytes(data[:3000])
    assert "The file is damaged or of another format" in ingest_error(tmp_path, "hf", folder)
    file.unlink()
    assert "state.json names 'data-00000-of-00001.arrow', which is not in" in ingest_error(tmp_path, "hf", folder)
    (folder / "state.json").unlink()
    assert "nothing of Hugging Face datasets" in ingest_error(tmp_path, "hf", folder)


@pytest.mark.parametrize("name", ["../other", "..", ".", "", "/etc", "a/../../other"])
def test_splits_and_files_of_hugging_face_elsewhere_are_not_read(tmp_path: Path, name: str) -> None:
    table = pa.table({"a": [1]})
    write_saved_dataset(tmp_path / "other", table, {})
    folder = write_saved_dataset(tmp_path / "in", table, {})
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    assert "state.json names" in ingest_error(tmp_path, "hf", folder)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    assert f"dataset_dict.json names the split {name!r}" in ingest_error(tmp_path, "hf", folder)


@pytest.mark.parametrize(("name", "compression"), [("a.feather", "lz4"), ("a.arrow", None)])
def test_files_of_arrow_as_pandas_and_polars_write_them_are_read(
    tmp_path: Path, name: str, compression: str | None
) -> None:
    table = pa.table({"a": list(range(1000)), "b": ["x", None] * 500})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(tmp_path / name, table.schema, options=options) as file:
        file.write_table(table, max_chunksize=300)
    rows = ingest_and_read(tmp_path, "hf", tmp_path / name)
    assert (rows["a"], rows["b"]) == (table["a"].to_pylist(), table["b"].to_pylist())
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:3000])
    assert "The file is damaged" in ingest_error(tmp_path / "cut", "hf", tmp_path / name)


@pytest.mark.parametrize("suffix", [".arrow", "-0f1e2d.parquet"])
def test_missing_and_duplicate_numbered_files_are_refused(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        path = tmp_path / "in" / f"train-{number:05d}-of-00003{suffix}"
        if suffix == ".arrow":
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, pa.schema({"a": pa.int64()})) as writer:
                writer.write_table(pa.table({"a": [number]}))
        else:
            pq.write_table(pa.table({"a": [number]}), path)
    assert ingest_and_read(tmp_path / "whole", "hf", tmp_path / "in")["a"] == [0, 1, 2]
    duplicate = (
        tmp_path
        / "in"
        / (f"train-00000-of-00001{suffix}" if suffix == ".arrow" else "train-00001-of-00003-ffffff.parquet")
    )
    shutil.copy(tmp_path / "in" / f"train-00001-of-00003{suffix}", duplicate)
    assert "the files train-... are numbered more than once" in ingest_error(tmp_path, "hf", tmp_path / "in")
    duplicate.unlink()
    (tmp_path / "in" / f"train-00001-of-00003{suffix}").unlink()
    assert "train-00001-of-00003 is missing, 2 of 3 are there" in ingest_error(tmp_path, "hf", tmp_path / "in")


@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (pa.array([1], pa.int32()), pa.array([1], pa.int64()), "int64"),
        (pa.array([[1]], pa.list_(pa.int32())), pa.array([[1]], pa.list_(pa.int64())), "int64"),
        (pa.array([[1]]), pa.array([1]), "column 'a' holds int64, and lists of numbers in the first file. Save it"),
        (pa.array([[], []], pa.list_(pa.list_(pa.int8()))), pa.array([1]), "column 'a' has no value at all"),
        (pa.array([[1]]), pa.array([["x"]]), "column 'a' holds list<element: string>, and lists of numbers in the"),
    ],
)
def test_files_of_one_split_with_different_types_are_refused(
    tmp_path: Path, first: pa.Array, second: pa.Array, expected: str, split_bytes: int
) -> None:
    (tmp_path / "in").mkdir()
    for number, column in enumerate((first, second)):
        pq.write_table(pa.table({"a": column}), tmp_path / "in" / f"train-{number:05d}-of-00002.parquet")
    ragged = ["a"] if pa.types.is_nested(first.type) else None
    for ragged_option in (None, ragged):
        message = ingest_error(
            tmp_path, "hf", tmp_path / "in", split_bytes=split_bytes, on_bad_row="skip", ragged=ragged_option
        )
        assert expected in message
    assert expected != "int64" or "all files of a data set have the same. Correct the input." in message


@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("first", "second", "ragged", "expected"),
    [
        (pa.array([1, 2]), pa.nulls(2), False, [1, 2, None, None]),
        (pa.array(["x", "y"]).dictionary_encode(), pa.nulls(2), False, ["x", "y", None, None]),
        (pa.array([[1], [2, 3]]), pa.nulls(2), True, [[1], [2, 3]]),
        (pa.array([[1], [2, 3]]), pa.array([[], []]), True, [[1], [2, 3], [], []]),
        (pa.array([[[1, 2]], []]), pa.array([[], [[]]]), True, [[[1, 2]], [], []]),
        (pa.array([[1, 2], [2, 3]], pa.list_(pa.int8(), 2)), pa.nulls(2), False, [[1, 2], [2, 3]]),
    ],
)
def test_a_column_without_values_in_a_later_file_has_the_first_files_type(
    tmp_path: Path, first: pa.Array, second: pa.Array, ragged: bool, expected: list[Any], split_bytes: int
) -> None:
    (tmp_path / "in").mkdir()
    for number, column in enumerate((first, second)):
        pq.write_table(pa.table({"a": column}), tmp_path / "in" / f"train-{number:05d}-of-00002.parquet")
    columns = ingest_and_read(
        tmp_path,
        "hf",
        tmp_path / "in",
        split_bytes=split_bytes,
        on_bad_row="skip",
        max_bad_rows=9,
        ragged=["a"] if ragged else None,
    )
    values = sorted(
        (list(np.asarray(value).tolist()) if pa.types.is_nested(first.type) else value for value in columns["a"]),
        key=str,
    )
    assert values == sorted(expected, key=str)


def test_changed_class_names_count_as_a_changed_source(tmp_path: Path) -> None:
    names = write_saved_dataset(tmp_path / "in", pa.table({"a": [1], "y": [1]}), CLASSES) / "dataset_info.json"
    options = IngestOptions("hf", str(tmp_path / "out"), str(tmp_path / "in"), label="y")
    ingest(options)
    assert ingest(options).reused
    names.write_text(names.read_text().replace('"u"', '"other"'))
    with pytest.raises(ConfigError, match="its source has changed since"):
        ingest(options)


@pytest.mark.parametrize("end", [400, 2_000_000_000, 2])
def test_an_arrow_stream_that_points_outside_itself_is_refused(tmp_path: Path, end: int) -> None:
    """Without the check, rows would contain bytes of this process's memory, or crash it."""
    folder = write_saved_dataset(tmp_path / "in", pa.table({"a": [{"bytes": b"abc", "path": None}] * 3}), {})
    file = folder / "data-00000-of-00001.arrow"
    data = file.read_bytes()
    assert data.count(struct.pack("<4i", 0, 3, 6, 9)) == 1
    file.write_bytes(data.replace(struct.pack("<4i", 0, 3, 6, 9), struct.pack("<4i", 0, 3, 6, end)))
    assert "The file is damaged" in ingest_error(tmp_path, "hf", folder, check=False)


def test_hugging_face_labels_outside_the_classes_are_bad_rows(tmp_path: Path) -> None:
    folder = write_saved_dataset(tmp_path / "in", pa.table({"a": [1, 2, 3], "y": [1, 7, 0]}), CLASSES)
    assert ingest_and_read(tmp_path, "hf", folder, label="y", on_bad_row="skip")["label"] == [1, 0]
    [refused] = (tmp_path / "out" / "_refused.jsonl").read_text().splitlines()
    assert json.loads(refused)["reason"] == "label 7; the 2 classes allow 0 to 1"


@pytest.mark.parametrize("legacy_format", [False, True])
def test_an_arrow_stream_without_its_end_marker_is_refused(tmp_path: Path, legacy_format: bool) -> None:
    """The file is truncated between two batches; the last value equals the end marker, so the file ends as a complete
    one does.
    """
    sink = io.BytesIO()
    table = pa.table({"a": [1, 2**32 - 1]})
    ends = []
    with pa.ipc.new_stream(
        sink, table.schema, options=pa.ipc.IpcWriteOptions(use_legacy_format=legacy_format)
    ) as writer:
        for _ in range(3):
            writer.write_table(table)
            ends.append(sink.tell())
    path = tmp_path / "data.arrow"
    path.write_bytes(sink.getvalue()[: ends[1]])
    assert "it was cut off" in ingest_error(tmp_path, "hf", path)
    path.write_bytes(sink.getvalue())
    assert ingest_and_read(tmp_path, "hf", path)["a"] == [1, 2**32 - 1] * 3


def test_parquet_is_described_and_not_rewritten(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for i, rows in enumerate((5, 3)):
        pq.write_table(
            pa.table({"x": [0.5] * rows, "label": [i] * rows}), tmp_path / "in" / f"{i}.parquet", row_group_size=2
        )
    summary = ingest(IngestOptions("parquet", input=str(tmp_path / "in")))
    part = summary.parts[""]
    assert (summary.reused, part.rows, part.path) == (True, 8, str(tmp_path / "in"))
    assert [(s["path"], s["rows"], s["row_groups"]) for s in part.shards] == [("0.parquet", 5, 3), ("1.parquet", 3, 2)]
    assert part.columns["label"]["type"] == "integer"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0.parquet", "1.parquet", "in"]
    (tmp_path / "in" / "1.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        ingest(IngestOptions("parquet", input=str(tmp_path / "in")))
