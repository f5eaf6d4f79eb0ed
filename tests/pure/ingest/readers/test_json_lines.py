"""Lines and lists of JSON objects are read with one type for each key; others are refused with the line and reason."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_app.errors import DataError
from ray_app.ingest.ingest import IngestOptions
from ray_app.ingest.readers import json_lines, sources
from tests.support.ingest_inputs import RNG, ingest_and_read, ingest_error, read_columns
from tests.support.paths import ROOT

Content = str | bytes | dict[str, str]
"""The content of f.jsonl, or of the files of a folder by their names."""
FLAT = {"flatten": True}
SKIP = {"on_bad_row": "skip"}
DEEP = b"[" * 100_000
LINES = [
    {"x": 1, "kind": "wasp", "when": "2020-01-01", "vector": [1, 2.5], "on": True, "grid": [[1, 2], [3, 4]]},
    {"x": 2.5, "kind": "ant", "when": "never", "vector": [3, 4], "grid": [[5, 6], [7, 8]]},
    {"kind": "bee", "on": False, "when": None, "vector": [0.5, 0], "grid": [[0, 0], [0, 0]], "x": None},
]
ITEMS = [{"a": n, "v": [n, 0.5], "t": "\n]"} for n in range(3)]
READ_ITEMS = {"row_id": ["a.json:1", "a.json:2", "a.json:3"], "a": [0, 1, 2], "t": ["\n]"] * 3}


def write(tmp_path: Path, content: Content) -> Path:
    if isinstance(content, dict):
        (tmp_path / "in").mkdir()
        for name, text in content.items():
            (tmp_path / "in" / name).write_text(text)
        return tmp_path / "in"
    (tmp_path / "f.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path / "f.jsonl"


def lines_of(name: str, *values: Any) -> str:
    """Returns lines with values of one key."""
    return "\n".join(json.dumps({name: value}) for value in values)


def files_of(name: str, *values: Any) -> dict[str, str]:
    """Returns files with a line each."""
    return {f"{number}.jsonl": lines_of(name, value) for number, value in enumerate(values)}


def nested_line(depth: int) -> str:
    """Returns a JSON line that is nested `depth` deep."""
    return '{"a": ' + "[" * (depth - 1) + "1" + "]" * (depth - 1) + "}"


def days(*names: str) -> tuple[Content, dict[str, Any], dict[str, Any]]:
    """Returns labels that look like dates."""
    label = [sorted(names).index(day) for day in names]
    return (
        {f"{i}.jsonl": lines_of("day", day, day) for i, day in enumerate(names)},
        {"label": "day"},
        {"label": [number for number in label for _ in range(2)]},
    )


READ: dict[str, tuple[Content, dict[str, Any], dict[str, Any]]] = {
    "blank lines": ('\ufeff{"a": 1}\n\n  \n{"a": 2}\r\n\n', {}, {"row_id": ["f.jsonl:1", "f.jsonl:4"], "a": [1, 2]}),
    "a key that is left out": ('{"a": 1, "b": "x", "n": NaN}\n{"a": 2, "b": 7}', {"columns": ["a"]}, {"a": [1, 2]}),
    "dates": days("2020-01-02", "2020-01-01"),
    "dates and times": days("2020-01-01T00:00:00Z", "2020-01-01"),
    "times and words": days("2021-01-01 10:00:00.5", "other"),
    "integers of 64 bits": (lines_of("id", 2**63 - 1, -(2**63)), {}, {"id": [2**63 - 1, -(2**63)]}),
    "large numbers": (lines_of("x", 1e300, 10**18), {}, {"x": [1e300, 1e18]}),
    "large numbers in lists": (lines_of("v", [2**60, 0.1], [2.0**53 + 1, 3]), {}, {"v": [[2**60, 0.1], [2.0**53, 3]]}),
    "digits in text": (lines_of("t", "9" * 30, "1"), {}, {"t": ["9" * 30, "1"]}),
    "brackets in text": (b"\xef\xbb\xbf" + lines_of("a", '[{"\\' * 100, "x").encode(), {}, {"a": ['[{"\\' * 100, "x"]}),
    "many lists beside each other": (lines_of("a", [[0]] * 100), {}, {"a": [[[0]] * 100]}),
    "one list": ({"a.json": json.dumps(ITEMS)}, {}, READ_ITEMS),
    "one list on many lines": ({"a.json": json.dumps(ITEMS, indent=1)}, {}, READ_ITEMS),
    "lists beside lines": ({"a.json": json.dumps(ITEMS), "b.jsonl": '{"a": 7}\n'}, {}, {"a": [7]}),
    "an empty list first": (files_of("a", [], [1, 2]), SKIP, {"row_id": ["1.jsonl:1"], "a": [[1, 2]]}),
    "empty lists first": (files_of("a", [[1, 2], []], [[1, 2], [3, 4]]), SKIP, {"a": [[[1, 2], [3, 4]]]}),
    "too deep": (b'{"a": 1}\n{"a": ' + DEEP + b'\n{"a": 2}\n', SKIP, {"a": [1, 2]}),
    "an object that is null": (
        '{"a": {"b": 1}, "y": 0}\n{"a": null, "y": 1}\n{"a": {}, "y": 2}',
        FLAT,
        {"a.b": [1, None, None], "y": [0, 1, 2]},
    ),
    "inner objects": (
        '{"a": {"b": 1, "c": {"d": "x"}}, "y": {"k": "u"}}\n{"a": {"c": {"d": "z"}, "b": 2}, "y": {"k": "v"}}',
        {**FLAT, "label": "y.k", "rename": {"a.b": "x"}},
        {"row_id": ["f.jsonl:1", "f.jsonl:2"], "x": [1, 2], "a.c.d": ["x", "z"], "label": [0, 1]},
    ),
}
SEVERAL = 'a number 2 times, first 1 in f.jsonl:1; text 1 times, first "?" in f.jsonl:2'
REFUSED: dict[str, tuple[Content, dict[str, Any], str]] = {
    "no value": (lines_of("a", None), {}, "'a' has no value at all"),
    "no list with values": (lines_of("a", [[], [1]], [[], []]), {}, "'a' has no value at all"),
    "no line": ("", {}, "no rows"),
    "an empty list first": (files_of("a", [], [1, 2]), {}, "row 0.jsonl:1: 'a' is not a list of shape [2"),
    "several types": (lines_of("a", 1, "?", 2), SKIP, f"the values of 'a' have several types: {SEVERAL}"),
    "truth values": (lines_of("a", True, 1, False), SKIP, "true or false 2 times, first true in f.jsonl:1; a number 1"),
    "lists and numbers": (lines_of("a", [1], 1, None), SKIP, "lists of a number 1 times, first [1] in f.jsonl:1; a"),
    "objects of several types": (lines_of("a", {"b": 1}, {"b": "x"}, None), SKIP, "in f.jsonl:2"),
    "files of several types": (
        {"a.jsonl": '{"b": 1, "a": null}\n{"a": 1}\n', "b.jsonl": '{"b": 1.5}\n{"a": "?"}\n'},
        {},
        'first 1 in a.jsonl:2; text 1 times, first "?" in b.jsonl:2',
    ),
    "a list": ('[{"a": 1}, {"a": 2}]', SKIP, "one list, but JSON lines have one object per line. Convert it with `jq"),
    "a list of lines": ('[\n  {"a": 1},\n  {"a": 2}\n]', {}, "is one list over several lines"),
    "a list of two lines": ('[{"a": 1},\n{"a": 2}]', SKIP, "is one list over several lines"),
    "one object": ('\ufeff\n{\n  "a": 1\n}', {}, "one object over several lines, but JSON lines"),
    **{
        encoding: ('{"a": 1}\n'.encode(encoding), SKIP, "instead of UTF-8")
        for encoding in ("utf-16", "utf-16-le", "utf-32")
    },
    "rounded": (lines_of("id", 7, 12345678901234567890), SKIP, "row f.jsonl:2: key 'id' holds 12345678901234567890"),
    "rounded first": (
        files_of("id", 2**53 + 1, 1.5),
        {},
        "row 0.jsonl:1: key 'id' holds 9007199254740993, which float64",
    ),
    "rounded in lists": (
        files_of("id", [1.5, 2], [-(2**53) - 1, 0]),
        {},
        "row 1.jsonl:1: key 'id' holds -9007199254740",
    ),
    "enormous": (lines_of("id", 0.5, 10**400 + 1), {}, "key 'id' holds 1" + "0" * 39 + ", which float64 would round"),
    "too deep": (f'{{"a": 1}}\n{nested_line(33)}\n', {}, "row f.jsonl:2: nested more than 32 deep"),
    "too deep after flat ones": (
        f'{{"b": 1}}\n{{"b": 2}}\n{nested_line(33)}\n',
        {},
        "row f.jsonl:3: nested more than 32 deep",
    ),
    "null after objects": ('{"b": 1}\nnull\n{"b": 2}\n', {}, "row f.jsonl:2: a JSON NoneType instead of an object"),
    "objects": ('{"a": {"b": 1}}', {}, "key 'a' holds objects; allowed are numbers, text, truth values"),
    "a name twice": ('{"a": {"b": 1}, "a.b": 2}', FLAT, "the key 'a.b' occurs twice"),
    "an inner name twice": ('{"a": {"b": 1, "b": 2}}', FLAT, "the key 'b' occurs twice"),
    "an inner constant": ('{"a": {"b": 1}}\n{"a": {"b": NaN}}', FLAT, "'a.b' holds NaN; write null"),
    "lists of objects": ('{"a": [{"b": 1}]}', FLAT, "key 'a' holds lists that are not of numbers"),
    "an object without an end": ('{"a": {"b": 1}', FLAT, "not JSON"),
    "values as keys": (
        "\n".join(json.dumps({f"user{number}": 1}) for number in range(20_000)),
        {},
        "20,000 lines from f.jsonl:1 on have about 20,000 different keys, such as ['user",
    ),
}


@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
@pytest.mark.parametrize("case", READ)
def test_lines_are_read(tmp_path: Path, case: str, split_bytes: int) -> None:
    content, options, columns = READ[case]
    stored = ingest_and_read(tmp_path, "jsonl", write(tmp_path, content), split_bytes=split_bytes, **options)
    actual = {name: stored[name].tolist() if isinstance(stored[name], np.ndarray) else stored[name] for name in columns}
    assert actual == columns


@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
@pytest.mark.parametrize("case", REFUSED)
def test_lines_that_are_no_rows_are_refused(tmp_path: Path, case: str, split_bytes: int) -> None:
    content, options, message = REFUSED[case]
    assert message in ingest_error(tmp_path, "jsonl", write(tmp_path, content), split_bytes=split_bytes, **options)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"t": "café"}'.encode("latin-1"), "not UTF-8: byte 11 of the line is 0xe9; save the file as UTF-8"),
        ('{"t": ["café"]}'.encode("latin-1"), "not UTF-8: byte 12"),
        ('{"café": "x"}'.encode("latin-1"), "not UTF-8: byte 6"),
        (b'{"t": NaN}', "not JSON: 't' holds NaN; write null for a missing value"),
        (b'{"t": Infinity}', "not JSON: 't' holds Infinity; write null"),
        (b'{"t": -Infinity}', "not JSON: 't' holds -Infinity; write null"),
        (b'{"t": [1, NaN]}', "not JSON: 't' holds NaN; write null"),
        (b'{"t": Inf}', "not JSON: Expecting value"),
        (b'{"t": [1, "x"]}', "'t' holds lists of a number and text; the values of a list need one type"),
        (b'{"t": 1, "t": 2}', "the key 't' occurs twice; write each key once"),
        (b"{'t': 1}", "not JSON: Expecting property name enclosed in double quotes"),
        (b'"text"', "a JSON str instead of an object"),
        (b"[1]", "a JSON list instead of an object"),
        (b"3", "a JSON int instead of an object"),
        (b"null", "a JSON NoneType instead of an object"),
        (b"true", "a JSON bool instead of an object"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"label": "y"}], ids=["", "label"])
def test_an_invalid_line_is_a_bad_row_with_a_reason(
    tmp_path: Path, bad: bytes, reason: str, options: dict[str, Any]
) -> None:
    good = b'{"y": "a", "t": %s}' % (b"[1, 2]" if b"[1," in bad else b'"u"' if b"caf" in bad else b"2")
    path = write(tmp_path, b"\n".join([good, b"", bad, good]))
    assert f"row f.jsonl:3: {reason}" in ingest_error(tmp_path, "jsonl", path, **options)
    columns = ingest_and_read(tmp_path, "jsonl", path, on_bad_row="skip", **options)
    assert columns["row_id"] == ["f.jsonl:1", "f.jsonl:4"]
    [refused] = (tmp_path / "out" / "_refused.jsonl").read_text().splitlines()
    assert reason in json.loads(refused)["reason"]


def test_each_key_has_one_type_over_all_files(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a.jsonl": "\n".join(map(json.dumps, LINES[:1])) + "\n\n"})
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, LINES[1:])).encode()))
    columns = ingest_and_read(tmp_path, "jsonl", folder, label="kind", split_bytes=1)
    assert columns["row_id"] == ["a.jsonl:1", "b.jsonl.gz:1", "b.jsonl.gz:2"]
    assert (columns["x"], columns["label"], columns["on"]) == ([1.0, 2.5, None], [2, 0, 1], [True, None, False])
    assert columns["when"] == ["2020-01-01", "never", None]
    np.testing.assert_array_equal(columns["vector"], [[1, 2.5], [3, 4], [0.5, 0]])
    np.testing.assert_array_equal(columns["grid"], [line["grid"] for line in LINES])
    about = json.loads((tmp_path / "out" / "_dataset.json").read_text())
    assert (about["classes"], about["class_counts"]) == (["ant", "bee", "wasp"], {"ant": 1, "bee": 1, "wasp": 1})


def test_a_long_line_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is truncated within the line, so reading the whole line would fail in another way."""
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1 << 19)
    line = b'{"a": "' + RNG.bytes(2 << 20).hex().encode()
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress(line)[:-1_000_000])
    assert "line 1 has more than the allowed 1048576 bytes" in ingest_error(tmp_path, "jsonl", tmp_path / "f.jsonl.gz")


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(b'{"a": 1}'))
    # The header has 10 bytes; the next one belongs to the first block.
    data[10] = 0xFF
    (tmp_path / "f.jsonl.gz").write_bytes(data)
    assert "invalid block type" in ingest_error(tmp_path, "jsonl", tmp_path / "f.jsonl.gz")


