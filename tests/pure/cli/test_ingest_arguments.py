"""Arguments of `ray-app ingest`: texts are taken as they are written, and lists need no brackets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_app.cli import ingest as command
from ray_app.ingest.options import IngestOptions
from tests.support.ingest_inputs import read_columns


def options_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> IngestOptions:
    """Returns the options that the command makes of its arguments."""
    calls: list[IngestOptions] = []
    monkeypatch.setattr(command, "_call", lambda _work, options, _address: calls.append(options))
    monkeypatch.setattr(command, "_print", lambda *_: None)
    assert command.main(["--source", "csv", "--input", "in.csv", "--out", "out", *arguments]) == 0
    return calls[0]


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--null", "#"], "null", "#"),
        (["--delimiter=#"], "delimiter", "#"),
        (["--label", "null"], "label", "null"),
        (["--label", "{a: 1}"], "label", "{a: 1}"),
        (["--null", "~"], "null", "~"),
        (["--null", ","], "null", ","),
        (["--null", '["?", "-"]'], "null", ["?", "-"]),
        (["--null", "[?, NA]"], "null", ["?", "NA"]),
        (["--null", "?", "--null+", "~"], "null", ["?", "~"]),
        (["--classes", "yes,no"], "classes", ["yes", "no"]),
        (["--classes", "[yes, no]"], "classes", ["yes", "no"]),
        (["--classes", "-1,1"], "classes", ["-1", "1"]),
        (["--classes=[-1, 1]"], "classes", ["-1", "1"]),
        (["--drop", "a"], "drop", ["a"]),
        (["--columns", "['a,b', c]"], "columns", ["a,b", "c"]),
        (["--targets", "y, z"], "targets", ["y", "z"]),
        (["--rename", "a=b,c=d"], "rename", {"a": "b", "c": "d"}),
        (["--rename", '{"a": "b"}'], "rename", {"a": "b"}),
        (["--eval_fraction", "0.5"], "eval_fraction", 0.5),
    ],
)
def test_values_are_taken_as_they_are_written(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], name: str, value: Any
) -> None:
    assert getattr(options_of(monkeypatch, *arguments), name) == value


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--label", "--seed", "1"], "--label"),
        (["--rename", "a"], "rename"),
        (["--classes", "[a"], "classes"),
        (["--drop"], "--drop"),
    ],
)
def test_values_that_cannot_be_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        options_of(monkeypatch, *arguments)
    assert expected in capsys.readouterr().err


def test_a_number_sign_is_a_value_of_an_option(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("a,b\n1,2\n#,4\n5,6\n")
    arguments = ["--source", "csv", "--input", str(tmp_path / "in.csv"), "--out", str(tmp_path / "out")]
    assert command.main([*arguments, "--null", "#"]) == 0
    assert read_columns(tmp_path / "out")["a"] == [1, None, 5]


def test_labels_that_do_not_count_from_zero_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.csv").write_text("a,y\n1,-1\n2,1\n3,1\n")
    arguments = ["--source", "csv", "--input", str(tmp_path / "in.csv"), "--label", "y"]
    assert command.main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert "the labels are [-1, 1]. Training needs numbers from 0 on: --classes -1,1" in capsys.readouterr().out
    assert command.main([*arguments, "--out", str(tmp_path / "second"), "--classes", "-1,1"]) == 0
    assert "Training needs" not in capsys.readouterr().out


def test_labels_that_count_from_zero_in_all_data_sets_together_are_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.csv").write_text("a,y\n" + "".join(f"{number},{number % 20}\n" for number in range(60)))
    arguments = ["--source", "csv", "--input", str(tmp_path / "in.csv"), "--label", "y", "--eval_fraction", "0.2"]
    assert command.main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert "Training needs" not in capsys.readouterr().out


def test_a_dry_run_takes_no_label_for_missing_that_comes_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = [0, 2] * 1_000 + [1] * 10
    (tmp_path / "in.csv").write_text("a,y\n" + "".join(f"{number},{y}\n" for number, y in enumerate(labels)))
    arguments = ["--source", "csv", "--input", str(tmp_path / "in.csv"), "--label", "y"]
    assert command.main([*arguments, "--dry_run", "true"]) == 0
    assert "Training needs" not in capsys.readouterr().out
