"""Ingest tokenizes texts with the user's tokenizer and packs them into blocks of one length, each token once."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from ray_app.data.dataset import open_dataset
from ray_app.errors import ConfigError, DataError
from ray_app.ingest.ingest import IngestOptions, ingest, run_in_threads
from ray_app.ingest.splits import Packed
from ray_app.task.ragged import Ragged
from tests.support.ingest_inputs import read_columns
from tests.support.paths import SUPPORT

WORDS = {"?": 0, "<end>": 1} | {word: number for number, word in enumerate("abcdefghij", 2)}
LINES = [{"text": "a b c", "kind": "x"}, {"text": "d z", "kind": "y"}, {"text": "e", "kind": "x"}]
IDS = [[2, 3, 4], [5, 0], [6]]


@pytest.fixture
def words(tmp_path: Path) -> str:
    """Returns the file of a tokenizer that pads and truncates by default."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_padding(length=7)
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "words.json"))
    return str(tmp_path / "words.json")


def write_lines(folder: Path, files: list[list[dict[str, Any]]]) -> str:
    folder.mkdir()
    for number, lines in enumerate(files):
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_texts_become_tokens_beside_the_other_columns(tmp_path: Path, words: str) -> None:
    folder = write_lines(tmp_path / "in", [LINES])
    ingest(IngestOptions("jsonl", str(tmp_path / "out"), folder, label="kind", tokenizer=words))
    assert read_columns(tmp_path / "out") == {
        "row_id": [f"0.jsonl:{i}" for i in (1, 2, 3)],
        "label": [0, 1, 0],
        "tokens": IDS,
    }
    facts = open_dataset(str(tmp_path / "out")).facts.columns["tokens"]
    assert facts.kind == "list"
    (tmp_path / "rows.csv").write_text("said,n\n" + "".join(f"{line['text']},{i}\n" for i, line in enumerate(LINES)))
    options = IngestOptions(
        "csv", str(tmp_path / "csv"), str(tmp_path / "rows.csv"), tokenizer=words, text="said", end_of_text="<end>"
    )
    ingest(options)
    columns = read_columns(tmp_path / "csv")
    assert (columns["n"], columns["tokens"]) == ([0, 1, 2], [[*ids, 1] for ids in IDS])
    summary = ingest(
        IngestOptions("hf", str(tmp_path / "hf"), str(SUPPORT / "hf" / "saved"), columns=["text"], tokenizer=words)
    )
    assert {part.columns["tokens"]["type"] for part in summary.parts.values()} == {"list<item: int32>"}


def test_blocks_have_each_token_once_with_any_number_of_threads(tmp_path: Path, words: str) -> None:
    random = np.random.default_rng(0)
    texts = [
        [{"text": " ".join(random.choice([*"abcdefghij"], random.integers(0, 30)))} for _ in range(80)]
        for _ in range(3)
    ]
    folder = write_lines(tmp_path / "in", texts)
    size = max(file.stat().st_size for file in Path(folder).iterdir())
    outputs = []
    for threads in (1, 3):
        options = {"tokenizer": words, "end_of_text": "<end>", "pack": 16, "eval_fraction": 0.3, "split_bytes": size}
        summary = ingest(
            IngestOptions("jsonl", str(tmp_path / str(threads)), folder, **options),
            partial(run_in_threads, threads=threads),
        )
        assert summary.reused is False
        outputs.append(
            {part: read_columns(tmp_path / str(threads) / part, as_stored=True) for part in ("train", "eval")}
        )
    assert outputs[0] == outputs[1]
    tokens, texts_by_part = Counter[int](), dict[str, set[str]]()
    for part, columns in outputs[0].items():
        assert columns.keys() == {"row_id", "tokens"}
        lengths = Counter(map(len, columns["tokens"]))
        assert lengths[16] >= sum(lengths.values()) - 3, "an input split should have one shorter block, its last"
        tokens.update(token for block in columns["tokens"] for token in block)
        texts_by_part[part] = {row_id.partition("@")[0] for row_id in columns["row_id"]}
        description = json.loads((tmp_path / "1" / part / "_dataset.json").read_text())
        assert description["rows"] == len(columns["tokens"])
    assert not texts_by_part["train"] & texts_by_part["eval"], "a text is in both parts"
    assert tokens == Counter(
        WORDS[word] for file in texts for line in file for word in [*line["text"].split(), "<end>"]
    )
    source_rows = [
        json.loads((tmp_path / "1" / part / "_dataset.json").read_text())["rows_in"] for part in ("train", "eval")
    ]
    assert sum(source_rows) == 240