def test_lists_may_be_nested_as_deep_as_lines_may(tmp_path: Path) -> None:
    assert ingest_and_read(tmp_path, "jsonl", write(tmp_path, nested_line(32)))["a"].shape == (1,) * 32


@pytest.mark.rest
def test_lines_that_crash_the_parser_are_skipped(tmp_path: Path) -> None:
    """The lines are nested too deeply, in one line or over several, or are not objects; some of them crashed the parser
    in C, so they are read in a process of their own.
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
    code = f"from ray_app.ingest.ingest import *\nfor each in {options!r}: print(each.input, flush=True), ingest(each)"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert process.returncode == 0, f"exit code {process.returncode}: {process.stdout}{process.stderr}"
    for number, lines in enumerate(cases):
        out = tmp_path / f"out{number}"
        assert read_columns(out) == {"row_id": [f"{number}.jsonl:{len(lines) + 1}"], "b": [1]}
        assert len((out / "_refused.jsonl").read_text().splitlines()) == len(lines)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns an object with the keys of inner objects as `a.b`."""
    items: dict[str, Any] = {}
    for name, item in value.items():
        items |= flat(item, f"{prefix}{name}.") if isinstance(item, dict) else {f"{prefix}{name}": item}
    return items


@settings(max_examples=40, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), JSON_VALUES, max_size=3), min_size=1, max_size=6))
def test_inner_objects_are_read_as_a_file_that_has_none(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    folder, results = tmp_path_factory.mktemp("json"), []
    for name, lines in (("nested", rows), ("flat", [flat(row) for row in rows])):
        (folder / name).mkdir()
        path = write(folder / name, "\n".join(json.dumps({"id": 1, **line}) for line in lines))
        try:
            results.append(str(ingest_and_read(folder / name, "jsonl", path, flatten=True)))
        except DataError as error:
            results.append(str(error).replace(str(folder / name), ""))
    assert results[0] == results[1]
