"""The options of each format, and the combinations of options that an ingest refuses."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, get_args

import pytest

from ray_app.config.rules import Rule, find_broken_rules
from ray_app.errors import ConfigError
from ray_app.ingest.ingest import FORMATS, READERS, ingest
from ray_app.ingest.options import RULES, FormatTraits, IngestOptions, Source
from tests.support.ingest_sources import OBJECTS, SOURCES

REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("new_classes", {"append": True, "new_classes": True}, {"append": False}),
    ("mask_values", {"masks": "m", "mask_values": "0=a"}, {"masks": None}),
    ("label", {"source": "images", "labels": "l.csv", "label": "k"}, {"labels": None}),
    ("columns", {"source": "images", "labels": "l.csv", "columns": ["k"]}, {"labels": "none"}),
    ("targets", {"source": "images", "labels": "l.csv", "targets": ["k"]}, {"labels": None}),
    ("ragged", {"ragged": ["k"], "tokenizer": "t.json"}, {"pack": 8}),
    ("targets", {"targets": ["k"], "tokenizer": "t.json"}, {"pack": 8}),
    ("ids", {"ids": ["k"], "tokenizer": "t.json"}, {"pack": 8}),
    ("ids", {"ids": ["k"], "drop": ["a"]}, {"drop": ["k"]}),
    ("ids_of", {"ids": ["k"], "ids_of": "d"}, {"ids": None}),
    ("text", {"text": "body", "tokenizer": "t.json"}, {"tokenizer": None}),
    ("end_of_text", {"end_of_text": "<>", "tokenizer": "t.json"}, {"tokenizer": None}),
    ("pack", {"pack": 8, "tokenizer": "t.json"}, {"tokenizer": None}),
    ("targets", {"targets": ["a", "b"]}, {"targets": ["a", "a"]}),
    ("targets", {}, {"targets": []}),
    ("targets", {"targets": ["a"], "label": "b"}, {"label": "a"}),
    ("targets", {"targets": ["a"], "drop": ["b"]}, {"drop": ["a"]}),
    ("targets", {"targets": ["a"], "rename": {"b": "a"}}, {"rename": {"a": "b"}}),
    *(("delimiter", {"delimiter": "\\t"}, {"delimiter": text}) for text in ("", ";;", '"', "\n")),
    ("delimiter", {"decimal": ",", "delimiter": ";"}, {"delimiter": ","}),
    ("classes", {"label": "k", "classes": ["a", "b"]}, {"classes": ["a", "a"]}),
    ("classes", {"label": "k", "classes": ["a", "b"]}, {"label": None}),
    ("columns", {"columns": ["a"]}, {"columns": []}),
    ("column_names", {"column_names": ["a"]}, {"column_names": []}),
    ("column_names", {"column_names": ["a"]}, {"column_names": ["a", "a"]}),
    ("group", {"group": "a", "label": "k"}, {"label": "a"}),
    ("split_by", {"split_by": "a"}, {"group": "b"}),
    ("shuffle", {"shuffle": False}, {"pack": 8, "tokenizer": "t.json"}),
    ("shuffle", {"shuffle": False}, {"source": "coco"}),
    ("stratify", {"stratify": True}, {"group": "b"}),
]


def options_of(**values: Any) -> IngestOptions:
    return IngestOptions(**({"source": "csv"} | values))


@pytest.mark.parametrize(("name", "valid", "change"), REFUSED, ids=str)
def test_a_combination_is_refused_and_the_one_before_is_accepted(
    name: str, valid: dict[str, Any], change: dict[str, Any]
) -> None:
    assert find_broken_rules(options_of(**valid), RULES) == []
    problems = find_broken_rules(options_of(**valid | change), RULES)
    assert any(problem.startswith(f"{name} is ") for problem in problems), problems
    assert all(problem.endswith(".") for problem in problems)


def test_each_rule_has_a_combination_that_breaks_it() -> None:
    all_options = [options_of(**valid | change) for _, valid, change in REFUSED]
    assert {rule for rule in RULES if any(rule.is_broken(options) for options in all_options)} == set[Rule](RULES)


def test_each_source_has_a_reader() -> None:
    assert set(get_args(Source)) == {*READERS, "parquet"} == {"digits", *(n.split(",")[0] for n in SOURCES | OBJECTS)}
    described = inspect.getdoc(IngestOptions) or ""
    assert [source for source in get_args(Source) if f"{source}: " not in described] == []


@pytest.mark.parametrize("name", READERS)
def test_the_options_of_a_format_exist(name: str) -> None:
    assert READERS[name].traits.options <= {field.name for field in fields(IngestOptions)}


def test_an_option_of_another_format_is_refused_with_the_formats_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    options = IngestOptions("numpy", "out", "in.npz", delimiter=";")
    with pytest.raises(ConfigError, match=r"delimiter is ';', an option only of csv; leave it out for 'numpy'\."):
        ingest(options)
    monkeypatch.setitem(FORMATS, "idx", FormatTraits(options=frozenset({"delimiter"})))
    with pytest.raises(ConfigError, match="an option only of csv, idx"):
        ingest(options)
