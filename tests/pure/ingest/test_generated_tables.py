"""Generated tables are read back as pandas, pyarrow, Polars, DuckDB and Python wrote them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from ray_app.errors import RayAppError
from tests.support.generated_programs import assert_none_differs
from tests.support.generated_tables import GRAMMAR, Program, draw, find_difference, ingest_program, read_back, write

SEARCHED = 1000
ALLOWED = {
    "CSV parse error: Row #2: Expected": "One name alone is in single quotes; nothing tells the quote; refused.",
    "holds month_day_nano_interval": "DuckDB's intervals have months, which have no length; refused.",
    "is read as 'NA": "A word in a column of text is a word (docs/data.md), and a missing one with null='NA'.",
    "not JSON: ": "JSON has no infinity, though Python writes one; refused with the remedy.",
    "which float64 would round": "JSON has no type for such integers; refused.",
    "has no value at all": "A key that is null in each line has no type; refused with the remedy.",
    "null words: ": "NA in a column without another word is a gap, as pandas reads it.",
    "(timedelta) is read as": "pyarrow writes durations to a CSV as whole numbers of their unit.",
    "float64 represents decimals of at most 15 digits": "No other number than the one written is stored.",
}
"""Differences that are right, by a part of their text, with the reason."""


def difference(program: Program) -> str:
    """Returns how a table differs from what was written; empty if it does not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written, values = write(program, folder)
        try:
            ingest_program(program, written, folder / "out")
            text = find_difference(program, read_back(folder / "out"), values)
        except RayAppError as error:
            text = f"refused: {error}".replace(name, "")
        return "" if any(reason in text for reason in ALLOWED) else text


@pytest.mark.parametrize("seed", range(3))
def test_a_generated_table_is_read_as_it_was_written(seed: int) -> None:
    assert_none_differs(GRAMMAR, [draw(seed)], difference)


@pytest.mark.search
@pytest.mark.timeout(3600)
def test_generated_tables_are_read_as_they_were_written() -> None:
    assert_none_differs(GRAMMAR, map(draw, range(SEARCHED)), difference)