class ListSink:
    """A sink that collects the blocks in a list."""

    def __init__(self) -> None:
        self.blocks: list[tuple[str, list[int]]] = []

    def write(self, table: pa.Table) -> None:
        self.blocks += zip(table["row_id"].to_pylist(), table["tokens"].to_pylist(), strict=True)

    def close(self) -> None:
        """Does nothing, since no file is open."""


def pack_texts(texts: list[list[int]], cuts: list[int], length: int) -> list[tuple[str, list[int]]]:
    sink = ListSink()
    blocks = Packed(sink, length)
    bounds = sorted({0, len(texts), *(cut % (len(texts) + 1) for cut in cuts)})
    for low, high in pairwise(bounds):
        ids = [f"t{number}" for number in range(low, high)]
        blocks.write(pa.table({"row_id": ids, "tokens": pa.array(texts[low:high], pa.list_(pa.int32()))}))
    blocks.close()
    assert blocks.rows == len(texts)
    return sink.blocks


@given(
    st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=12),
    st.lists(st.integers(0, 12), max_size=4),
    st.integers(1, 7),
)
@settings(deadline=None)
def test_blocks_depend_on_the_texts_alone(texts: list[list[int]], cuts: list[int], length: int) -> None:
    positions = [
        (f"t{number}@{offset}", token) for number, text in enumerate(texts) for offset, token in enumerate(text)
    ]
    expected = [
        (positions[low][0], [token for _, token in positions[low : low + length]])
        for low in range(0, len(positions), length)
    ]
    assert pack_texts(texts, cuts, length) == expected


def test_another_tokenizer_is_another_data_set(tmp_path: Path, words: str) -> None:
    folder = write_lines(tmp_path / "in", [LINES])
    options = IngestOptions("jsonl", str(tmp_path / "out"), folder, columns=["text"], tokenizer=words)
    assert not ingest(options).reused
    assert ingest(options).reused
    Path(words).write_text(Path(words).read_text().replace('"a"', '"A"'))
    with pytest.raises(ConfigError, match="was written with other options: tokenizer"):
        ingest(options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"text": "said"}, r"no column 'said' of texts; the columns are \['text', 'n'\]"),
        ({"text": "n"}, "column 'n' holds int64, not text"),
        ({"rename": {"n": "tokens"}}, "becomes 'tokens', but the data has another column of this name"),
        ({"end_of_text": "<eos>"}, "end_of_text '<eos>' is not a token of "),
        ({"tokenizer": None, "pack": 8}, "pack is 8, which needs --tokenizer"),
        ({"pack": 0}, "pack is 0; it must be at least 1"),
        ({"tokenizer": "missing.json"}, "tokenizer 'missing.json' cannot be read: .*no such file"),
        ({}, "row 0.jsonl:2: no text; every row needs a text"),
        ({"on_bad_row": "skip"}, None),
    ],
)
def test_texts_that_cannot_be_tokenized_are_refused_with_a_reason(
    options: dict[str, Any], expected: str | None, tmp_path: Path, words: str
) -> None:
    folder = write_lines(tmp_path / "in", [[{"text": "a", "n": 1}, {"text": None, "n": 2}, {"text": "", "n": 3}]])
    ingest_options = IngestOptions("jsonl", str(tmp_path / "out"), folder, **({"tokenizer": words} | options))
    if expected is not None:
        with pytest.raises((ConfigError, DataError), match=f"(?i){expected}"):
            ingest(ingest_options)
        return
    assert ingest(ingest_options).rows == 1
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "out" / "_refused.jsonl").read_text().splitlines()]
    assert reasons == ["no text; every row needs a text", "the tokenizer makes no token from its text"]


def test_packed_blocks_have_less_than_one_percent_of_padding() -> None:
    """The ratio is computed over useful tokens, in micro-batches of 8 of the lengths of the tests of `by_length`."""
    lengths = np.random.default_rng(0).lognormal(3.5, 0.6, 300).astype(int) + 1
    blocks = Ragged.of(
        [tokens for _, tokens in pack_texts([[1] * int(length) for length in lengths], [], 64)], np.int32
    )
    batches = [blocks.padded(np.arange(len(blocks))[low : low + 8]) for low in range(0, len(blocks), 8)]
    assert len(blocks.values) == lengths.sum()
    assert sum(batch.size for batch in batches) / len(blocks.values) <= 1.01
