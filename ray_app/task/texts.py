"""Encoding of texts by a tokenizer of the library `tokenizers`, in an ingest and in a prediction."""

import numpy as np
import numpy.typing as npt

from ray_app.config.import_paths import require

TOKENS = "tokens"
"""The column of tokens, which stands in the place of the column of texts."""
TOKENIZER_FILE = "_tokenizer.json"
"""The file of a data set, and of a package, with the arguments of its `TextEncoder`."""
_BATCH_TEXTS = 256
"""Number of texts that are encoded together."""


class TextEncoder:
    """Turns texts into tokens.

    Args:
        content: The JSON of a tokenizer, as the library `tokenizers` saves it.
        end_of_text: The token that is added at the end of each text.
        column: The column of texts.

    Raises:
        ConfigError: The library is not installed.
        LookupError: The tokenizer lacks the token `end_of_text`.
        Exception: The content is not a tokenizer.
    """

    def __init__(self, content: str, end_of_text: str | None, column: str) -> None:
        require("tokenizers", "Encoding texts")
        from tokenizers import Tokenizer

        self.stored = {"tokenizer": content, "end_of_text": end_of_text, "column": column}
        self._tokenizer = Tokenizer.from_str(content)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        end = None if end_of_text is None else self._tokenizer.token_to_id(end_of_text)
        if end_of_text is not None and end is None:
            raise LookupError(end_of_text)
        self._end = [] if end is None else [end]

    @property
    def column(self) -> str:
        """The column of texts."""
        return str(self.stored["column"])

    def encode(self, texts: list[str]) -> list[npt.NDArray[np.int32]]:
        """Returns the tokens of each text."""
        batches = (
            self._tokenizer.encode_batch_fast(texts[low : low + _BATCH_TEXTS])
            for low in range(0, len(texts), _BATCH_TEXTS)
        )
        return [np.array(encoding.ids + self._end, np.int32) for batch in batches for encoding in batch]
