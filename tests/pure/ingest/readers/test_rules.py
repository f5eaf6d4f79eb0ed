"""Rules of labels, targets, lists and missing values, each in all formats that can have such values: rule x format."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ray_app.ingest.readers import converter
from tests.support.ingest_inputs import ingest_and_read, ingest_error
from tests.support.ingest_rows import FILES, write_rows

ALL = tuple(FILES)
NAMED = ("csv", "jsonl", "hf", "tfrecord")
"""Formats with names of columns; a WebDataset has them in its .json."""
NULLS = ("csv", "jsonl", "hf")
GAPS = (*NULLS, "webdataset")
TYPED = ("jsonl", "hf", "webdataset")
LISTS = ("jsonl", "hf")
FIRST_ROW = {"csv": 2, "jsonl": 1, "hf": 0, "tfrecord": 0, "webdataset": 0}
TEXT_LISTS = {"y": pa.list_(pa.string())}


@dataclass(frozen=True)
class Rule:
    """What becomes of columns.

    Args:
        columns: The values by column; a column `a` numbers the rows.
        kept: The columns that are stored; with a `reason` if rows are skipped.
        reason: Part of the message; {} stands for the id of the row `bad`.
        types: Types of columns in Parquet.
    """

    sources: tuple[str, ...]
    columns: dict[str, list[Any]]
    options: dict[str, Any]
    kept: dict[str, list[Any]] = field(default_factory=dict)
    reason: str = ""
    bad: int = 0
    types: dict[str, pa.DataType] = field(default_factory=dict)

    def write(self, folder: Path, source: str) -> Path:
        counts = range(len(next(iter(self.columns.values()))))
        rows = [{"a": i, **{name: values[i] for name, values in self.columns.items()}} for i in counts]
        schema = pa.schema({"a": pa.int64(), **self.types}) if self.types else None
        return write_rows(folder, source, rows, schema)


def label(
    values: list[Any], kept: list[Any], sources: tuple[str, ...] = ALL, reason: str = "", bad: int = 0, **options: Any
) -> Rule:
    """Returns a rule of a label."""
    return Rule(sources, {"y": values}, {"label": "y", **options}, {"label": kept}, reason, bad)


def tags(values: list[Any], kept: list[Any], reason: str = "", **options: Any) -> Rule:
    """Returns a rule of a label of lists of text."""
    return Rule(TYPED, {"y": values}, {"label": "y", **options}, {"target": kept}, reason, types=TEXT_LISTS)


def lists(values: list[Any], reason: str, sources: tuple[str, ...] = LISTS, ragged: bool = True) -> Rule:
    """Returns a rule of a column of lists of which the second one is refused."""
    options = {"ragged": ["v"]} if ragged else {}
    return Rule(sources, {"v": values}, options, {"a": [0, 2]}, f"row {{}}: 'v' is not a list {reason}", 1)


BIRDS = {"x": [1.5, 2.5, 3.5], "sings": [1, 0, 1], "flies": [0, 1, 1]}
TARGETS = {"targets": ["flies", "sings"]}
STORED = {
    "texts in sorted order": label(["b", "a", "b"], [1, 0, 1]),
    "texts in the order of classes": label(["b", "a", "b"], [0, 1, 0], classes=["b", "a"]),
    "texts that look like dates": label(["2020-01-02", "2020-01-01"], [1, 0]),
    "integers": label([5, -1], [5, -1]),
    "whole fractions": label([1.0, 0.0, 2.0], [1, 0, 2]),
    "truth values": label([True, False, True], [1, 0, 1], ("csv", *TYPED)),
    "named integers": label([-1, 1, -1], [0, 1, 0], classes=["-1", "1"]),
    # A CSV is text: its classes are as they were written.
    "named fractions": label([-1.0, 1.0, -1.0], [0, 1, 0], (*TYPED, "tfrecord"), classes=["-1", "1"]),
    "fractions as written": label([-1.0, 1.0, -1.0], [0, 1, 0], ("csv",), classes=["-1.0", "1.0"]),
    "named truth values": label([True, False, True], [0, 1, 0], TYPED, classes=["true", "false"]),
    "lists of one": label([[1], [0]], [1, 0], TYPED),
    "named lists of one": label([[1], [2], [1], [0]], [1, 0, 1, 2], TYPED, classes=["2", "1", "0"]),
    "lists of classes": tags(
        [["y", "x"], [], ["2020-01-01"], ["x", "x"]], [[0, 1, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0]]
    ),
    "targets": Rule(NAMED, BIRDS, TARGETS, {"target": [[0, 1], [1, 0], [1, 1]], "x": BIRDS["x"]}),
    "targets and columns": Rule(
        NAMED, BIRDS, {**TARGETS, "columns": ["x"]}, {"target": [[0, 1], [1, 0], [1, 1]], "x": BIRDS["x"]}
    ),
    "gaps": Rule(NULLS, {"n": [1, None], "t": ["u", None]}, {"columns": ["n"]}, {"n": [1, None]}),
    "a dropped column": Rule(
        NULLS, {"label": [1, 1], "y": [0, 1]}, {"label": "y", "drop": ["label"]}, {"label": [0, 1]}
    ),
    "lists of one shape": Rule((*LISTS, "tfrecord"), {"v": [[1, 2], [3, 4]]}, {}, {"v": [[1, 2], [3, 4]]}),
    "lists of any length": Rule(
        (*LISTS, "tfrecord"), {"v": [[1, 2], [3], []]}, {"ragged": ["v"]}, {"v": [[1, 2], [3], []]}
    ),
}
REFUSED = {
    "a gap among texts": label(["x", None, "x"], [0, 0], GAPS, "rows without a value"),
    "a gap among integers": label([1, None, 0], [1, 0], GAPS, "row {}: no label", 1),
    "a gap among fractions": label([1.0, None, 0.0], [1, 0], GAPS, "row {}: no label", 1),
    "an empty text among texts": label(["x", "", "x"], [0, 0], TYPED, "rows without a value"),
    "an empty text": label(["x", "", "x"], [0, 0], ("tfrecord",), "row {}: no label", 1),
    "texts beside classes": label(["a", "c"], [0], ALL, "but classes has only", classes=["a", "b"]),
    "a number beside classes": label(
        [-1, 7, 1], [1, 0], (*TYPED, "tfrecord"), "none of the classes", classes=["1", "-1"]
    ),
    "a gap in targets": Rule(
        NULLS,
        {**BIRDS, "flies": [0, None, 1]},
        TARGETS,
        {"target": [[0, 1], [1, 1]]},
        "row {}: no number in flies, one of the targets",
        1,
    ),
    "a target beyond float32": Rule(
        ("csv", "hf"), {"p": [1e39, 2.0], "q": [1, 1]}, {"targets": ["p", "q"]}, {"target": [[2, 1]]}, "no number in p"
    ),
    "other lists than of classes": tags(
        [["x"], ["z"], None, ["y", None]], [[0, 1]], "but classes has only", classes=["y", "x"]
    ),
    "a list of another length": lists(
        [[1, 2], [3], [4, 5]],
        "of shape [2], as the first non-empty one; for lists of any length, name the column in --ragged",
        (*LISTS, "tfrecord"),
        ragged=False,
    ),
    "no list": lists([[1], None, [1]], "of numbers, or lacks one"),
    "a gap in a list": lists([[1], [1, None], [1]], "of numbers, or lacks one"),
    "an empty inner list": lists([[[1], [2]], [[], [2]], [[1], [2]]], "of lists of shape [1]"),
    "another inner length": lists(
        [[[1, 2]], [[1, 2], [3]], [[1, 2]]], "of lists of shape [2], as the first non-empty one, or lacks a number"
    ),
    "a gap among inner lists": lists([[[1, 2]], [[1, 2], None], [[1, 2]]], "of lists of shape [2]"),
    "a gap in an inner list": lists([[[1, 2]], [[1, 2], [3, None]], [[1, 2]]], "of lists of shape [2]"),
    "not a list of lists": lists([[[1, 2]], None, [[1, 2]]], "of lists of shape [2]"),
    "another inner shape": lists([[[[1, 2]]], [[[1, 2], [1, 2]]], [[[1, 2]]]], "of lists of shape [1, 2]"),
}
IMPOSSIBLE = {
    "a fraction as label": label([1.0, 1.5], [], ALL, "row {} has 1.5, which is not an integer", 1),
    "truth values with other classes": label(
        [True, False],
        [],
        TYPED,
        "holds bool, and classes is ['a', 'b']; allowed are ['false', 'true']",
        classes=["a", "b"],
    ),
    "lists of numbers as label": label(
        [[1, 0], [0, 0]], [], (*TYPED, "tfrecord"), "has lists of shape [2]; allowed are"
    ),
    "a label that is not there": Rule(NAMED, {"x": [1]}, {"label": "y"}, reason=" 'y'; the "),
    "a second label": Rule(NAMED, {"y": [1], "label": [0]}, {"label": "y"}, reason="'y' becomes 'label'"),
    "a label that is dropped": label([1, 0], [], NAMED, "drop names 'y'; the", drop=["y"]),
    "a label that is a target": label([1, 0], [], NAMED, "label is y, one of them", targets=["a", "y"]),
    "targets of text": Rule(
        NULLS, {"x": [1], "kind": ["u"]}, {"targets": ["x", "kind"]}, reason="targets names 'kind', a column of"
    ),
    "targets that are not there": Rule(NAMED, {"x": [1]}, {"targets": ["x", "z"]}, reason=" 'z'; the "),
    "a target of a new name": Rule(
        NAMED, BIRDS, {"targets": ["sings"], "rename": {"flies": "target"}}, reason="two columns with the same name"
    ),
    "lists of classes beside a target": Rule(
        LISTS, {"target": [7], "y": [["u"]]}, {"label": "y"}, reason="there is another column 'target'"
    ),
    "lists of text that are no label": Rule(LISTS, {"y": [["u"]]}, {}, reason="lists of text can be the label"),
    "lists of classes to stratify": tags([["x"], []], [], "one class per row", eval_fraction=0.5, stratify=True),
    "empty lists": Rule(
        ("jsonl",), {"v": [[]]}, {"ragged": ["v"]}, reason="holds lists that are not of numbers, or all"
    ),
    "ragged text": Rule(LISTS, {"v": [["u"]]}, {"ragged": ["v"]}, reason="holds lists that are not of numbers"),
    "a ragged column that is not there": Rule(
        LISTS, {"v": [[1], [2]]}, {"ragged": ["z"]}, reason="that are kept are ['a', 'v']; columns of lists are ['v']."
    ),
    "a ragged column that is left out": Rule(
        (*LISTS, "tfrecord"),
        {"v": [[1, 2]]},
        {"ragged": ["v"], "columns": ["a"]},
        reason="are kept are ['a']; none has",
    ),
    "a ragged number": Rule(
        LISTS, {"v": [[1, 2]]}, {"ragged": ["v", "a"]}, reason="ragged names 'a', which holds int64; columns of lists"
    ),
    "a ragged label": Rule(NAMED[1:], {"y": [1]}, {"ragged": ["y"], "label": "y"}, reason="ragged names the label 'y'"),
}


def in_each_format(rules: dict[str, Rule]) -> pytest.MarkDecorator:
    """Parametrizes a test with each rule in each of its formats."""
    cases = [pytest.param(r, s, id=f"{name}-{s}") for name, r in rules.items() for s in r.sources]
    return pytest.mark.parametrize(("rule", "source"), cases)


def assert_kept(rows: dict[str, Any], rule: Rule) -> None:
    for name, values in rule.kept.items():
        stored = rows[name]
        assert [value.tolist() if hasattr(value, "tolist") else value for value in stored] == values, name
        assert name != "target" or stored.dtype == "float32"


@in_each_format(STORED)
def test_values_are_stored_alike_in_each_format(tmp_path: Path, rule: Rule, source: str) -> None:
    assert_kept(ingest_and_read(tmp_path, source, rule.write(tmp_path, source), **rule.options), rule)


@in_each_format(REFUSED)
def test_rows_are_refused_or_skipped_alike_in_each_format(tmp_path: Path, rule: Rule, source: str) -> None:
    path = rule.write(tmp_path, source)
    message = ingest_error(tmp_path, source, path, **rule.options)
    row_id = f"{path.name}:{FIRST_ROW[source] + rule.bad}"
    assert rule.reason.replace("{}", row_id) in message
    assert_kept(ingest_and_read(tmp_path, source, path, on_bad_row="skip", **rule.options), rule)
    refused = [json.loads(line) for line in (tmp_path / "out" / "_refused.jsonl").read_text().splitlines()]
    assert "{}" not in rule.reason or [row["row_id"] for row in refused] == [row_id]
    assert "target" not in rule.kept or rule.types == {} or refused[0]["reason"] == converter.NOT_IN_CLASSES


@in_each_format(IMPOSSIBLE)
def test_columns_are_refused_alike_in_each_format(tmp_path: Path, rule: Rule, source: str) -> None:
    path = rule.write(tmp_path, source)
    reason = rule.reason.replace("{}", f"{path.name}:{FIRST_ROW[source] + rule.bad}")
    assert reason in ingest_error(tmp_path, source, path, on_bad_row="skip", **rule.options)
