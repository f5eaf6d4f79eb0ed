"""Tokens of texts, and blocks of tokens.

`Texts` encodes a column of texts by the user's tokenizer. `Packed` cuts the tokens of successive texts into blocks of
one length.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.config.import_paths import require
from ray_app.errors import ConfigError, DataError
from ray_app.ingest.options import IngestOptions
from ray_app.ingest.readers import base
from ray_app.ingest.shuffle import Runs
from ray_app.storage.data_files import HEAD_BYTES, name_foreign_file
from ray_app.storage.files import to_location

TOKENS = "tokens"
"""Name of the column of tokens."""
_BATCH_TEXTS = 256
"""Number of texts that are encoded together."""


def without_rows(table: pa.Table, bad: pa.Array | pa.ChunkedArray, refuse: base.Refuse, reason: str) -> pa.Table:
    """Refuses the rows of a mask, (rows,), and returns the others."""
    for row_id in table["row_id"].filter(bad).to_pylist():
        refuse(row_id, reason)
    return table.filter(pc.invert(bad))


class Texts:
    """Encodes the column of texts of an ingest.

    Raises:
        ConfigError: The library is not installed, the file is not a tokenizer, or it lacks the token `end_of_text`.
    """

    def __init__(self, options: IngestOptions) -> None:
        require("tokenizers", f"--tokenizer {options.tokenizer}")
        from tokenizers import Tokenizer

        self._options = options
        try:
            content = to_location(str(options.tokenizer)).read_bytes()
            if foreign := name_foreign_file(content[:HEAD_BYTES]):
                raise ValueError(f"it is {foreign}")
            self._tokenizer = Tokenizer.from_str(content.decode())
        except Exception as error:
            # The library raises `Exception` itself.
            raise ConfigError(
                f"tokenizer {options.tokenizer!r} cannot be read: {error}. Give a JSON file that the library tokenizers"
                " has saved (tokenizer.json)."
            ) from error
        self.digest = hashlib.sha256(content).hexdigest()
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._end: list[int] = []
        if options.end_of_text is not None:
            if (end := self._tokenizer.token_to_id(options.end_of_text)) is None:
                raise ConfigError(
                    f"end_of_text {options.end_of_text!r} is no token of {options.tokenizer}; name one of its"
                    f" vocabulary."
                )
            self._end = [end]

    def encode(self, table: pa.Table, refuse: base.Refuse) -> pa.Table:
        """Returns the table with the column `tokens` (lists of int32) instead of texts; refuses rows without a text.

        Raises DataError without a column of texts, and ConfigError if another column has the name of the tokens.
        """
        name = self._options.text
        if name not in table.column_names:
            raise DataError(
                f"{self._options.input}: no column {name!r} of texts; the columns are {table.column_names[1:]}. Name"
                f" one by text."
            )
        if not pa.types.is_string(table[name].type):
            raise DataError(
                f"{self._options.input}: column {name!r} holds {table[name].type}, no text. Name another one by text."
            )
        if TOKENS in table.column_names and name != TOKENS:
            raise ConfigError(
                f"the column {name!r} becomes {TOKENS!r}, but there is another one of that name. Give it a name by"
                f" rename."
            )
        table = without_rows(table, pc.is_null(table[name]), refuse, f"no {name}; every row needs a text")
        token_ids = self._encode(table[name].to_pylist())
        lengths = np.array([len(ids) for ids in token_ids], np.int64)
        if not self._options.pack:
            table = without_rows(table, pa.array(lengths == 0), refuse, f"the tokenizer makes no token of its {name}")
            token_ids = [ids for ids in token_ids if len(ids)]
        tokens = _to_lists(
            np.concatenate([*token_ids, np.empty(0, np.int32)]), np.array([len(ids) for ids in token_ids], np.int64)
        )
        return table.drop_columns([name]).append_column(TOKENS, tokens)

    def _encode(self, texts: list[str]) -> list[npt.NDArray[np.int32]]:
        batches = (
            self._tokenizer.encode_batch_fast(texts[low : low + _BATCH_TEXTS])
            for low in range(0, len(texts), _BATCH_TEXTS)
        )
        return [np.array(encoding.ids + self._end, np.int32) for batch in batches for encoding in batch]


def _to_lists(values: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]) -> pa.ListArray:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.int32()))


class Packed:
    """Concatenates the tokens of texts and writes them as blocks of one length, each token once.

    The last block may be shorter. The id of a block names the text and the token in it at which the block begins:
    `a.jsonl:17@384`.
    """

    def __init__(self, sink: Runs, length: int) -> None:
        self._sink, self._length = sink, length
        self._rest, self._rest_id = np.empty(0, np.int32), ""
        self.rows = 0

    def write(self, table: pa.Table) -> None:
        """Adds texts as `Texts.encode` returns them; their other columns are dropped."""
        if not table.num_rows:
            return
        self.rows += table.num_rows
        lists = table[TOKENS].combine_chunks()
        text_lengths = pc.list_value_length(lists).to_numpy()
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(text_lengths)[:-1]]) + len(self._rest)
        values = np.concatenate([self._rest, pc.list_flatten(lists).to_numpy()])
        begins = np.arange(0, len(values), self._length)
        text_of = np.searchsorted(starts, begins, side="right") - 1
        ids = table["row_id"].to_pylist()
        block_ids = [
            f"{ids[text]}@{begin - starts[text]}" if text >= 0 else self._rest_id
            for text, begin in zip(text_of, begins, strict=True)
        ]
        full = len(values) // self._length
        self._write_blocks(values[: full * self._length], block_ids[:full])
        self._rest, self._rest_id = values[full * self._length :], block_ids[full] if full < len(block_ids) else ""

    def close(self) -> None:
        """Writes the remaining tokens as one shorter block, and closes the sink."""
        if len(self._rest):
            self._write_blocks(self._rest, [self._rest_id])
        self._sink.close()

    def description(self) -> dict[str, Any]:
        """Returns the description of the sink, with the number of `texts`."""
        return self._sink.description() | {"texts": self.rows}

    def _write_blocks(self, values: npt.NDArray[np.int32], block_ids: list[str]) -> None:
        if block_ids:
            lengths = np.minimum(self._length, len(values) - np.arange(len(block_ids)) * self._length)
            self._sink.write(base.make_table(block_ids, {TOKENS: _to_lists(values, lengths)}))
