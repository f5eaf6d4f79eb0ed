"""The traits of the raw formats, which belong to the classes of their readers."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import get_args

import pytest

from ray_app.errors import ConfigError
from ray_app.ingest.ingest import READERS, ingest
from ray_app.ingest.options import FormatTraits, IngestOptions, Source


def test_each_source_has_a_reader() -> None:
    assert set(get_args(Source)) == {*READERS, "parquet"}
    described = inspect.getdoc(IngestOptions) or ""
    assert [source for source in get_args(Source) if f"{source}: " not in described] == []


@pytest.mark.parametrize("name", READERS)
def test_the_options_of_a_format_exist(name: str) -> None:
    assert READERS[name].traits.options <= {field.name for field in fields(IngestOptions)}


def test_an_option_of_another_format_is_refused_with_the_formats_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    options = IngestOptions("numpy", "out", "in.npz", delimiter=";")
    with pytest.raises(ConfigError, match=r"delimiter is ';': only csv has it; leave it out for 'numpy'\."):
        ingest(options)
    monkeypatch.setattr(READERS["idx"], "traits", FormatTraits(options=frozenset({"delimiter"})))
    with pytest.raises(ConfigError, match="only csv, idx have it"):
        ingest(options)
