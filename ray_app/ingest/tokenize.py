"""Texts to tokens, by a tokenizer of the user's own, and the tokens of texts, one after the other, to blocks of one
length.
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
_AT_ONCE = 256
"""Texts that are encoded together."""


class Texts:
    """Encodes the column of texts of an ingest.

    Args:
        options: With a `tokenizer`.

    Raises:
        ConfigError: The library is not installed, or the file is no tokenizer, or lacks the token to end texts with.
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
        except Exception as error:  # the library raises Exception itself
            raise ConfigError(
                f"tokenizer {options.tokenizer!r} cannot be read: {error}. Give a JSON file that the library tokenizers"
                f" has saved"
                " (tokenizer.json)."
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

    def encoded(self, table: pa.Table, refuse: base.Refuse) -> pa.Table:
        """The table with the column `tokens` (lists of int32) in the place of the texts, without rows that have none.

        Raises:
            DataError: There is no such column, or it holds no text.
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
        for row_id in table["row_id"].filter(pc.is_null(table[name])).to_pylist():
            refuse(row_id, f"no {name}; every row needs a text")
        table = table.filter(pc.is_valid(table[name]))
        found = self._ids(table[name].to_pylist())
        lengths = np.array([len(ids) for ids in found], np.int64)
        if not self._options.pack:
            for row_id in table["row_id"].filter(pa.array(lengths == 0)).to_pylist():
                refuse(row_id, f"the tokenizer makes no token of its {name}")
            found, table = [ids for ids in found if len(ids)], table.filter(pa.array(lengths > 0))
        tokens = _lists(
            np.concatenate([*found, np.empty(0, np.int32)]), np.array([len(ids) for ids in found], np.int64)
        )
        return table.drop_columns([name]).append_column(TOKENS, tokens)

    def _ids(self, texts: list[str]) -> list[npt.NDArray[np.int32]]:
        parts = (
            self._tokenizer.encode_batch_fast(texts[low : low + _AT_ONCE]) for low in range(0, len(texts), _AT_ONCE)
        )
        return [np.array(one.ids + self._end, np.int32) for part in parts for one in part]


def _lists(values: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]) -> pa.ListArray:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.int32()))


class Packed:
    """Puts the tokens of texts one after the other and writes them as blocks of one length, each token once; the last
    block may be shorter.

    A block is called by the text and the token of it that it begins with: `a.jsonl:17@384`.

    Args:
        sink: What takes the blocks.
        length: Tokens of a block.
    """

    def __init__(self, sink: Runs, length: int) -> None:
        self._sink, self._length = sink, length
        self._left, self._name = np.empty(0, np.int32), ""
        self.rows = 0

    def write(self, table: pa.Table) -> None:
        """Adds texts as `Texts.encoded` gives them; their other columns are not kept."""
        if not table.num_rows:
            return
        self.rows += table.num_rows
        lists = table[TOKENS].combine_chunks()
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(pc.list_value_length(lists).to_numpy())[:-1]]) + len(
            self._left
        )
        values = np.concatenate([self._left, pc.list_flatten(lists).to_numpy()])
        begins = np.arange(0, len(values), self._length)
        text_of = np.searchsorted(starts, begins, side="right") - 1
        ids = table["row_id"].to_pylist()
        names = [
            f"{ids[text]}@{at - starts[text]}" if text >= 0 else self._name
            for text, at in zip(text_of, begins, strict=True)
        ]
        full = len(values) // self._length
        self._put(values[: full * self._length], names[:full])
        self._left, self._name = values[full * self._length :], names[full] if full < len(names) else ""

    def close(self) -> None:
        """Writes what is left as one block that is shorter, and ends the sink."""
        if len(self._left):
            self._put(self._left, [self._name])
        self._sink.close()

    def description(self) -> dict[str, Any]:
        """That of the sink, and how many `texts` are in it."""
        return self._sink.description() | {"texts": self.rows}

    def _put(self, values: npt.NDArray[np.int32], names: list[str]) -> None:
        if names:
            lengths = np.minimum(self._length, len(values) - np.arange(len(names)) * self._length)
            self._sink.write(base.make_table(names, {TOKENS: _lists(values, lengths)}))
